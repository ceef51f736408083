"""Is data parallel training around offloaded weights refused in all its ways, and exact when averaged by hand?"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import headrace
from headrace.compat.diffsynth import OffloadTrainingManager
from tests.support.compare import assert_same
from tests.support.loops import steps
from tests.support.models import linears
from tests.support.nursery import Nursery

REFUSAL = r"(?s)each rank would train a model of its own.*headrace.offload\(model, mesh=mesh\)"
WRAPPED = r"(?s)DistributedDataParallel, which would never see gradients.*headrace.offload\(model, mesh=mesh\)"
X = torch.ones(3, 16)


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    if distributed.is_initialized():  # by an earlier test in this process: libraries make groups of one by themselves
        distributed.destroy_process_group()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return linears(6, 16, nn.Tanh)


def offload(model: nn.Module) -> headrace.Offloaded:
    return headrace.offload(model, device="cpu", device_memory=3000)


def check_trains(model: nn.Module) -> None:
    """As a plain model does, bit for bit."""
    plain = stack()
    for one in (model, plain):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        steps(one, optimizer, [X] * 3)
    assert_same(model.parameters(), plain.parameters())


class Other(nn.Module):
    """Another library's wrapper (apex, Megatron), known by its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Whole(nn.Module):
    """A model that the offloaded one is a part of."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "wrap",
    [
        DistributedDataParallel,
        lambda model: DistributedDataParallel(Whole(model)),
        lambda model: DistributedDataParallel(model[2]),
        type("DistributedDataParallel", (Other,), {}),
    ],
)
def test_a_wrapper_around_an_offloaded_model(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = stack()
    handle = offload(model)
    with pytest.raises(headrace.StateError, match=REFUSAL):
        wrap(model)
    check_trains(model)
    assert handle.stats().onload_bytes > 0


def test_data_parallel_in_one_process() -> None:
    """There are no ranks to average over."""
    model = stack()
    with pytest.raises(headrace.StateError, match="wrapped by DataParallel: its copies"):
        offload(DataParallel(model))
    handle = offload(model)
    with pytest.raises(headrace.StateError, match=r"a Sequential with 12 trainable parameters.*on one device") as told:
        DataParallel(model)
    assert "rank" not in str(told.value)
    check_trains(model)
    assert handle.stats().onload_bytes > 0


def test_a_wrapped_model() -> None:
    model = stack()
    wrapped = DistributedDataParallel(model)
    for one in (wrapped, nn.ModuleList([wrapped])):
        with pytest.raises(headrace.StateError, match=WRAPPED):
            offload(one)
    for one in (wrapped.module, model[1]):
        with pytest.raises(headrace.StateError, match=WRAPPED):
            offload(one)
    with pytest.raises(headrace.StateError, match=WRAPPED):
        OffloadTrainingManager(wrapped.module, "cpu")
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    del wrapped, one
    handle = offload(model)
    check_trains(model)
    assert handle.stats().onload_bytes > 0


def test_a_frozen_model_inside_of_a_wrapped_one() -> None:
    """It has no gradients to be averaged."""

    def run(*, offloads: bool) -> list[torch.Tensor]:
        part = stack().requires_grad_(False)
        handle = offload(part) if offloads else None
        model = DistributedDataParallel(Whole(part))
        model(X).sum().backward()
        assert handle is None or handle.stats().onload_bytes > 0
        return [model.module.head.weight.grad]

    assert torch.equal(run(offloads=True)[0], run(offloads=False)[0])


def test_sharded_models() -> None:
    model = stack()
    handle = offload(model)
    # On an accelerator while it wraps, on a CPU at the first forward.
    refusals = headrace.LayoutError, headrace.StateError

    def shard_and_call() -> None:
        for layer in model:
            fully_shard(layer)
        model(X)

    with pytest.raises(refusals, match=r"'0\.0\.weight'.*(is a DTensor now.*mesh=mesh|fully_shard)"):
        shard_and_call()
    handle.remove()
    sharded = stack()
    fully_shard(sharded)
    with pytest.raises(headrace.StateError, match=r"wrapped by FSDPModule.*headrace\.offload\(model, mesh=mesh\)"):
        offload(sharded)


RANK = """
import os, sys, torch, headrace
from torch import distributed, nn

rank, file = int(sys.argv[1]), sys.argv[2]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
distributed.init_process_group("gloo", store=distributed.FileStore(file, 2), rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))
handle = headrace.offload(model, device="cpu", device_memory=3000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * rank + step))
    model(x).square().mean().backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)
        parameter.grad /= 2
    optimizer.step()
    optimizer.zero_grad()
assert handle.stats().onload_bytes > 0
print([parameter.flatten().tolist() for parameter in model.parameters()])
distributed.destroy_process_group()
"""


@pytest.mark.extended
def test_averaging_by_hand(nursery: Nursery, tmp_path: Path) -> None:
    """What the refusals advise: both ranks have the weights of a plain model with the mean of both gradients."""
    ranks = [nursery.start(RANK, rank, tmp_path / "store") for rank in range(2)]
    plain = stack()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        for rank in range(2):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * rank + step))
            plain(x).square().mean().backward()
        for parameter in plain.parameters():
            parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    for one in ranks:
        assert one.read_rest().strip() == str([parameter.flatten().tolist() for parameter in plain.parameters()])
        assert one.wait() == 0, one.errors
