"""Do ranks whose devices help each other (`onload="gather"`) train as they should, with 1/N over each link?"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_mesh import KINDS
from tests.support.nursery import Nursery, run_ranks, start_ranks

pytestmark = pytest.mark.core(world_size=2, device="cpu")
GATHER = "from tests.distributed import meshed\nmeshed.ONLOAD = 'gather'"
gather = partial(run_ranks, setup=GATHER)


@pytest.mark.core(kind="experts")
@pytest.mark.parametrize(
    ("kind", "world_size", "device"),
    [
        (kind, world_size, ("cpu", "emu")[(number + world_size // 4) % 2])
        for number, kind in enumerate(reversed(KINDS))
        for world_size in (2, 4)
    ],
)
def test_gradients(nursery: Nursery, tmp_path: Path, kind: str, world_size: int, device: str) -> None:
    gather(nursery, tmp_path, world_size, f"gathered.gradients_are_those_of_fsdp, {KINDS[kind]!r}, {device!r}")


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["full", "experts"])
def test_ddp_and_one_process(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    gather(nursery, tmp_path, 2, f"meshed.gradients_are_those_of_one_process, {KINDS[kind]!r}, 'cpu'")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("world_size", "device", "kind", "settings"),
    [
        (2, "cpu", "full", {}),
        (4, "cpu", "full", {}),
        (4, "cpu", "full", {"overlap": "forward"}),
        (4, "cpu", "adapters", {}),
        (4, "cpu", "tied", {}),
        (4, "cpu", "recomputed", {"overlap": "forward"}),
        (2, "emu", "full", {"overlap": "forward"}),
        (4, "emu", "full", {}),
    ],
)
def test_steps(
    nursery: Nursery, tmp_path: Path, world_size: int, device: str, kind: str, settings: dict[str, Any]
) -> None:
    call = f"gathered.steps_are_those_of_fsdp, {KINDS[kind]!r}, {device!r}, {settings!r}"
    gather(nursery, tmp_path, world_size, call)


@pytest.mark.parametrize(("world_size", "device"), [(2, "cpu"), (4, "cpu"), (3, "cpu"), (2, "emu"), (4, "emu")])
def test_bytes(nursery: Nursery, tmp_path: Path, world_size: int, device: str) -> None:
    gather(nursery, tmp_path, world_size, f"gathered.bytes_over_the_link, {device!r}")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("world_size", "device", "trains_all"), [(2, "cpu", False), (2, "cpu", True), (3, "emu", False), (2, "emu", True)]
)
def test_reads_from_disk(nursery: Nursery, tmp_path: Path, world_size: int, device: str, trains_all: bool) -> None:
    gather(nursery, tmp_path, world_size, f"gathered.reads_from_disk, {str(tmp_path)!r}, {device!r}, {trains_all}")


@pytest.mark.extended
@pytest.mark.parametrize("trains_all", [False, True])
def test_what_the_drive_changed(nursery: Nursery, tmp_path: Path, trains_all: bool) -> None:
    gather(nursery, tmp_path, 2, f"gathered.what_the_drive_changed_is_noticed, {str(tmp_path)!r}, {trains_all}")


@pytest.mark.extended
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranges_lie_at_the_devices(nursery: Nursery, tmp_path: Path, world_size: int) -> None:
    gather(nursery, tmp_path, world_size, "gathered.ranges_lie_at_the_devices")


@pytest.mark.extended
@pytest.mark.parametrize(("at", "more"), [(3, (4, 1, 2)), (1, (4,))])
def test_a_rank_goes_astray(nursery: Nursery, tmp_path: Path, at: int, more: tuple[int, ...]) -> None:
    gather(nursery, tmp_path, 2, f"gathered.a_rank_goes_astray_and_needs_more, {at}, {more}")


@pytest.mark.extended
@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_reductions_are_in_flight(nursery: Nursery, tmp_path: Path, device: str) -> None:
    gather(nursery, tmp_path, 2, f"gathered.reductions_are_in_flight, {device!r}")


@pytest.mark.extended
@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_ranks_that_go_their_own_ways(nursery: Nursery, tmp_path: Path, device: str) -> None:
    gather(nursery, tmp_path, 2, f"gathered.ranks_that_go_their_own_ways, {device!r}")


@pytest.mark.extended
@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_the_first_rank_chooses(nursery: Nursery, tmp_path: Path, device: str) -> None:
    gather(nursery, tmp_path, 2, f"gathered.the_first_rank_chooses, {device!r}")


@pytest.mark.extended
@pytest.mark.parametrize(
    "program",
    ["accumulation", "writes", "no_sync_is_forgotten_with_its_gradients", "what_no_sync_kept_is_averaged_once"],
)
def test_as_otherwise(nursery: Nursery, tmp_path: Path, program: str) -> None:
    gather(nursery, tmp_path, 2, f"meshed.{program}")


@pytest.mark.core(how="raises in backward")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "how",
    [
        "dies",
        "raises in forward",
        "raises in backward",
        "leaves a collective",
        "fails after a collective",
        "cleans up first",
        "ends early",
        "goes on",
    ],
)
def test_a_rank_fails(nursery: Nursery, tmp_path: Path, how: str, world_size: int) -> None:
    *others, last = start_ranks(nursery, tmp_path, world_size, f"meshed.a_rank_fails, {how!r}", GATHER)
    for one in others:
        assert one.read_rest() == "done\n", one.errors
        assert one.wait() == 0, one.errors
    last.wait()
