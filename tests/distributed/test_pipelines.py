"""Do stages of pipelines, and shards of tensor parallel models, train offloaded as they do without?"""

from pathlib import Path

import pytest

from tests.support.nursery import Nursery, run_ranks


@pytest.mark.core(schedule="1F1B", device="cpu")
@pytest.mark.parametrize(
    ("schedule", "device", "most_loads", "recomputes"),
    [
        ("GPipe", "cpu", 7.0, False),
        ("1F1B", "cpu", 6.0, False),
        ("Interleaved1F1B", "cpu", 7.0, False),
        ("1F1B", "emu", 6.0, False),
        ("GPipe", "cpu", 7.0, True),
    ],
)
def test_pipelines(
    nursery: Nursery, tmp_path: Path, schedule: str, device: str, most_loads: float, recomputes: bool
) -> None:
    call = f"pipelined.trains_as_without, {schedule!r}, {device!r}, {most_loads}, {recomputes}"
    run_ranks(nursery, tmp_path, 2, call)


def test_later_stages_offload_fewer_activations(nursery: Nursery, tmp_path: Path) -> None:
    run_ranks(nursery, tmp_path, 2, "pipelined.later_stages_offload_fewer_activations")


@pytest.mark.extended
def test_a_split_backward_is_refused(nursery: Nursery, tmp_path: Path) -> None:
    run_ranks(nursery, tmp_path, 2, "pipelined.a_split_backward_is_refused")


@pytest.mark.core(recomputes=False)
@pytest.mark.parametrize("recomputes", [False, True])
def test_tensor_parallel(nursery: Nursery, tmp_path: Path, recomputes: bool) -> None:
    run_ranks(nursery, tmp_path, 2, f"pipelined.tensor_parallel, {recomputes}")


@pytest.mark.extended
def test_tensor_parallel_replicas(nursery: Nursery, tmp_path: Path) -> None:
    run_ranks(nursery, tmp_path, 4, "pipelined.tensor_parallel_replicas")
