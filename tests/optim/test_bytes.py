"""Are parameters, gradients and states that are not plain bytes refused, by name, before their address is asked for?"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import headrace
from headrace import optim
from headrace.compat import HybridDeviceOptimizer
from headrace.errors import LayoutError
from headrace.weights.model.managed_param import ManagedParam

SHAPE = (4, 4)


class Scaled(torch.Tensor):
    """As quantised and sharded tensors are made: what one sees is computed from tensors inside."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> "Scaled":
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)  # type: ignore[attr-defined]
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = args[0].inside if isinstance(args[0], cls) else args[0]
        return cls(func(inside, *args[1:], **(kwargs or {})))


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(SHAPE)


def freed() -> torch.Tensor:
    tensor = torch.ones(SHAPE)
    tensor.untyped_storage().resize_(0)
    return tensor


def negated() -> torch.Tensor:
    return torch.ones(SHAPE, dtype=torch.complex64).conj().imag


ODD: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "wrapper": (lambda: Scaled(torch.ones(SHAPE)), "it is a Scaled"),
    "fake": (fake, "it is a FakeTensor"),
    "meta": (lambda: torch.ones(SHAPE, device="meta"), "meta device"),
    "sparse": (lambda: torch.ones(SHAPE).to_sparse(), "layout is torch.sparse_coo"),
    "mkldnn": (lambda: torch.ones(SHAPE).to_mkldnn(), "layout is torch._mkldnn"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "layout is nested"),
    "freed": (freed, "storage of 64 bytes was freed"),
    "negated": (negated, "resolve_neg"),
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    **{name: getattr(optim, name) for name in ("AdamW", "Adam", "SGD", "Lion", "Adafactor", "Muon")},
    "HybridDeviceOptimizer": HybridDeviceOptimizer,
}


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(SHAPE))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", list(ODD))
def test_parameters_are_refused_at_once(kind: str) -> None:
    make, reason = ODD[kind]
    with pytest.raises(LayoutError, match=f"parameter 1 cannot be updated in host memory: .*{reason}"):
        optim.SGD([weight(), nn.Parameter(make())])
    optimizer = optim.SGD([("first", weight())])
    with pytest.raises(LayoutError, match=f"parameter 1, 'second', .*{reason}"):
        optimizer.add_param_group({"params": [("second", nn.Parameter(make()))]})
    assert len(optimizer.param_groups) == 1
    held = optimizer.param_groups[0]["params"][0]
    held.grad = torch.ones(SHAPE)
    optimizer.step()
    assert not torch.equal(held, torch.ones(SHAPE))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer_refuses_them(name: str) -> None:
    with pytest.raises(LayoutError, match="it is a Scaled"):
        OPTIMIZERS[name]([nn.Parameter(Scaled(torch.ones(SHAPE)))])
    lazy = nn.LazyLinear(4)
    if name != "Muon":  # which asks for its shape
        with pytest.raises(LayoutError, match="not initialised"):
            OPTIMIZERS[name](lazy.parameters())


@pytest.mark.parametrize("kind", ["wrapper", "freed"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_parameters_that_become_such(name: str, kind: str) -> None:
    first, second = weight(), weight()
    optimizer = OPTIMIZERS[name]([first, second])
    for step in range(2):
        first.grad, second.grad = torch.ones(SHAPE), torch.ones(SHAPE)
        if step == 0:
            optimizer.step()
    before = first.detach().clone()
    if kind == "freed":
        second.untyped_storage().resize_(0)
    else:
        torch.utils.swap_tensors(second, nn.Parameter(Scaled(torch.ones(SHAPE))))
        second.grad = Scaled(torch.ones(SHAPE))
    with pytest.raises(LayoutError, match="parameter 1 cannot be updated"):
        optimizer.step()
    assert torch.equal(first, before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["wrapper", "fake", "freed", "negated"])
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 1.0}])
def test_gradients_are_refused(kind: str, settings: dict[str, Any]) -> None:
    make, reason = ODD[kind]
    first, second = weight(), weight()
    optimizer = optim.AdamW([first, second], **settings)
    first.grad = torch.ones(SHAPE)
    second.grad = make()
    with pytest.raises(LayoutError, match=rf"the gradient of parameter 1 of shape \(4, 4\) .*{reason}"):
        optimizer.step()
    assert torch.equal(first, torch.ones(SHAPE))
    second.grad = torch.ones(SHAPE)
    optimizer.step()
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_states_are_refused(name: str) -> None:
    """State that was sharded, and is loaded as it is."""
    settings: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    held = weight()
    optimizer = OPTIMIZERS[name]([held], **settings)
    held.grad = torch.ones(SHAPE)
    optimizer.step()
    state = optimizer.state[held]
    moment = next(key for key in state if key != "step")
    state[moment] = Scaled(torch.ones(SHAPE))
    before = held.detach().clone()
    with pytest.raises(LayoutError, match=r"a state of a parameter of shape \(4, 4\) .*it is a Scaled"):
        optimizer.step()
    assert torch.equal(held, before)


def test_plain_bytes_of_other_classes_are_taken() -> None:
    """A subclass of Parameter that only carries attributes, as libraries for quantised layers have them."""

    class Marked(nn.Parameter):
        pass

    ours, theirs = Marked(torch.ones(SHAPE)), weight()
    for parameter, optimizer in ((ours, optim.AdamW([ours])), (theirs, torch.optim.AdamW([theirs], fused=True))):
        parameter.grad = torch.full(SHAPE, 0.5)
        optimizer.step()
    assert torch.equal(ours, theirs)


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "HybridDeviceOptimizer"])
@pytest.mark.parametrize("how", ["fully_shard", "distribute_tensor"])
def test_sharded_models(name: str, how: str) -> None:
    """They are updated; a DTensor as the gradient of a plain parameter is refused. See tests/distributed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 4)
    before = OPTIMIZERS[name](model.parameters())
    if how == "fully_shard":
        fully_shard(model, mesh=mesh)
    else:
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    optimizer = OPTIMIZERS[name](model.parameters())
    weight = model.weight.to_local().detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not torch.equal(model.weight.to_local(), weight)
    for parameter in (held := before.param_groups[0]["params"]):  # the ones from before: nobody trains them
        parameter.grad = torch.ones(parameter.shape)
    before.step()
    held[0].grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with pytest.raises(LayoutError, match=r"the gradient of parameter 0 .* DTensor"):
        before.step()


def test_managed_parameters_are_plain_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at them is no look of the user's: nothing is loaded anew because of it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    touched: list[ManagedParam] = []
    monkeypatch.setattr(ManagedParam, "touch", lambda param: touched.append(param))
    with headrace.offload(model, device="cpu"):
        optimizer = optim.AdamW(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert not touched
        assert model[0].weight.data is not None
        assert touched  # which a look of the user's is
