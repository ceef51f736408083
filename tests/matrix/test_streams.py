"""Does a model compute on a stream of the user's, and after a change of streams, as it does on one?"""

import pytest
import torch

import headrace
from tests.matrix.models import CASES, Case
from tests.support.compare import assert_same
from tests.support.held import weight_bytes
from tests.support.loops import infer, train

STEPS = 5
KINDS = [case for case in CASES if case.name in ("dense", "tied", "unet", "experts")]
each_kind = pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
each_training = pytest.mark.parametrize("training", ["full", "inference"])


def check(case: Case, training: str, device: torch.device) -> None:
    batches = case.on(device, STEPS)
    run = infer if training == "inference" else train
    model = case.build("none", training)
    budget = int(weight_bytes(model) * case.share) + sum(buffer.nbytes for buffer in model.buffers())
    with headrace.offload(model, device=device, device_memory=budget) as handle:
        offloaded = run(model, batches, case.forward)
        stats = handle.stats()
        assert stats.device_peak_bytes <= budget
        assert stats.onload_bytes > weight_bytes(model)
    assert_same(offloaded, run(case.build("none", training).to(device), batches, case.forward))
    if device.type != "cpu":
        assert torch.accelerator.current_stream().stream_id  # not the default one any more


@pytest.mark.emu("own-stream", allocator="caching")
@each_training
@each_kind
def test_on_a_users_stream(case: Case, training: str, compute_device: torch.device) -> None:
    check(case, training, compute_device)


@pytest.mark.emu("switched")
@each_training
@each_kind
def test_after_a_change_of_streams(case: Case, training: str, compute_device: torch.device) -> None:
    check(case, training, compute_device)
