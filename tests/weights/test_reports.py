"""Are the numbers that a user reads measured, and complete?"""

import json

import pytest
import torch

import headrace
from tests.support.held import weight_bytes
from tests.support.loops import loss_of
from tests.support.models import Decoder


def test_stats_count_what_moved(compute_device, decoder, tokens):
    total = weight_bytes(decoder)
    with headrace.offload(decoder, device=compute_device, device_memory=total // 2) as handle:
        loss_of(decoder, tokens).backward()
        stats = handle.stats()
        assert stats.offload_bytes == total  # every gradient once
        assert stats.onload_bytes >= total  # every weight at least once
        assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes == total // 2
        assert stats.host_bytes >= 2 * total  # weights and gradients
        assert stats.steps == 0
        torch.optim.SGD(decoder.parameters(), lr=0.1).step()
        assert handle.stats().steps == 1
        handle.reset_stats()
        assert handle.stats().onload_bytes == handle.stats().onloads == handle.stats().steps == 0


def test_the_timeline_has_every_visit_and_copy(compute_device, decoder, tokens, tmp_path):
    with headrace.offload(decoder, device=compute_device, device_memory=weight_bytes(decoder) // 2) as handle:
        with pytest.raises(headrace.StateError, match="no pass over the model"):
            handle.timeline(tmp_path / "early.json")
        for _ in range(3):
            loss_of(decoder, tokens).backward()
        handle.timeline(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        names = [event["name"] for event in events]
        assert {"layers.0 forward", "layers.0 backward", "onload", "offload"} <= set(names)
        assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
        offloaded = sum(event["args"]["bytes"] for event in events if event["name"] == "offload")
        assert offloaded == weight_bytes(decoder)


@pytest.mark.emu("lazy")
def test_gradients_arrive_in_pinned_memory_and_nobody_waits_on_the_way(emu_device, decoder, tokens):
    """A pass makes the host wait at its ends, not in between: the count does not grow with the layers."""
    torch.empty(1).pin_memory()  # is_pinned() asks the device only after it was used
    with headrace.offload(decoder, device="emu", device_memory=weight_bytes(decoder) // 2) as handle:
        for _ in range(4):
            loss_of(decoder, tokens).backward()
            assert all(parameter.grad.is_pinned() for parameter in decoder.parameters())
            decoder.zero_grad()
        tokens_on_device = tokens.to("emu")
        emu_device.reset_stats()
        loss = loss_of(decoder, tokens_on_device)
        assert emu_device.stats()["host_syncs"] == 1  # the end of the outermost call: edge 9 of docs/design/ordering.md
        handle.reset_stats()  # else the seconds of earlier cycles are read now
        emu_device.reset_stats()
        loss.backward()
        assert emu_device.stats()["host_syncs"] <= 3  # what gradients are still leaving at the end: edge 6


def test_host_memory_is_a_promise(compute_device, tokens):
    decoder = Decoder(width=128)
    total = weight_bytes(decoder)
    with pytest.raises(headrace.BudgetError, match=r"weights need .* of host memory .* raise it"):
        headrace.offload(decoder, device=compute_device, host_memory=total // 2)
    with headrace.offload(decoder, device=compute_device, host_memory=int(1.5 * total) + (64 << 10)):
        with torch.no_grad():
            decoder(tokens)  # inference fits
        with pytest.raises(headrace.BudgetError, match="gradients need"):
            decoder(tokens)
