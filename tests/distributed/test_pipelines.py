"""Do stages of pipelines, and shards of tensor parallel models, train offloaded as they do without?"""

from pathlib import Path

import pytest

from tests.distributed.test_mesh import started
from tests.nursery import Nursery


def run(nursery: Nursery, directory: Path, call: str) -> None:
    """Both ranks run that call of tests/distributed/pipelined.py."""
    for one in started(nursery, directory, 2, call, "pipelined"):
        assert one.read_rest() == "done\n", one.errors
        assert one.wait() == 0, one.errors


# Of the weights of a stage, how many times all of them are loaded in a step of four micro-batches, at most: each is
# there twice, in forward and backward.
@pytest.mark.core(schedule=["1F1B", "Interleaved1F1B"], device="cpu")
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
    run(nursery, tmp_path, f"m.trains_as_without, {schedule!r}, {device!r}, {most_loads}, {recomputes}")


def test_a_split_backward_is_refused(nursery: Nursery, tmp_path: Path) -> None:
    run(nursery, tmp_path, "m.a_split_backward_is_refused")


@pytest.mark.parametrize("recomputes", [False, True])
def test_tensor_parallel(nursery: Nursery, tmp_path: Path, recomputes: bool) -> None:
    run(nursery, tmp_path, f"m.tensor_parallel, {recomputes}")
