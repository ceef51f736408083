"""Are buffers of modules where a user finds parameters, and as the model wrote them? Whoever writes or keeps them."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import headrace
from headrace.memory.ledger import Tier
from tests.support.compare import Outcome, assert_same, on_cpu
from tests.support.held import weight_bytes
from tests.support.loops import random_batches
from tests.support.models import linears
from tests.support.offloaded import assert_exact

WIDTH = 24


class Counting(nn.Module):
    """Counts, averages in place and through `.data`, and puts new tensors in a buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm(self.linear(x))
        self.average.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.last = x.detach()[0]
        return x + self.average * self.calls


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Counting() for _ in range(4)))


def batches(device: torch.device, count: int = 4) -> list[Tensor]:
    return random_batches(count, 5, WIDTH, device=device)


def script(model: nn.Module, device: torch.device, act: Any = lambda model, step: None) -> Outcome:
    outcome = Outcome()
    for step, batch in enumerate(batches(device)):
        output = model(batch)
        output.square().mean().backward()
        outcome.read_gradients(model)
        outcome.outputs.append(on_cpu(output))
        model.zero_grad()
        act(model, step)
    return outcome.read(model)


@torch.no_grad()
def write(model: Any, step: int) -> None:
    """As a user would, in many ways."""
    layer = model[step]
    layer.norm.reset_running_stats()
    layer.average.data.fill_(0.5)
    layer.average = layer.average * 2
    layer.calls.add_(3)
    if step == 2:
        model.load_state_dict(
            {
                name: tensor * 0.5 if tensor.is_floating_point() else tensor
                for name, tensor in model.state_dict().items()
            }
        )


@pytest.mark.parametrize("act", [lambda model, step: None, write])
def test_results_are_those_of_a_plain_model(act: Any, compute_device: torch.device) -> None:
    handle, model = assert_exact(make, lambda model: script(model, compute_device, act), compute_device, 0.6)
    assert all(type(buffer) is not nn.Parameter and buffer.device.type == "cpu" for buffer in model.buffers())
    assert 0 < handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes


def test_what_was_taken_before_a_pass_shows_what_it_wrote(compute_device: torch.device) -> None:
    model: Any = make()
    with headrace.offload(model, device=compute_device, device_memory=weight_bytes(model)):
        kept = [layer.norm.running_mean for layer in model]
        averaged = AveragedModel(make(), use_buffers=True)
        for batch in batches(compute_device):
            model(batch)
            averaged.update_parameters(model)
        plain: Any = make()
        for batch in batches(torch.device("cpu")):
            plain(batch)
        for tensor, layer in zip(kept, plain, strict=True):
            assert (tensor != 0).any()
            torch.testing.assert_close(torch.as_tensor(tensor.numpy()), layer.norm.running_mean)
        assert all(buffer.device.type == "cpu" for buffer in averaged.buffers())
    assert [id(tensor) for tensor in kept] == [id(layer.norm.running_mean) for layer in model]
    assert all(type(buffer) is Tensor for buffer in model.buffers())


def test_parameters_and_buffers_meet_outside_of_passes(compute_device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        expected = fuse_conv_bn_eval(copy.deepcopy(model[0]), copy.deepcopy(model[1]))(x)
    with headrace.offload(model, device=compute_device), torch.no_grad():
        model(x)
        fused = fuse_conv_bn_eval(model[0], model[1])
        assert type(fused.weight) is nn.Parameter
        assert torch.equal(fused(x), expected)


@pytest.mark.parametrize("applied", ["weight_norm", "spectral_norm", "prune"])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
def test_weights_that_are_remade_after_offload(applied: str, compute_device: torch.device) -> None:
    """`weight_v` takes the place of the `weight` that it replaces, and leaves it to the next one."""

    def remake(model: Any) -> None:
        torch.manual_seed(1)
        for layer in (model[0], model[2]):
            if applied == "prune":
                prune.l1_unstructured(layer, "weight", 0.5)
            else:
                getattr(nn.utils, applied)(layer)
            if applied == "spectral_norm":  # whose first guess comes from the random numbers of the weight's device
                for buffer in (layer.weight_u, layer.weight_v):
                    buffer.copy_(torch.full((WIDTH,), WIDTH**-0.5))

    def unmake(model: Any) -> None:
        for layer in (model[0], model[2]):
            if applied == "prune":
                prune.remove(layer, "weight")
            else:
                getattr(nn.utils, f"remove_{applied}")(layer)

    def run(model: nn.Module) -> Outcome:
        outcome = Outcome()
        for change in (lambda _: None, remake, unmake, lambda _: None):
            change(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
            for batch in batches(compute_device, 2):
                output = model(batch)
                output.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                outcome.outputs.append(on_cpu(output))
        return outcome

    def layers() -> nn.Module:
        torch.manual_seed(0)
        return linears(5, WIDTH)

    plain = run(layers().to(compute_device))
    model = layers()
    with headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) * 2 // 3) as handle:
        assert_same(run(model), plain)
        assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes


def test_functional_call_with_buffers_of_its_own(compute_device: torch.device) -> None:
    """They are what the call reads and writes, and the model has its own again afterwards, also in its passes."""
    torch.manual_seed(0)
    plain: Any = make().to(compute_device)
    model: Any = copy.deepcopy(plain).to("cpu")
    outputs: list[list[Tensor]] = []
    with headrace.offload(model, device=compute_device, device_memory=weight_bytes(model)):
        for one in (plain, model):
            given = {name: torch.ones_like(buffer, device=compute_device) for name, buffer in one.named_buffers()}
            x, again, last = batches(compute_device)[:3]
            called = torch.func.functional_call(one, given, (x,))
            outputs.append([called, *given.values(), one(again), one(last), *one.buffers()])
        for ours, theirs in zip(*reversed(outputs), strict=True):
            assert torch.equal(on_cpu(ours), on_cpu(theirs))
        assert "Buffer" not in repr(model[0].norm.running_mean)


class Shifting(nn.Module):
    """Of which autograd saves a frozen weight, and nothing else; computed again in backward, it counts once more."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH, WIDTH), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x - 0.1 * self.calls) @ self.gain


def test_what_a_checkpoint_computes_again_for_a_weight_alone(compute_device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(Shifting() for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=False))  # type: ignore[arg-type]
            return x

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Model()

    handle, model = assert_exact(build, lambda model: script(model, compute_device), compute_device, 0.6)
    assert [int(layer.calls) for layer in model.layers] == [2 * 4] * 5
    assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes


def test_buffers_of_modules_that_went_are_let_go_of(compute_device: torch.device) -> None:
    """They are ordinary tensors with what passes wrote, and take no room on the device."""
    model: Any = make()
    old, kept = model[1], model[2].last
    written = batches(compute_device)
    with headrace.offload(model, device=compute_device, device_memory=weight_bytes(model)) as handle:
        model(written[0])
        took_bytes = handle._ledger.held_bytes(Tier.DEVICE, "buffers")
        model[1] = make()[1]
        model(written[1])
        assert handle._ledger.held_bytes(Tier.DEVICE, "buffers") == took_bytes
        assert all(type(buffer) is Tensor and not vars(buffer) for buffer in (*old.buffers(), kept))
    plain: Any = make().to(compute_device)
    plain(written[0])
    assert_same(old.buffers(), (on_cpu(buffer) for buffer in plain[1].buffers()))
    assert torch.equal(kept, torch.zeros(WIDTH))
    with headrace.offload(old, device=compute_device):
        assert torch.equal(on_cpu(old(written[1])), on_cpu(plain[1](written[1])))
    assert_same(old.buffers(), (on_cpu(buffer) for buffer in plain[1].buffers()))


def test_a_look_that_is_interrupted(compute_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one finds what the pass wrote."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model: Any = make()
    with headrace.offload(model, device=compute_device, device_memory=weight_bytes(model)):
        model(batches(compute_device)[0])
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "copy_", interrupt)
            for buffer in model.buffers():
                with contextlib.suppress(KeyboardInterrupt):  # there is nothing to copy on a CPU
                    buffer.sum()
        assert [int(layer.calls) for layer in model] == [1] * 4
        assert all((layer.average != 0).any() for layer in model)


def test_a_copy_that_is_interrupted(compute_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model goes on as before."""

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    model: Any = make()
    before = [type(module._parameters) for module in model.modules()]
    with headrace.offload(model, device=compute_device, device_memory=weight_bytes(model)):
        managed = [(type(module._parameters), set(vars(module))) for module in model.modules()]
        with monkeypatch.context() as patch:
            patch.setattr(headrace.weights.passes.managed, "plain_buffer", interrupt)
            with pytest.raises(KeyboardInterrupt):
                copy.deepcopy(model[0].norm)
        assert [(type(module._parameters), set(vars(module))) for module in model.modules()] == managed
    assert [type(module._parameters) for module in model.modules()] == before


class Odd(nn.Module):
    """Buffers that are learned, whose elements share memory, and that other modules have, too."""

    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shared", shared)
        self.register_buffer("learned", torch.ones(WIDTH).requires_grad_())
        self.register_buffer("expanded", torch.full((1,), 2.0).expand(WIDTH))
        whole = torch.arange(2.0 * WIDTH)
        self.register_buffer("first", whole[:WIDTH])
        self.register_buffer("second", whole[WIDTH:])
        self.register_buffer("third", whole[WIDTH + 2 :])

    def forward(self, x: Tensor) -> Tensor:
        self.shared.add_(1)
        self.first.mul_(0.5)
        return self.linear(x * self.learned) * self.expanded + self.first - self.second + self.shared


def test_buffers_of_every_kind_are_there_and_are_let_go_of(compute_device: torch.device) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        shared = torch.zeros(WIDTH)
        return nn.Sequential(*(Odd(shared) for _ in range(3)))

    def run(model: nn.Module, device: torch.device) -> list[Tensor]:
        seen = [model(x) for x in batches(device)]
        torch.stack(seen).sum().backward()
        found = [*seen, *(p.grad for p in model.parameters()), *(part.learned.grad for part in model), *model.buffers()]
        return [tensor.detach().cpu().clone() for tensor in found]

    expected, model = run(build(), torch.device("cpu")), build()
    handle = headrace.offload(model, device=compute_device, device_memory=2 * weight_bytes(model) // 3 + 8192)
    assert_same(run(model, compute_device), expected)
    handle.remove()
    assert {type(buffer) for buffer in model.buffers()} == {Tensor}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    with headrace.offload(model, device=compute_device):
        model(batches(compute_device)[0])
