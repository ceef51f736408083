"""A forward without gradients over weights that all are on the device has no visits: is it as any other?"""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import headrace
from headrace.weights.movement.executor import Executor
from headrace.weights.passes.call import Passes
from tests.support.compare import assert_same, assert_same_gradients
from tests.support.held import weight_bytes
from tests.support.loops import loss_of
from tests.support.models import Decoder

AMPLE = "64MiB"
Visits = list[str]


@pytest.fixture
def plain(decoder: Decoder, compute_device: torch.device) -> Decoder:
    return copy.deepcopy(decoder).to(compute_device)


def settled(decoder: Decoder, tokens: torch.Tensor, *, forwards: int = 4) -> None:
    with torch.no_grad():
        for _ in range(forwards):
            decoder(tokens)


def counted(monkeypatch: pytest.MonkeyPatch) -> Visits:
    """The names of the visits from now on."""
    names: Visits = []
    visit = Executor.visit

    def counting(executor: Executor, blocks: Any, phase: Any, name: str) -> None:
        names.append(name)
        visit(executor, blocks, phase, name)

    monkeypatch.setattr(Executor, "visit", counting)
    return names


def test_nothing_is_visited(decoder, plain, tokens, compute_device, monkeypatch) -> None:
    on_device = tokens.to(compute_device)
    with headrace.offload(decoder, device=compute_device, device_memory=AMPLE) as handle, torch.no_grad():
        settled(decoder, tokens)
        visits = counted(monkeypatch)
        for _ in range(3):
            assert torch.equal(decoder(tokens), plain(on_device))
        assert visits == []
        assert handle.stats().onload_bytes == weight_bytes(decoder)
        assert [span.name for span in handle.report().record.spans if span.lane == "compute"] == ["Decoder forward"]
        for model in (decoder, plain):
            model.layers[2].up.weight.mul_(2)
        assert torch.equal(decoder(tokens), plain(on_device))
        assert "layers.2" in visits


def test_training_and_evaluation_take_turns(decoder, plain, tokens, compute_device, monkeypatch) -> None:
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (decoder, plain)]
    with headrace.offload(decoder, device=compute_device, device_memory=AMPLE):
        visits = counted(monkeypatch)
        for _ in range(4):
            for model, optimizer in zip((decoder, plain), optimizers, strict=True):
                loss_of(model, tokens.to(compute_device)).backward()
                optimizer.step()
            assert_same_gradients(decoder, plain)
            for _ in range(4):
                visits.clear()
                with torch.no_grad():
                    assert torch.equal(decoder(tokens), plain(tokens.to(compute_device)))
            assert visits == []


@pytest.mark.parametrize("how", ["in place", "data"])
def test_gradients_inside(decoder, plain, tokens, compute_device, how) -> None:
    """Switched on by the model itself; what changes before their backward is noticed, or used, as plain."""

    class Inside(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return super().forward(tokens)

    decoder.__class__ = plain.__class__ = Inside
    with headrace.offload(decoder, device=compute_device, device_memory=AMPLE):
        settled(decoder, tokens)
        raised = []
        for model in (decoder, plain):
            with torch.no_grad():
                output = model(tokens.to(compute_device))
                weight = model.layers[1].up.weight
                (weight if how == "in place" else weight.data).mul_(3)
            try:
                output.sum().backward()
            except RuntimeError:
                raised.append(model)
        if how == "in place":
            assert raised == [decoder, plain]
        else:
            assert raised == []
            assert_same_gradients(decoder, plain)


def test_two_backwards_within_a_forward_leave_homes(decoder, plain, tokens, compute_device) -> None:
    class Inside(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[:2]:
                with torch.enable_grad():
                    layer(self.embedding(tokens)).sum().backward()
            return super().forward(tokens)

    decoder.__class__ = plain.__class__ = Inside
    homes = [id(parameter) for parameter in decoder.parameters()]
    with headrace.offload(decoder, device=compute_device, device_memory=AMPLE):
        settled(decoder, tokens)
        decoder.zero_grad()
        with torch.no_grad():
            assert torch.equal(decoder(tokens), plain(tokens.to(compute_device)))
        assert [id(parameter) for parameter in decoder.parameters()] == homes
        assert_same_gradients(decoder, plain, some_missing=True)


@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_later_layer_s_weight_is_written_in_the_pass(decoder, plain, tokens, compute_device, how) -> None:
    with headrace.offload(decoder, device=compute_device, device_memory=AMPLE):
        settled(decoder, tokens)
        outputs = []
        for model in (decoder, plain):
            weight = model.layers[3].up.weight  # kept from before the pass

            def write(*_: object, weight: torch.Tensor = weight) -> None:
                (weight if how == "in place" else weight.data).mul_(1.5)

            hook = model.layers[0].register_forward_hook(write)
            with torch.no_grad():
                outputs += [model(tokens.to(compute_device)) for _ in range(2)]
            hook.remove()
        assert torch.equal(outputs[0], outputs[2])
        assert torch.equal(outputs[1], outputs[3])


def test_autocast_within_the_model(decoder, plain, tokens, compute_device, monkeypatch) -> None:
    """Its cache would keep copies of weights: layers that compute under it are visited."""

    class Mixed(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
                return super().forward(tokens)

    decoder.__class__ = plain.__class__ = Mixed
    with headrace.offload(decoder, device=compute_device, device_memory=AMPLE):
        settled(decoder, tokens)
        visits = counted(monkeypatch)
        with torch.no_grad():
            assert torch.equal(decoder(tokens), plain(tokens.to(compute_device)))
        assert {f"layers.{index}" for index in range(len(decoder.layers))} <= set(visits)


def test_a_weight_that_a_layer_of_an_encoder_keeps(compute_device) -> None:
    """nn.TransformerEncoder looks at homes as they are; its layers use them."""

    class Keeping(nn.TransformerEncoderLayer):
        def __init__(self) -> None:
            super().__init__(16, 2, 32, batch_first=True, dropout=0.0)
            self.extra = nn.Parameter(torch.full((16,), 2.0))
            self.kept = [self.extra]

        def forward(self, src: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            return super().forward(src * self.kept[0], *args, **kwargs)

    torch.manual_seed(0)
    model = nn.TransformerEncoder(Keeping(), 3, enable_nested_tensor=False).eval()
    for layer in model.layers:
        layer.kept = [layer.extra]
    plain = copy.deepcopy(model).to(compute_device)
    for layer in plain.layers:
        layer.kept = [layer.extra]
    x = torch.randn(2, 4, 16)
    with headrace.offload(model, device=compute_device, device_memory=AMPLE), torch.no_grad():
        for _ in range(5):
            assert torch.equal(model(x), plain(x.to(compute_device)))


@pytest.mark.parametrize("break_off", [KeyboardInterrupt, ValueError])
def test_a_forward_that_is_broken_off(decoder, plain, tokens, compute_device, break_off: type[BaseException]) -> None:
    homes = [id(parameter) for parameter in decoder.parameters()]

    def interrupt(*_: object) -> None:
        raise break_off

    with headrace.offload(decoder, device=compute_device, device_memory=AMPLE):
        settled(decoder, tokens)
        hook = decoder.layers[2].register_forward_hook(interrupt)
        with torch.no_grad(), pytest.raises(break_off):
            decoder(tokens)
        hook.remove()
        assert [id(parameter) for parameter in decoder.parameters()] == homes
        for model in (decoder, plain):
            loss_of(model, tokens.to(compute_device)).backward()
        assert_same_gradients(decoder, plain)


def test_an_interrupt_in_a_backward_within_a_forward_is_told(decoder, tokens, monkeypatch) -> None:
    class Inside(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.layers[0](self.embedding(tokens)).sum().backward()
            return super().forward(tokens)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    decoder.__class__ = Inside
    with headrace.offload(decoder, device="cpu", device_memory=AMPLE):
        decoder(tokens)
        monkeypatch.setattr(Passes, "updates_changed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            decoder(tokens)
        monkeypatch.undo()
        homes = list(decoder.parameters())
        assert all(type(parameter).__name__ == "Home" for parameter in homes)
        decoder(tokens).sum().backward()
        assert all(parameter.grad is not None for parameter in homes)


class Inside(nn.Module):
    """Does something to its layers within the forward, once it is `on`."""

    def __init__(self, act: Callable[["Inside", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(4))
        self.act = act
        self.on = False
        self.kept: list[Any] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.act(self, hidden) if self.on else hidden


def module_alone(model: Inside, hidden: torch.Tensor) -> torch.Tensor:
    return model.layers[1][0](hidden)


def functional(model: Inside, hidden: torch.Tensor) -> torch.Tensor:
    weight = model.layers[1][0].weight
    return nn.functional.linear(nn.functional.linear(hidden, model.layers[2][0].weight), weight)


@pytest.mark.core(blocks_that_fit=2)
@pytest.mark.parametrize("blocks_that_fit", [2, 100])
@pytest.mark.parametrize("use", [module_alone, functional])
@pytest.mark.parametrize("change", [None, "in place", "by data"])
def test_gradients_switched_on_inside_see_weights_that_changed_before_backward(
    use, change, blocks_that_fit, compute_device
) -> None:
    def act(model: Inside, hidden: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            model.kept = [hidden.detach().requires_grad_()]
            return use(model, model.kept[0])

    def run(model: Inside) -> list[torch.Tensor]:
        hidden = torch.linspace(-1, 1, 16).view(2, 8).to(compute_device)
        with torch.no_grad():
            for passes in range(6):
                model.on = passes > 4
                output = model(hidden)
            weight = model.layers[1][0].weight
            if change is not None:
                (weight if change == "in place" else weight.data).mul_(3)
        try:
            output.square().sum().backward()
        except RuntimeError:  # modified in place
            return []
        return [output.detach().cpu(), model.kept[0].grad.cpu(), weight.grad.cpu()]

    ours, theirs = both(Inside, act, blocks_that_fit, compute_device, run)
    if change == "in place":
        assert ours == theirs == []
    else:
        assert_same(ours, theirs)


def zero_grad(model: Inside) -> None:
    model.layers[1].zero_grad()


def freeze(model: Inside) -> None:
    model.layers[1].requires_grad_(False)


def keep(model: Inside) -> None:
    model.kept = list(model.parameters())


def keep_of_a_layer(model: Inside) -> None:
    model.kept = list(model.layers[1].parameters())


def make_an_optimizer(model: Inside) -> None:
    model.kept = [torch.optim.SGD(model.parameters(), lr=0.1)]


def move(model: Inside) -> None:
    model.to(model.layers[1][0].weight.device).float()


@pytest.mark.core(blocks_that_fit=2)
@pytest.mark.parametrize("blocks_that_fit", [2, 100])
@pytest.mark.parametrize("on_parameters", [zero_grad, freeze, keep, keep_of_a_layer, make_an_optimizer, move])
def test_parameters_within_a_forward_are_the_users_own(on_parameters, blocks_that_fit, compute_device) -> None:
    def act(model: Inside, hidden: torch.Tensor) -> torch.Tensor:
        assert next(model.parameters()).device == hidden.device
        on_parameters(model)
        return hidden

    def run(model: Inside) -> list[torch.Tensor]:
        hidden = torch.linspace(-1, 1, 16).view(2, 8).to(compute_device)
        model(hidden).square().sum().backward()
        with torch.no_grad():
            for passes in range(6):
                model.on = passes > 4
                model(hidden)
        model.on = False
        if on_parameters in (keep, keep_of_a_layer):
            with torch.no_grad():
                for parameter in model.kept:
                    parameter.mul_(2)
        if on_parameters is make_an_optimizer:
            model.kept[0].step()
        state = [tensor.clone() for tensor in model.state_dict().values()]
        with torch.no_grad():
            output = model(hidden)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flags = torch.tensor([p.requires_grad for p in model.parameters()])
        return [tensor.detach().cpu() for tensor in (output, flags, *gradients, *state)]

    ours, theirs = both(Inside, act, blocks_that_fit, compute_device, run)
    assert len(ours) == len(theirs)
    assert_same(ours, theirs)


def both(kind: Any, act: Any, blocks_that_fit: int, device: torch.device, run: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What a run of the offloaded model gives, and of the plain one. `blocks_that_fit`: of its layers."""
    torch.manual_seed(0)
    model = kind(act)
    plain = kind(act).to(device)
    plain.load_state_dict(model.state_dict())
    memory_bytes = blocks_that_fit * 512
    with headrace.offload(model, device=device, device_memory=memory_bytes, blocks=list(model.layers)):
        ours = run(model)
    return ours, run(plain)


# training: a pass that finds all weights as they are (the second micro-batch of a step) has no visits either ----------
def trained(model: nn.Module, tokens: torch.Tensor, *, passes: int = 4) -> None:
    for _ in range(passes):
        loss_of(model, tokens).backward()


def test_micro_batches_after_the_first_visit_nothing(decoder, plain, tokens, compute_device, monkeypatch) -> None:
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (decoder, plain)]
    with headrace.offload(decoder, device=compute_device, device_memory=AMPLE) as handle:
        visits = counted(monkeypatch)
        for step in range(5):
            for batch in range(3):
                visits.clear()
                before = handle.stats().onload_bytes
                losses = [loss_of(model, tokens.to(compute_device)) for model in (decoder, plain)]
                for loss in losses:
                    loss.backward()
                assert torch.equal(*losses)
                assert_same_gradients(decoder, plain)
                loaded = handle.stats().onload_bytes - before
                if batch:
                    assert loaded == 0
                if batch and step > 2:
                    assert visits == []
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes


@pytest.mark.parametrize("retains", [False, True])
@pytest.mark.parametrize("how", ["in place", "data", "given", "one", "none"])
def test_weights_that_change_before_a_backward(decoder, plain, tokens, compute_device, how, retains) -> None:
    """A plain run raises, or computes with the new weights, or with the old ones: so does this one."""
    with headrace.offload(decoder, device=compute_device, device_memory=AMPLE):
        raised = []
        for model in (decoder, plain):
            on_device = tokens.to(compute_device)
            trained(model, on_device)
            loss = loss_of(model, on_device)
            if retains:
                loss.backward(retain_graph=True)
            weight = model.layers[1].up.weight
            with torch.no_grad():
                match how:
                    case "in place":
                        weight.mul_(3)
                    case "one":
                        weight[0, 0] = 3
                    case "data":
                        weight.data.mul_(3)
                    case "given":
                        weight.data = weight.data * 3
                model(on_device)  # a pass that brings what has changed
            try:
                loss.backward()
            except RuntimeError:
                raised.append(model)
            else:
                raised.append(None)
        if how == "given":
            assert raised == [decoder, None]  # refused: the data of before is gone
        else:
            assert raised in ([None, None], [decoder, plain])
            if raised == [None, None]:
                assert_same_gradients(decoder, plain)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_layers(decoder, plain, tokens, compute_device, use_reentrant) -> None:
    class Recomputed(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(tokens)
            for layer in self.layers[:-1]:
                hidden = checkpoint(layer, hidden, use_reentrant=use_reentrant)
            return super().forward(tokens) + hidden.sum()

    decoder.__class__ = plain.__class__ = Recomputed
    with headrace.offload(decoder, device=compute_device, device_memory=AMPLE):
        for _ in range(6):
            for model in (decoder, plain):
                loss_of(model, tokens.to(compute_device)).backward()
            assert_same_gradients(decoder, plain)


def assert_gradients_leave(model: nn.Sequential, device: torch.device) -> None:
    """Those of a few of its layers are on the device at once, in passes that load nothing."""
    layer_bytes = weight_bytes(model) // len(model)
    with headrace.offload(model, device=device, device_memory=AMPLE, blocks=list(model)) as handle:
        for _ in range(6):
            handle.reset_stats()
            model(torch.ones(1, 128, device=device)).sum().backward()
        assert handle.stats().onload_bytes == 0
        assert handle.stats().device_gradient_peak_bytes <= 3 * layer_bytes


def test_gradients_leave_block_by_block(compute_device) -> None:
    """The device never holds those of all layers at once."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(12)))
    assert_gradients_leave(model, compute_device)


@pytest.mark.parametrize("hooks", ["of the user", "of the user inside", "autocast", "activations"])
def test_what_else_saves(decoder, plain, tokens, compute_device, hooks) -> None:
    """Saved-tensor hooks around the model, and within; autocast; activations that leave."""

    class Saving(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            if hooks == "of the user inside":
                with torch.autograd.graph.save_on_cpu():
                    return super().forward(tokens)
            return super().forward(tokens)

    decoder.__class__ = plain.__class__ = Saving
    around: Callable[[], Any] = contextlib.nullcontext
    if hooks == "of the user":
        around = torch.autograd.graph.save_on_cpu
    elif hooks == "autocast":
        around = partial(torch.autocast, compute_device.type, dtype=torch.bfloat16)
    given = {"activations": {"min_bytes": 0}} if hooks == "activations" else {}
    with headrace.offload(decoder, device=compute_device, device_memory=AMPLE, **given):
        for _ in range(6):
            for model in (decoder, plain):
                with around():
                    loss = loss_of(model, tokens.to(compute_device))
                loss.backward()
            assert_same_gradients(decoder, plain)


def test_a_hook_of_backward_writes_a_weight(decoder, plain, tokens, compute_device) -> None:
    """Of a layer whose backward is still to come: a plain run computes with what was written through `data`."""
    with headrace.offload(decoder, device=compute_device, device_memory=AMPLE):
        for model in (decoder, plain):
            trained(model, tokens.to(compute_device))
            weight = model.layers[0].up.weight

            def write(_: torch.Tensor, weight: torch.Tensor = weight) -> None:
                weight.data.mul_(2)

            def watch(_module: Any, _args: Any, output: torch.Tensor, write: Any = write) -> None:
                output.register_hook(write)

            hook = model.layers[2].register_forward_hook(watch)
            loss_of(model, tokens.to(compute_device)).backward()
            hook.remove()
        assert_same_gradients(decoder, plain)


def test_a_step_before_a_backward_that_begins_within_a_layer(compute_device) -> None:
    """At a tensor that the layer keeps. A plain run raises."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.kept: Any = None

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.kept = self.second(self.first(hidden)).sum()
            return self.first(hidden)

    torch.manual_seed(0)
    model = nn.Sequential(*(Keeps() for _ in range(3)))
    plain = copy.deepcopy(model).to(compute_device)
    x = torch.ones(2, 8, device=compute_device)
    with headrace.offload(model, device=compute_device, device_memory=AMPLE, blocks=list(model)):
        for one in (model, plain):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            for _ in range(5):
                (one(x).sum() + sum(layer.kept for layer in one)).backward()
            one(x)
            one[1].kept.backward(retain_graph=True)
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                one[1].kept.backward()
        assert_same_gradients(model, plain)


class Head(nn.Module):
    """Computes with weights of a layer that it does not call."""

    def __init__(self, use: Callable[[nn.Sequential, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))
        self.use = use

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.use(self.layers[-1], self.layers[1](self.layers[0](hidden)))


def a_view(layer: nn.Sequential, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(hidden, layer[0].weight)


def the_weight_itself(layer: nn.Sequential, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(hidden, (8,), layer[1].weight)


@pytest.mark.parametrize("change", ["by data", "of another parameter", "by data, and another pass"])
@pytest.mark.parametrize("use", [a_view, the_weight_itself])
def test_what_autograd_saved_of_a_layer_that_no_call_reaches(use, change, compute_device) -> None:
    """Its backward sees what was written through `data`, and its block stays until then."""

    def run(model: Head) -> list[torch.Tensor]:
        hidden = torch.linspace(-1, 1, 16).view(2, 8).to(compute_device)
        for _ in range(5):
            model(hidden).square().sum().backward()
        loss, last = model(hidden).square().sum(), model.layers[-1]
        if change == "of another parameter":
            last[0].bias.grad = torch.ones_like(last[0].bias)
            torch.optim.SGD([last[0].bias], lr=0.1).step()
        else:
            for parameter in last.parameters():
                parameter.data.mul_(3)
        if change == "by data, and another pass":
            with torch.no_grad():
                model(hidden)
        loss.backward()
        return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]

    assert_same(*both(Head, use, 100, compute_device, run))


def test_gradients_of_layers_that_write_to_their_input_leave_block_by_block(compute_device) -> None:
    """And hand it on: each layer's output is the same tensor."""

    class Residual(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden += super().forward(hidden.clone())
            return hidden

    model = nn.Sequential(nn.Linear(128, 128), *(Residual(128, 128) for _ in range(11)))
    assert_gradients_leave(model, compute_device)


@pytest.mark.parametrize("memory", [AMPLE, 6000])
def test_a_backward_in_inference_mode(memory, compute_device) -> None:
    """Adds to gradients, as a plain one does."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    plain = copy.deepcopy(model).to(compute_device)
    x = torch.ones(2, 16, device=compute_device)
    with headrace.offload(model, device=compute_device, device_memory=memory, blocks=list(model)):
        for step in range(5):
            for one in (model, plain):
                loss = one(x).square().sum()
                with torch.inference_mode(step in (1, 4)):
                    loss.backward()
            assert_same_gradients(model, plain)
