"""What is left of a run that is killed at any moment? A whole checkpoint, from which it goes on as if nothing had been.

`KILLS=200 pytest tests/checkpoint/test_killed.py` kills as often for each kind.
"""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoint.runs import run
from tests.support.compare import assert_same
from tests.support.nursery import Nursery

pytestmark = pytest.mark.extended

KILLS = int(os.environ.get("KILLS", "4"))
STEPS = 12
RUN = """
import pathlib, sys, torch, headrace, headrace.checkpoint
sys.path.insert(0, sys.argv[4])
from tests.checkpoint.runs import run
place, wait, directory = sys.argv[1], sys.argv[2] == "wait", pathlib.Path(sys.argv[3])
torch.set_num_threads(1)
with run(place, directory / "tiers", device="cpu", overlap="forward") as one:
    done = 0
    newest = headrace.checkpoint.newest(directory / "checkpoints")
    if newest is not None:
        done = headrace.load(newest, one.model, one.optimizer)["done"]
    print("begins after", done, flush=True)
    saving = None
    while done < 12:
        one.step()
        done += 1
        before, path = saving, directory / "checkpoints" / f"step-{done}"
        saving = headrace.save(path, one.model, one.optimizer, extra={"done": done}, keep=2, wait=wait)
        if before is not None:
            print("whole before", done, flush=True)  # a save begins when the one before is whole
    if saving is not None:
        saving.wait()
    torch.save(one.values(), directory / "values.pt")
"""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("wait", ["wait", "beside"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_killed_run_goes_on(tmp_path: Path, nursery: Nursery, place: str, wait: str) -> None:
    with run(place, tmp_path / "whole", overlap="forward") as whole:
        whole.step(STEPS)
        wanted = whole.values()
    chance = random.Random(f"{place} {wait}")
    kills, ends, went_on = 0, 0, 0
    while kills < KILLS or not ends:
        child = nursery.start(RUN, place, wait, tmp_path, os.getcwd())
        begun = child.read_line()
        assert begun, child.errors
        went_on += int(begun.split()[-1]) > 0
        if kills < KILLS:
            for _ in range(1 if kills == 0 else chance.randrange(3)):
                child.read_line()
            time.sleep(chance.random() * 0.1)
            child.send(signal.SIGKILL)
        code = child.wait()
        if code == -signal.SIGKILL:
            kills += 1
            continue
        assert code == 0, child.errors  # it was at its end already
        ends += 1
        assert_same(torch.load(tmp_path / "values.pt"), wanted)
        left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert left == sorted(f"step-{number}" for number in (STEPS - 1, STEPS)), "nothing else stays behind"
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "values.pt").unlink()
    assert went_on > 0, "some run went on from a checkpoint"


AT_EACH_CALL = """
import itertools, os, pathlib, sys, torch, headrace
sys.path.insert(0, sys.argv[3])
from tests.checkpoint.faults import EVERY, Nth, Watched, at_each_call, is_killed
torch.set_num_threads(1)
for number in itertools.count(step=EVERY):
    watched = Watched(pathlib.Path(sys.argv[1]) / str(number))
    child = os.fork()
    if not child:
        with at_each_call(Nth(number, is_killed), exchanges=sys.argv[2] == "exchanges"):
            headrace.save(watched.path, watched.model)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    held = watched.holds(watched.directory)
    headrace.save(watched.path, watched.model)
    assert watched.holds(watched.directory) == 1
    assert [path.name for path in watched.path.parent.iterdir()] == ["step-2"]
    if code != -9:
        assert (code, held) == (0, 1)
        break
print(number)
"""


@pytest.mark.parametrize("how", ["exchanges", "renames"])
def test_killed_at_any_call_a_save_leaves_what_was_there_or_what_is_saved(
    tmp_path: Path, nursery: Nursery, how: str
) -> None:
    child = nursery.start(AT_EACH_CALL, tmp_path, how, os.getcwd())
    assert child.wait() == 0, child.errors
    assert int(child.read_rest()) > 100
