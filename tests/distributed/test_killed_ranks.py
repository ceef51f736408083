"""When a rank is killed at any moment, do the others end with an error that names it, and is nothing left?

KILLS=200 pytest tests/distributed/test_killed_ranks.py
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.distributed.test_gather import GATHER
from tests.distributed.test_mesh_disk import left_in
from tests.support.nursery import Nursery, start_ranks

pytestmark = pytest.mark.core(seed=0)

KILLS = int(os.environ.get("KILLS", "4"))


def files_of_ranks() -> set[str]:
    """Memory that processes of this machine share and headrace has made."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "memfd:headrace" in os.readlink(link):
                found.add(link.parts[2])
        except OSError:
            continue
    return found


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(KILLS))
@pytest.mark.parametrize("way", ["own", "gather", "disk"])
def test_a_rank_is_killed(nursery: Nursery, tmp_path: Path, way: str, seed: int) -> None:
    chance = random.Random(f"{way} {seed}")
    world_size = chance.choice([2, 3])
    if way == "disk":
        ranks = start_ranks(nursery, tmp_path, world_size, f"on_disk.trains_until_a_rank_is_gone, {str(tmp_path)!r}")
    else:
        setup = GATHER if way == "gather" else ""
        ranks = start_ranks(nursery, tmp_path, world_size, "meshed.trains_until_a_rank_is_gone", setup)
    for one in ranks:
        assert one.read_line() == "trains\n", one.errors
    time.sleep(chance.uniform(0, 0.15))
    killed = chance.randrange(world_size)
    os.kill(ranks[killed].pid, signal.SIGKILL)
    for rank, one in enumerate(ranks):
        if rank != killed:
            said = one.read_rest()
            assert f"rank {killed} has ended" in said, (said, one.errors)
        assert one.wait() == (-signal.SIGKILL if rank == killed else 0)
    assert not files_of_ranks() & {str(one.pid) for one in ranks}
    assert not list(Path("/dev/shm").glob("*headrace*"))
    assert sum(path.stat().st_size for path in left_in(tmp_path)) < 100  # locks that nobody holds
