"""Do ranks whose devices help each other (`onload="gather"`) train as they should, with 1/N over each link?"""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_mesh import KINDS
from tests.nursery import Nursery

pytestmark = pytest.mark.core(world_size=2, device="cpu")


def started(nursery: Nursery, directory: Path, world_size: int, call: str) -> list[Any]:
    """Every rank runs that call of gathered.py or meshed.py."""
    code = (
        "import torch\nfrom tests.distributed import gathered as g, meshed as m, programs as p\n"
        f"m.ONLOAD = 'gather'\np.run({call})"
    )
    file = directory / f"store-{len(list(directory.iterdir()))}"
    return [nursery.start(code, file, world_size, rank) for rank in range(world_size)]


def run(nursery: Nursery, directory: Path, world_size: int, call: str) -> None:
    for one in started(nursery, directory, world_size, call):
        assert one.read_rest() == "done\n", one.errors
        assert one.wait() == 0, one.errors


@pytest.mark.core(kind=["full", "experts", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "device"), [(2, "cpu"), (4, "cpu"), (2, "emu"), (4, "emu")])
def test_gradients(nursery: Nursery, tmp_path: Path, kind: str, world_size: int, device: str) -> None:
    run(nursery, tmp_path, world_size, f"g.gradients_are_those_of_fsdp, {KINDS[kind]!r}, {device!r}")


@pytest.mark.parametrize("kind", ["full", "experts"])
def test_ddp_and_one_process(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    run(nursery, tmp_path, 2, f"m.gradients_are_those_of_one_process, {KINDS[kind]!r}, 'cpu'")


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
    run(nursery, tmp_path, world_size, f"g.steps_are_those_of_fsdp, {KINDS[kind]!r}, {device!r}, {settings!r}")


@pytest.mark.core(world_size=4, device=["cpu", "emu"])
@pytest.mark.parametrize(("world_size", "device"), [(2, "cpu"), (4, "cpu"), (3, "cpu"), (2, "emu"), (4, "emu")])
def test_bytes(nursery: Nursery, tmp_path: Path, world_size: int, device: str) -> None:
    run(nursery, tmp_path, world_size, f"g.bytes_over_the_link, {device!r}")


@pytest.mark.parametrize(
    ("world_size", "device", "trains_all"), [(2, "cpu", False), (2, "cpu", True), (3, "emu", False), (2, "emu", True)]
)
def test_reads_from_disk(nursery: Nursery, tmp_path: Path, world_size: int, device: str, trains_all: bool) -> None:
    run(nursery, tmp_path, world_size, f"g.reads_from_disk, {str(tmp_path)!r}, {device!r}, {trains_all}")


@pytest.mark.parametrize("trains_all", [False, True])
def test_what_the_drive_changed(nursery: Nursery, tmp_path: Path, trains_all: bool) -> None:
    run(nursery, tmp_path, 2, f"g.what_the_drive_changed_is_noticed, {str(tmp_path)!r}, {trains_all}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranges_lie_at_the_devices(nursery: Nursery, tmp_path: Path, world_size: int) -> None:
    run(nursery, tmp_path, world_size, "g.ranges_lie_at_the_devices")


@pytest.mark.parametrize(("at", "more"), [(3, (4, 1, 2)), (1, (4,))])
def test_a_rank_goes_astray(nursery: Nursery, tmp_path: Path, at: int, more: tuple[int, ...]) -> None:
    run(nursery, tmp_path, 2, f"g.a_rank_goes_astray_and_needs_more, {at}, {more}")


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_reductions_are_in_flight(nursery: Nursery, tmp_path: Path, device: str) -> None:
    run(nursery, tmp_path, 2, f"g.reductions_are_in_flight, {device!r}")


@pytest.mark.core(device="emu")
@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_ranks_that_go_their_own_ways(nursery: Nursery, tmp_path: Path, device: str) -> None:
    run(nursery, tmp_path, 2, f"g.ranks_that_go_their_own_ways, {device!r}")


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_the_first_rank_chooses(nursery: Nursery, tmp_path: Path, device: str) -> None:
    run(nursery, tmp_path, 2, f"g.the_first_rank_chooses, {device!r}")


@pytest.mark.parametrize(
    "program",
    ["accumulation", "writes", "no_sync_is_forgotten_with_its_gradients", "what_no_sync_kept_is_averaged_once"],
)
def test_as_otherwise(nursery: Nursery, tmp_path: Path, program: str) -> None:
    run(nursery, tmp_path, 2, f"m.{program}")


@pytest.mark.core(how=["dies", "raises in backward"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "how", ["dies", "raises in forward", "raises in backward", "cleans up first", "ends early", "goes on"]
)
def test_a_rank_fails(nursery: Nursery, tmp_path: Path, how: str, world_size: int) -> None:
    *others, last = started(nursery, tmp_path, world_size, f"m.a_rank_fails, {how!r}")
    for one in others:
        assert one.read_rest() == "done\n", one.errors
        assert one.wait() == 0, one.errors
    last.wait()
