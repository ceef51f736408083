"""May a run be handed on from so many ranks to others, and saved again at once, without any state being lost?

RUNS=500 pytest -m extended tests/distributed/test_relay.py makes so many of each kind of seeds.
"""

import os
from pathlib import Path

import pytest

from tests.support.nursery import Nursery, run_ranks

COUNT = int(os.environ.get("RUNS", "4"))


@pytest.mark.extended
@pytest.mark.timeout(400 + 20 * COUNT)  # each stage starts its ranks anew
@pytest.mark.parametrize("first_seed", [0, 1000])
def test_random_runs(nursery: Nursery, tmp_path: Path, first_seed: int) -> None:
    seeds = f"{str(tmp_path)!r}, range({first_seed}, {first_seed + COUNT})"
    for stage in range(4):
        for ranks in (1, 2, 4):
            run_ranks(nursery, tmp_path, ranks, f"relay.stage, {seeds}, {stage}")
    run_ranks(nursery, tmp_path, 1, f"relay.check, {seeds}")
