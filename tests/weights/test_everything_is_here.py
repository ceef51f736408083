"""A forward without gradients over weights that all are on the device has no visits: is it as any other?"""

import copy

import pytest
import torch
from torch import nn

import millrace
from tests.weights.models import Decoder, loss_of, weight_bytes

AMPLE = "64MiB"
Visits = list[str]


@pytest.fixture
def plain(decoder: Decoder, compute_device: torch.device) -> Decoder:
    return copy.deepcopy(decoder).to(compute_device)


def settled(decoder: Decoder, tokens: torch.Tensor, *, forwards: int = 4) -> None:
    with torch.no_grad():
        for _ in range(forwards):
            decoder(tokens)


def counted(handle: millrace.Offloaded, monkeypatch: pytest.MonkeyPatch) -> Visits:
    """The names of the visits from now on."""
    names: Visits = []
    visit = handle._executor.visit

    def counting(blocks: object, phase: object, name: str) -> None:
        names.append(name)
        visit(blocks, phase, name)

    monkeypatch.setattr(handle._executor, "visit", counting)
    return names


def equal_gradients(ours: nn.Module, theirs: nn.Module) -> bool:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.equal(p.grad.cpu(), q.grad.cpu()) for p, q in pairs)


def test_nothing_is_visited(decoder, plain, tokens, compute_device, monkeypatch) -> None:
    on_device = tokens.to(compute_device)
    with millrace.offload(decoder, device=compute_device, device_memory=AMPLE) as handle, torch.no_grad():
        settled(decoder, tokens)
        visits = counted(handle, monkeypatch)
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
    with millrace.offload(decoder, device=compute_device, device_memory=AMPLE) as handle:
        visits = counted(handle, monkeypatch)
        for _ in range(4):
            for model, optimizer in zip((decoder, plain), optimizers, strict=True):
                loss_of(model, tokens.to(compute_device)).backward()
                optimizer.step()
            assert equal_gradients(decoder, plain)
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
    with millrace.offload(decoder, device=compute_device, device_memory=AMPLE):
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
            assert equal_gradients(decoder, plain)


def test_two_backwards_within_a_forward_leave_homes(decoder, plain, tokens, compute_device) -> None:
    class Inside(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[:2]:
                with torch.enable_grad():
                    layer(self.embedding(tokens)).sum().backward()
            return super().forward(tokens)

    decoder.__class__ = plain.__class__ = Inside
    homes = [id(parameter) for parameter in decoder.parameters()]
    with millrace.offload(decoder, device=compute_device, device_memory=AMPLE):
        settled(decoder, tokens)
        decoder.zero_grad()
        with torch.no_grad():
            assert torch.equal(decoder(tokens), plain(tokens.to(compute_device)))
        assert [id(parameter) for parameter in decoder.parameters()] == homes
        for ours, theirs in zip(decoder.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad.cpu(), theirs.grad.cpu())


@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_later_layer_s_weight_is_written_in_the_pass(decoder, plain, tokens, compute_device, how) -> None:
    with millrace.offload(decoder, device=compute_device, device_memory=AMPLE):
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
    with millrace.offload(decoder, device=compute_device, device_memory=AMPLE) as handle:
        settled(decoder, tokens)
        visits = counted(handle, monkeypatch)
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
    with millrace.offload(model, device=compute_device, device_memory=AMPLE), torch.no_grad():
        for _ in range(5):
            assert torch.equal(model(x), plain(x.to(compute_device)))


@pytest.mark.parametrize("break_off", [KeyboardInterrupt, ValueError])
def test_a_forward_that_is_broken_off(decoder, plain, tokens, compute_device, break_off: type[BaseException]) -> None:
    homes = [id(parameter) for parameter in decoder.parameters()]

    def interrupt(*_: object) -> None:
        raise break_off

    with millrace.offload(decoder, device=compute_device, device_memory=AMPLE):
        settled(decoder, tokens)
        hook = decoder.layers[2].register_forward_hook(interrupt)
        with torch.no_grad(), pytest.raises(break_off):
            decoder(tokens)
        hook.remove()
        assert [id(parameter) for parameter in decoder.parameters()] == homes
        for model in (decoder, plain):
            loss_of(model, tokens.to(compute_device)).backward()
        assert equal_gradients(decoder, plain)


def test_an_interrupt_in_a_backward_within_a_forward_is_told(decoder, tokens, monkeypatch) -> None:
    class Inside(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.layers[0](self.embedding(tokens)).sum().backward()
            return super().forward(tokens)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    decoder.__class__ = Inside
    with millrace.offload(decoder, device="cpu", device_memory=AMPLE) as handle:
        decoder(tokens)
        monkeypatch.setattr(handle._engine.updates, "changed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            decoder(tokens)
        monkeypatch.undo()
        homes = list(decoder.parameters())
        assert all(type(parameter).__name__ == "Home" for parameter in homes)
        decoder(tokens).sum().backward()
        assert all(parameter.grad is not None for parameter in homes)
