"""Does Ctrl-C anywhere in the offloading of activations leave anything wrong, or any byte behind?"""

import functools
from pathlib import Path

import pytest
import torch

import headrace
from headrace.runtime.autograd import top_hooks
from tests.activations.models import SAVED_BYTES, Stack, rows, step
from tests.support.compare import assert_same
from tests.support.interrupts import Strike

WITHIN = ("/headrace/activations/", "/headrace/memory/pool")
LAYERS = 6
ROUNDS = 60


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_interrupt_anywhere_leaves_nothing_behind(tier: str, compute_device: torch.device, tmp_path: Path) -> None:
    x = rows(compute_device)
    expected = step(Stack(LAYERS).to(compute_device), x)
    model = Stack(LAYERS).to(compute_device)
    disk = tmp_path if tier == "disk" else None
    with headrace.offload_activations(model, min_bytes=0, device_memory=0, tier=tier, disk=disk) as handle:
        for _ in range(3):
            step(model, x)
        counted = Strike(within=WITHIN)
        counted.during(functools.partial(step, model, x))
        assert counted.seen > ROUNDS
        struck = 0
        for index in range(ROUNDS):
            try:
                Strike(1 + index * counted.seen // ROUNDS, WITHIN).during(functools.partial(step, model, x))
            except KeyboardInterrupt:
                struck += 1
            if index % 4 == 3:  # so that several interrupts come together, too
                assert_same(step(model, x), expected)
        assert struck > ROUNDS // 2
        for _ in range(3):
            assert_same(step(model, x), expected)
        assert top_hooks(True) is None
        handle.reset_stats()
        assert_same(step(model, x), expected)
        stats = handle.stats()
        assert stats.offload_bytes >= (LAYERS - 2) * SAVED_BYTES
        handle.reset_stats()  # peaks begin with what is held now
        assert handle.stats().device_peak_bytes == 0
        if tier == "host":
            assert stats.host_held_bytes == 0
            assert stats.host_bytes <= (LAYERS + 1) * SAVED_BYTES
        else:
            assert stats.host_held_bytes <= 4 * SAVED_BYTES  # what is still on its way to disk


def test_an_interrupt_at_the_end_of_a_call_does_not_keep_it_open() -> None:
    """At each function that ends a call, one after the other: the next call begins a forward of its own."""
    expected, model = step(Stack(3), rows("cpu")), Stack(3)
    files = ("/headrace/activations/calls",)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0) as handle:
        step(model, rows("cpu"))
        counted = Strike(within=files)
        counted.during(functools.partial(step, model, rows("cpu")))
        assert counted.seen > 20
        for index in range(counted.seen):
            with pytest.raises(KeyboardInterrupt):
                Strike(1 + index, files).during(functools.partial(step, model, rows("cpu")))
            handle.reset_stats()
            assert_same(step(model, rows("cpu")), expected)
            assert top_hooks(True) is None
            with handle.forward():  # which none may be inside of
                pass
        assert handle.stats().offload_bytes > 0


def test_statistics_can_be_read_after_an_interrupt_and_remove(compute_device: torch.device) -> None:
    model = Stack(LAYERS)
    with headrace.offload(
        model, device=compute_device, device_memory="1MiB", activations={"min_bytes": 0, "all_leave": True}
    ) as handle:
        activations = handle.activations
        assert activations is not None
        with pytest.raises(KeyboardInterrupt):
            Strike(60, WITHIN).during(functools.partial(step, model, rows(compute_device)))
    assert activations.stats().host_held_bytes == 0
