"""Where all blocks fit, autograd saves weights itself, and a pass with all of them there has no visits: what then?"""

import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import millrace
from tests.weights.models import Decoder, loss_of, weight_bytes

AMPLE = "64MiB"


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.cpu() for parameter in model.parameters()]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def counted_visits(handle: millrace.Offloaded, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the visits from now on."""
    names, visit = [], handle._executor.visit
    monkeypatch.setattr(
        handle._executor, "visit", lambda blocks, phase, name: (names.append(name), visit(blocks, phase, name))
    )
    return names


def test_passes_over_weights_that_stay_have_no_visits(
    decoder: Decoder, tokens: torch.Tensor, compute_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = copy.deepcopy(decoder).to(compute_device)
    with millrace.offload(decoder, device=compute_device, device_memory=AMPLE) as handle, torch.no_grad():
        for _ in range(3):
            decoder(tokens)
        onloads, visits = handle.stats().onload_bytes, counted_visits(handle, monkeypatch)
        for _ in range(3):
            assert torch.equal(decoder(tokens), plain(tokens.to(compute_device)))
        assert visits == []
        assert handle.stats().onload_bytes == onloads == weight_bytes(decoder)
        assert {span.name for span in handle.report().record.spans if span.lane == "compute"}
        decoder.layers[2].up.weight.mul_(2)  # of a home
        plain.layers[2].up.weight.mul_(2)
        assert torch.equal(decoder(tokens), plain(tokens.to(compute_device)))
        assert visits


@pytest.mark.parametrize("step", ["none", "between micro-batches", "every pass"])
def test_training(
    decoder: Decoder, tokens: torch.Tensor, compute_device: torch.device, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = copy.deepcopy(decoder).to(compute_device)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (decoder, plain)]
    block_bytes = weight_bytes(decoder.layers[0])
    with millrace.offload(decoder, device=compute_device, device_memory=AMPLE) as handle:
        visits = counted_visits(handle, monkeypatch)
        for turn in range(8):
            losses = [loss_of(decoder, tokens), loss_of(plain, tokens.to(compute_device))]
            assert torch.equal(*losses)
            visits.clear()
            for loss in losses:
                loss.backward()
            assert equal(gradients(decoder), gradients(plain))
            if step == "none" and turn > 3:
                assert visits == []
            if step == "every pass" or (step == "between micro-batches" and turn % 4 == 3):
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        stats = handle.stats()
        assert 0 < stats.device_gradient_peak_bytes <= 3 * block_bytes  # a resident's gradients may be among them
        assert stats.device_peak_bytes <= weight_bytes(decoder) + 4096


def settled(decoder: Decoder, tokens: torch.Tensor) -> None:
    for _ in range(4):
        loss_of(decoder, tokens).backward()
    decoder.zero_grad()


def test_homes_that_change_between_forward_and_backward(
    decoder: Decoder, tokens: torch.Tensor, compute_device: torch.device
) -> None:
    """As in a plain run: autograd raises for a weight that it has saved, and not for a bias, which it has not."""
    plain = copy.deepcopy(decoder).to(compute_device)
    with millrace.offload(decoder, device=compute_device, device_memory=AMPLE):
        settled(decoder, tokens)
        for model in (decoder, plain):
            loss = loss_of(model, tokens.to(compute_device))
            with torch.no_grad():
                model.layers[1].up.bias.mul_(3)
            loss.backward()
        assert equal(gradients(decoder), gradients(plain))
        for model in (decoder, plain):
            loss = loss_of(model, tokens.to(compute_device))
            with torch.no_grad():
                model.layers[1].up.weight.mul_(3)
            with pytest.raises(RuntimeError, match="modified"):
                loss.backward()
            model.zero_grad()
        for model in (decoder, plain):
            loss_of(model, tokens.to(compute_device)).backward()
        assert equal(gradients(decoder), gradients(plain))


def test_data_that_changes_between_forward_and_backward(
    decoder: Decoder, tokens: torch.Tensor, compute_device: torch.device
) -> None:
    """Autograd does not notice, and computes with what is there."""
    plain = copy.deepcopy(decoder).to(compute_device)
    with millrace.offload(decoder, device=compute_device, device_memory=AMPLE):
        settled(decoder, tokens)
        for model in (decoder, plain):
            loss = loss_of(model, tokens.to(compute_device))
            model.layers[1].up.weight.data.mul_(3)
            loss.backward()
        assert equal(gradients(decoder), gradients(plain))


def test_two_forwards_before_their_backwards(
    decoder: Decoder, tokens: torch.Tensor, compute_device: torch.device
) -> None:
    plain = copy.deepcopy(decoder).to(compute_device)
    with millrace.offload(decoder, device=compute_device, device_memory=AMPLE):
        for _ in range(4):
            for model in (decoder, plain):
                losses = [loss_of(model, (tokens + shift).to(compute_device) % 32) for shift in range(2)]
                losses[0].backward(retain_graph=True)
                losses[1].backward()
                losses[0].backward()
        assert equal(gradients(decoder), gradients(plain))


@pytest.mark.emu("random:0", allocator="exact")
def test_a_block_that_goes_after_all_is_missed(decoder: Decoder, tokens: torch.Tensor, emu_device: ModuleType) -> None:
    """Buffers that came later leave no room for all blocks: a graph from before is refused, never wrong."""
    with millrace.offload(decoder, device="emu", device_memory=weight_bytes(decoder) + 4096) as handle:
        settled(decoder, tokens)
        loss = loss_of(decoder, tokens)
        decoder.layers[0].register_buffer("large", torch.ones(weight_bytes(decoder) // 8))
        with torch.no_grad():
            decoder(tokens)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        decoder.zero_grad()
        loss_of(decoder, tokens).backward()
        assert all(parameter.grad.isfinite().all() for parameter in decoder.parameters())
        assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_computed_again(
    decoder: Decoder,
    tokens: torch.Tensor,
    compute_device: torch.device,
    reentrant: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Checkpointed(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
            return self.head(hidden)

    decoder.__class__ = Checkpointed
    plain = copy.deepcopy(decoder).to(compute_device)
    with millrace.offload(decoder, device=compute_device, device_memory=AMPLE) as handle:
        visits = counted_visits(handle, monkeypatch)
        for _ in range(5):
            visits.clear()
            for model in (decoder, plain):
                loss_of(model, tokens.to(compute_device)).backward()
        assert visits == []
        assert equal(gradients(decoder), gradients(plain))


def test_autocast_within_the_model(decoder: Decoder, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache would keep copies of weights: layers that compute under it are visits."""

    class Mixed(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(tokens).float()

    decoder.__class__ = Mixed
    plain = copy.deepcopy(decoder)
    with millrace.offload(decoder, device="cpu", device_memory=AMPLE) as handle:
        settled(decoder, tokens)
        visits = counted_visits(handle, monkeypatch)
        for model in (decoder, plain):
            loss_of(model, tokens).backward()
        assert visits
        assert equal(gradients(decoder), gradients(plain))


@pytest.mark.parametrize("break_off", [KeyboardInterrupt, ValueError])
def test_a_forward_that_is_broken_off(
    decoder: Decoder, tokens: torch.Tensor, break_off: Callable[[], BaseException]
) -> None:
    plain = copy.deepcopy(decoder)
    homes = [id(parameter) for parameter in decoder.parameters()]

    def interrupt(*_: object) -> None:
        raise break_off

    with millrace.offload(decoder, device="cpu", device_memory=AMPLE) as handle:
        settled(decoder, tokens)
        hook = decoder.layers[2].register_forward_hook(interrupt)
        with pytest.raises(break_off):
            decoder(tokens)
        hook.remove()
        assert not handle._engine.standing.everything
        assert [id(parameter) for parameter in decoder.parameters()] == homes
        for model in (decoder, plain):
            loss_of(model, tokens).backward()
        assert equal(gradients(decoder), gradients(plain))
