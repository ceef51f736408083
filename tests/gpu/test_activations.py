"""Do activations leave a real accelerator and come back, alone and with the weights, in the bytes that were planned?"""

import pytest
import torch

import headrace
from tests.activations.models import Stack, rows, step
from tests.gpu.runs import Runs
from tests.matrix.models import CASES, CHECKPOINTING, Case
from tests.support.compare import assert_same
from tests.support.held import weight_bytes

pytestmark = pytest.mark.gpu

SETTINGS = {"min_bytes": 0, "device_memory": 0}
KINDS = [(case, checkpointing) for case in CASES for checkpointing in CHECKPOINTING if case.name == "dense"]
KINDS += [(case, "none") for case in CASES if case.name != "dense"]


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning")
@pytest.mark.parametrize(("case", "checkpointing"), KINDS, ids=[f"{case.name}-{how}" for case, how in KINDS])
def test_kind_with_weights(case: Case, checkpointing: str, accelerator: torch.device) -> None:
    runs = Runs(case, accelerator, checkpointing=checkpointing)
    _, plain = runs.plain()
    model = runs.build()
    budget_bytes = int(weight_bytes(model) * case.share) + sum(buffer.nbytes for buffer in model.buffers())
    with headrace.offload(model, device=accelerator, device_memory=budget_bytes, activations=SETTINGS) as handle:
        assert_same(runs.run(model, on_host=True), plain)
        assert handle.activations is not None
        assert handle.activations.stats().onload_bytes > 0


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_bytes_on_the_device_drop_by_those_on_the_host(checkpointing: str, accelerator: torch.device) -> None:
    """Tensors of 2 MiB, so that allocators round nothing."""
    count = 4096
    held: list[int] = []
    on_host = 0
    expected = None
    for offloaded in (False, True):
        model = Stack(12, checkpointing=checkpointing).to(accelerator)
        x = rows(accelerator, count=count)
        handle = headrace.offload_activations(model, device_memory="8MiB") if offloaded else None
        for _ in range(4):
            found = step(model, x)
            expected = expected or found
            assert_same(found, expected)
        model.zero_grad()
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        loss = model(x).square().sum()
        held.append(torch.accelerator.memory_allocated() - before)
        if handle is not None:
            on_host = handle.stats().host_held_bytes
        loss.backward()
        del model, loss, handle
    assert held[0] - held[1] == on_host > 12 << 20


def test_the_peak_is_the_same_at_every_step(accelerator: torch.device) -> None:
    model = Stack(24).to(accelerator)
    x = rows(accelerator, count=4096)
    peaks = set()
    with headrace.offload_activations(model, device_memory="8MiB"):
        for index in range(8):
            model.zero_grad()
            torch.accelerator.reset_peak_memory_stats()
            step(model, x)
            if index >= 3:
                peaks.add(torch.accelerator.max_memory_allocated())
    assert len(peaks) == 1
