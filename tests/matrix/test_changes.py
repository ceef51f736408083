"""May a model change under management? What must be followed is followed, what must not be is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from tests.matrix.models import DENSE, WIDTH, Decoder, DecoderLayer, GatedMLP
from tests.support.compare import Outcome, assert_same, on_cpu
from tests.support.loops import adamw, train
from tests.support.models import linears
from tests.support.offloaded import assert_exact, assert_streamed, offload


def settled(device: torch.device, share: float = 0.4) -> tuple[Any, headrace.Offloaded]:
    """An offloaded model that follows a plan."""
    model = DENSE.build()
    handle = offload(model, device, share)
    train(model, DENSE.on(device), DENSE.forward)
    return model, handle


def assert_still_exact(model: nn.Module, handle: headrace.Offloaded, device: torch.device) -> None:
    """The model trains on as a plain one with its weights would."""
    plain = DENSE.build()
    plain.load_state_dict({name: on_cpu(tensor) for name, tensor in model.state_dict().items()})
    model.zero_grad()
    assert_same(train(model, DENSE.on(device), DENSE.forward), train(plain.to(device), DENSE.on(device), DENSE.forward))
    assert_streamed(handle, model)


# followed ------------------------------------------------------------------------------------------------------------
def test_requires_grad_toggled(compute_device: torch.device) -> None:
    def script(model: Any) -> Outcome:
        outcome = Outcome()
        for freeze in (lambda name: "layers.2" in name, lambda name: "norm" not in name, lambda name: False):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not freeze(name))
            optimizer = adamw([p for p in model.parameters() if p.requires_grad])
            for batch in DENSE.on(compute_device)[:2]:
                output, loss = DENSE.forward(model, batch)
                loss.backward()
                outcome.outputs.append(on_cpu(output))
                outcome.read_gradients(model)
                optimizer.step()
                model.zero_grad()
        return outcome.read(model)

    assert_exact(DENSE.build, script, compute_device)


def test_hooks_on_parameters(compute_device: torch.device) -> None:
    """A hook may replace the gradient; the one after accumulation may step an optimizer and drop the gradient."""

    def script(model: Any) -> Outcome:
        outcome = Outcome()
        seen: list[str] = []
        hooks = []
        for name, parameter in model.named_parameters():
            hooks.append(parameter.register_hook(lambda gradient: gradient * 2))
            optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=False)

            def step(parameter: Tensor, name: str = name, optimizer: Any = optimizer) -> None:
                seen.append(name)
                optimizer.step()
                optimizer.zero_grad()

            hooks.append(parameter.register_post_accumulate_grad_hook(step))
        for batch in DENSE.on(compute_device):
            output, loss = DENSE.forward(model, batch)
            loss.backward()
            outcome.outputs.append(on_cpu(output))
        assert sorted(seen) == sorted(3 * [name for name, _ in model.named_parameters()])
        assert all(parameter.grad is None for parameter in model.parameters())
        for hook in hooks:
            hook.remove()
        DENSE.forward(model, DENSE.on(compute_device)[0])[1].backward()
        outcome.read_gradients(model)
        return outcome.read(model)

    assert_exact(DENSE.build, script, compute_device)


def test_hooks_on_modules(compute_device: torch.device) -> None:
    """Forward hooks see homes or leaves with the right values, and may change outputs; backward hooks fire."""
    counts: list[dict[str, int]] = []

    def script(model: Any) -> Outcome:
        fired = {"pre": 0, "post": 0, "backward": 0}
        outcome = Outcome()

        def pre(module: Any, args: Any) -> None:
            fired["pre"] += 1
            outcome.outputs.append(on_cpu(module.mlp.gate.weight).clone())

        def post(_module: Any, _args: Any, output: Tensor) -> Tensor:
            fired["post"] += 1
            return output * 1.5

        def backward(*_: Any) -> None:
            fired["backward"] += 1

        for layer in model.layers[1:4]:
            layer.register_forward_pre_hook(pre)
            layer.register_forward_hook(post)
            layer.register_full_backward_hook(backward)
        trained = train(model, DENSE.on(compute_device), DENSE.forward)
        trained.outputs += outcome.outputs
        counts.append(fired)
        return trained

    assert_exact(DENSE.build, script, compute_device)
    assert counts[0] == counts[1] == {"pre": 9, "post": 9, "backward": 9}


def test_replaced_and_added_modules(compute_device: torch.device) -> None:
    """New parameters come along from the next pass on."""

    class Growing(Decoder):
        extra: nn.Module | None = None

        def forward(self, tokens: Tensor) -> Tensor:
            output = super().forward(tokens)
            return output if self.extra is None else self.extra(output)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Growing()

    def script(model: Any) -> Outcome:
        first = train(model, DENSE.on(compute_device), DENSE.forward)
        torch.manual_seed(7)
        home = next(model.parameters()).device
        model.layers[2] = DecoderLayer(WIDTH, GatedMLP(WIDTH, 64)).to(home)
        model.head.weight = nn.Parameter(torch.randn_like(on_cpu(model.head.weight)).to(home) * 0.1)
        model.extra = nn.Linear(model.head.out_features, model.head.out_features).to(home)
        second = train(model, DENSE.on(compute_device), DENSE.forward)
        second.outputs += first.outputs
        return second

    _, model = assert_exact(make, script, compute_device, 0.6)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def batch_norm() -> nn.Module:
    return nn.BatchNorm1d(8)


def linear() -> nn.Module:
    return nn.Linear(8, 8)


@pytest.mark.parametrize("make", [linear, batch_norm])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_first_forward_of_an_added_module_is_without_gradients(
    make: Callable[[], nn.Module], mode: Any, compute_device: torch.device
) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8).to(compute_device)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plain.load_state_dict(model.state_dict())
    plain.to(compute_device)
    handle = headrace.offload(model, device=compute_device, device_memory="1MiB")
    added = make()
    model.append(added)
    plain.append(copy.deepcopy(added).to(compute_device))
    with mode():
        assert torch.equal(model(batch), plain(batch))
    for _ in range(2):
        for one in (model, plain):
            one(batch).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(on_cpu(ours.grad), on_cpu(theirs.grad))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], on_cpu(tensor)), name
    handle.remove()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_a_module_of_torchscript_that_comes_later_is_refused(compute_device: torch.device) -> None:
    model: Any = linears(4, 8)
    x = torch.ones(2, 8, device=compute_device)
    with headrace.offload(model, device=compute_device):
        expected, plain = model(x), model[1]
        model[1] = torch.jit.script(nn.Linear(8, 8))
        with pytest.raises(headrace.StateError, match=r"'1', which came after .* TorchScript, .* use the plain module"):
            model(x)
        model[1] = plain
        assert torch.equal(model(x), expected)


def test_tied_after_offloading(compute_device: torch.device) -> None:
    """The head gets the embedding's weight, and two layers each other's: each is still the parameter that it was."""

    def script(model: Any) -> Outcome:
        first = train(model, DENSE.on(compute_device), DENSE.forward)
        model.head.weight = model.embedding.weight
        one, other = model.layers[1].mlp, model.layers[2].mlp
        one.up.weight, other.up.weight = other.up.weight, one.up.weight
        second = train(model, DENSE.on(compute_device), DENSE.forward)
        second.outputs += first.outputs
        return second

    assert_exact(DENSE.build, script, compute_device, 0.6)


def test_gradient_of_a_gradient(compute_device: torch.device) -> None:
    """Refused for parameters; a penalty on the gradient of the input works."""

    def penalised(model: Any, device: torch.device) -> Tensor:
        x = torch.ones(2, 4, WIDTH, device=device, requires_grad=True)
        output = model.layers[1].mlp(x).square().sum()
        slope = torch.autograd.grad(output, x, create_graph=True)[0]
        return output + slope.square().sum()

    def script(model: Any) -> Outcome:
        outcome = Outcome()
        for _ in range(3):
            loss = penalised(model, compute_device)
            loss.backward()
            outcome.outputs.append(on_cpu(loss))
            outcome.read_gradients(model)
            model.zero_grad()
        train(model, DENSE.on(compute_device), DENSE.forward)
        return outcome

    _, model = assert_exact(DENSE.build, script, compute_device)
    with pytest.raises(headrace.StateError, match=r"create_graph=True.*torch\.autograd\.grad"):
        DENSE.forward(model, DENSE.on(compute_device)[0])[1].backward(create_graph=True)


# refused -------------------------------------------------------------------------------------------------------------
def by_step(model: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step()


def by_fused_step(model: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()


def by_mul(model: Any) -> None:
    with torch.no_grad():
        model.layers[3].mlp.up.weight.mul_(2)


def by_norm(model: Any) -> None:
    """A small one, which stays on the device."""
    with torch.no_grad():
        model.norm.weight.mul_(2)


@pytest.mark.core(is_settled=True)
@pytest.mark.parametrize("change", [by_step, by_fused_step, by_mul, by_norm])
@pytest.mark.parametrize("is_settled", [False, True], ids=["first", "settled"])
def test_weight_changed_before_backward(
    change: Callable[[Any], None], is_settled: bool, compute_device: torch.device
) -> None:
    model, handle = settled(compute_device)
    if not is_settled:
        handle.remove()
        handle = offload(model, compute_device)
    DENSE.forward(model, DENSE.on(compute_device)[1])[1].backward()
    loss = DENSE.forward(model, DENSE.on(compute_device)[0])[1]
    change(model)
    with pytest.raises(headrace.WeightChangedError, match=r"parameter '.*weight' was modified in place.*version"):
        loss.backward()
    assert issubclass(headrace.WeightChangedError, RuntimeError)  # as PyTorch's own
    assert_still_exact(model, handle, compute_device)


class SelfHarm(DecoderLayer):
    """Changes in place what autograd has saved."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = torch.sigmoid(self.attention(self.attention_norm(x)))
        y.add_(1)
        return x + self.mlp(self.mlp_norm(y))


def test_saved_tensor_changed_in_place(compute_device: torch.device) -> None:
    model, handle = settled(compute_device)
    layer = model.layers[2]
    own = type(layer)
    layer.forward = SelfHarm.forward.__get__(layer)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            DENSE.forward(model, DENSE.on(compute_device)[0])[1].backward()
    del layer.forward
    assert type(layer) is own
    assert_still_exact(model, handle, compute_device)


class WeightHarm(DecoderLayer):
    """Changes its own weight in place when autograd has saved it."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = DecoderLayer.forward(self, x, memory)
        with torch.no_grad():
            self.mlp.up.weight.mul_(1)
        return y


def test_weight_changed_by_the_model_after_its_use(compute_device: torch.device) -> None:
    """As in PyTorch, backward says so."""
    plain = DENSE.build().to(compute_device)
    model, handle = settled(compute_device)
    for harmed, error in ((plain, RuntimeError), (model, headrace.WeightChangedError)):
        layer: Any = harmed.layers[2]
        layer.forward = WeightHarm.forward.__get__(layer)
        with pytest.raises(error, match=r"modified .*in.?place"):
            DENSE.forward(harmed, DENSE.on(compute_device)[0])[1].backward()
        del layer.forward
    assert_still_exact(model, handle, compute_device)


def test_changed_shape(compute_device: torch.device) -> None:
    model, handle = settled(compute_device)
    kept = model.layers[4].mlp.up.weight.data
    model.layers[4].mlp.up.weight.data = torch.zeros(3, 5)
    with pytest.raises(headrace.LayoutError, match=r"layers\.4\.mlp\.up\.weight.*\(64, 32\).*\(3, 5\).*remove\(\)"):
        DENSE.forward(model, DENSE.on(compute_device)[0])
    model.layers[4].mlp.up.weight.data = kept
    assert_still_exact(model, handle, compute_device)


def test_replaced_by_another_shape(compute_device: torch.device) -> None:
    model, handle = settled(compute_device)
    kept = model.layers[4].mlp.up.weight
    model.layers[4].mlp.up.weight = nn.Parameter(torch.zeros(3, 5))
    with pytest.raises(headrace.LayoutError, match=r"layers\.4\.mlp\.up\.weight.*remove\(\)"):
        DENSE.forward(model, DENSE.on(compute_device)[0])
    model.layers[4].mlp.up.weight = kept
    assert_still_exact(model, handle, compute_device)


def test_gradients_by_parameter_are_refused_by_pytorch(compute_device: torch.device) -> None:
    """`torch.autograd.grad` with respect to homes: they are not in the graph."""
    model, handle = settled(compute_device)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(DENSE.forward(model, DENSE.on(compute_device)[0])[1], list(model.parameters()))
    assert_still_exact(model, handle, compute_device)
