"""Do ranks that keep one copy of an offloaded model on disk train it as one process would, and leave nothing behind?"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_mesh import KINDS
from tests.support.nursery import Nursery, run_ranks, start_ranks

pytestmark = pytest.mark.core(world_size=2, device="cpu")


def left_in(directory: Path) -> list[Path]:
    """Files of the disk tier and of optimizers."""
    return [path for name in ("weights", "state") for path in (directory / name).rglob("*") if path.is_file()]


@pytest.mark.core(kind="full", dtype="float32", settings={"tier": "disk"})
@pytest.mark.parametrize(
    ("world_size", "device", "kind", "settings", "dtype", "host_bytes"),
    [
        (2, "cpu", "full", {}, "float32", 2**16),
        (4, "cpu", "full", {"overlap": "forward"}, "float32", 2**16),
        (2, "cpu", "full", {"tier": "disk"}, "float32", 2**16),
        (2, "emu", "full", {"tier": "disk", "overlap": "forward"}, "float32", 2**16),
        (2, "emu", "full", {"overlap": "forward"}, "float32", 2**16),
        (2, "cpu", "adapters", {}, "float32", 2**16),
        (2, "emu", "adapters", {"overlap": "forward"}, "float32", 2**16),
        (2, "cpu", "tied", {}, "float32", 2**16),
        (2, "cpu", "experts", {}, "float32", 400 * 2**10),
        (2, "cpu", "full", {}, "bfloat16", 3 * 2**14),
        (2, "cpu", "full", {"master_form": "full", "overlap": "forward"}, "bfloat16", 3 * 2**14),
    ],
)
def test_steps(
    nursery: Nursery,
    tmp_path: Path,
    world_size: int,
    device: str,
    kind: str,
    settings: dict[str, Any],
    dtype: str,
    host_bytes: int,
) -> None:
    arguments = f"{str(tmp_path)!r}, {KINDS[kind]!r}, {device!r}, {settings!r}, {dtype!r}, {host_bytes}"
    run_ranks(nursery, tmp_path, world_size, f"on_disk.steps_are_those_of_one_process, {arguments}")
    assert left_in(tmp_path) == []


@pytest.mark.extended
@pytest.mark.parametrize("world_size", [2, 4])
def test_one_copy_for_a_node(nursery: Nursery, tmp_path: Path, world_size: int) -> None:
    run_ranks(nursery, tmp_path, world_size, f"on_disk.one_copy_for_a_node, {str(tmp_path)!r}")


@pytest.mark.core(onload="own")
@pytest.mark.parametrize(
    ("world_size", "device", "onload"),
    [(2, "cpu", "own"), (2, "cpu", "gather"), (4, "cpu", "own"), (2, "emu", "gather")],
)
def test_activations(nursery: Nursery, tmp_path: Path, world_size: int, device: str, onload: str) -> None:
    call = f"on_disk.activations_rest_there, {str(tmp_path)!r}, {device!r}, {onload!r}"
    run_ranks(nursery, tmp_path, world_size, call)
    assert left_in(tmp_path) == []


@pytest.mark.extended
@pytest.mark.parametrize("program", ["what_users_do", "frozen_weights_stay_in_their_checkpoint", "refusals"])
def test_programs(nursery: Nursery, tmp_path: Path, program: str) -> None:
    run_ranks(nursery, tmp_path, 2, f"on_disk.{program}, {str(tmp_path)!r}")
    assert left_in(tmp_path) == []


@pytest.mark.extended
def test_a_run_goes_on_elsewhere(nursery: Nursery, tmp_path: Path) -> None:
    """Saved by two ranks, whose weights and state are on disk; on as many, on four, on one, and in memory."""
    run_ranks(nursery, tmp_path, 2, f"on_disk.saved, {str(tmp_path)!r}")
    for world_size, tier in ((2, "disk"), (4, "disk"), (1, "disk"), (2, "host")):
        run_ranks(nursery, tmp_path, world_size, f"on_disk.resumed, {str(tmp_path)!r}, {tier!r}")


@pytest.mark.extended
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_is_killed(nursery: Nursery, tmp_path: Path, killed: int) -> None:
    """Nothing is left in the directories but locks that nobody holds, and the next run has them."""
    for _ in range(2):
        ranks = start_ranks(nursery, tmp_path, 2, f"on_disk.trains_until_a_rank_is_gone, {str(tmp_path)!r}")
        for one in ranks:
            assert one.read_line() == "trains\n", one.errors
        os.kill(ranks[killed].pid, signal.SIGKILL)
        assert f"rank {killed} has ended" in ranks[1 - killed].read_rest(), ranks[1 - killed].errors
        assert [one.wait() for one in ranks] == [-signal.SIGKILL * (rank == killed) for rank in range(2)]
        assert sum(path.stat().st_size for path in left_in(tmp_path)) < 100
