"""Whatever happens at any system call of a run that is saved or loaded: is a whole checkpoint there, with its values?

EVERY_CALL=1 pytest -m extended tests/checkpoint/test_every_call.py strikes at all calls, of all kinds and tiers.
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoint.faults import EVERY, KINDS, Flushed, Nth, Saved, at_each_call, fails
from tests.distributed.struck import held
from tests.support.nursery import Nursery, run_ranks, start_ranks

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:(the )?older checkpoint", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

IS_ASKED = "EVERY_CALL" in os.environ
STEP = EVERY if IS_ASKED else 29
RUNS = (
    [(kind, place) for kind in KINDS for place in ("host", "disk")]
    if IS_ASKED
    else [("AdamW", "disk"), ("Muon", "host")]
)


def numbers(kind: str, place: str) -> Iterator[int]:
    """Of the calls that are struck: others for each kind."""
    return itertools.count(RUNS.index((kind, place)) % STEP, STEP)


def put_down(what: str, points: int) -> None:
    """Into the file that POINTS names, how many points there were."""
    if "POINTS" in os.environ:
        with Path(os.environ["POINTS"]).open("a") as file:
            file.write(f"{what}: {points}\n")


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("kind", "place"), RUNS)
def test_a_call_of_a_save_fails(tmp_path: Path, kind: str, place: str, wait: bool, on: bool) -> None:
    saved = Saved(kind, place)
    for number in numbers(kind, place):
        directory, calls = tmp_path / str(number), Nth(number, fails, on=on)
        with saved.begun(directory) as one:
            with at_each_call(calls):
                well = saved.save(one, directory, wait=wait)
            held = saved.holds(directory)
            assert held == well or (on and not well), calls.calls[number : number + 1]
        if not calls.happened:
            break
    put_down(f"save fails {kind} {place} {wait=} {on=}", number // STEP)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize(("kind", "place"), RUNS)
def test_a_call_of_a_load_fails(tmp_path: Path, kind: str, place: str, on: bool) -> None:
    saved = Saved(kind, place)
    for number in numbers(kind, place):
        directory, calls = tmp_path / str(number), Nth(number, fails, on=on)
        with saved.begun(directory) as one:
            with at_each_call(calls):
                well = saved.load(one, directory)
            assert saved.holds(directory) == 0
            saved.is_loaded(one, directory, well=well)
        if not calls.happened:
            break
    put_down(f"load fails {kind} {place} {on=}", number // STEP)


KILLED = """
import itertools, os, pathlib, sys, torch
sys.path.insert(0, sys.argv[7])
from tests.checkpoint.faults import Nth, Saved, at_each_call, is_killed
root, kind, place, what, first, step = pathlib.Path(sys.argv[1]), *sys.argv[2:5], *map(int, sys.argv[5:7])
torch.set_num_threads(1)
saved = Saved(kind, place)
child = os.fork()
if not child:  # what has threads is not forked
    with saved.begun(root / "first"):
        torch.save(saved.values, root / "values.pt")
    os._exit(0)
os.waitpid(child, 0)
saved.values = torch.load(root / "values.pt")
for number in itertools.count(first, step):
    directory = root / str(number)
    child = os.fork()
    if not child:
        with saved.begun(directory) as one, at_each_call(Nth(number, is_killed)):
            if what == "load":
                saved.load(one, directory)
            else:
                saved.save(one, directory, wait=what == "wait")
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    held = saved.holds(directory)
    assert held == 0 or what != "load"
    if code != -9:
        assert (code, held) == (0, what != "load"), (code, held)
        break
print(number // step)
"""


@pytest.mark.parametrize("what", ["wait", "beside", "load"])
@pytest.mark.parametrize(("kind", "place"), RUNS)
def test_a_process_is_killed_at_a_call(tmp_path: Path, nursery: Nursery, kind: str, place: str, what: str) -> None:
    child = nursery.start(KILLED, tmp_path, kind, place, what, next(numbers(kind, place)), STEP, os.getcwd())
    assert child.wait() == 0, child.errors
    put_down(f"killed {kind} {place} {what}", int(child.read_rest()))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("kind", "place"), RUNS)
def test_the_power_is_lost_at_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, place: str, wait: bool
) -> None:
    saved, left = Saved(kind, place), list[Path]()
    with saved.begun(tmp_path / "now") as one:
        flushed, calls = Flushed(tmp_path / "now"), itertools.count()

        def power_is_lost(_: str) -> None:
            if next(calls) % STEP == 0:
                for removed in (frozenset[int](), flushed.gone()):
                    left.append(tmp_path / str(len(left)))
                    flushed.restore(left[-1], removed=removed)

        monkeypatch.setattr(os, "fsync", flushed.fsync)
        with at_each_call(power_is_lost):
            assert saved.save(one, tmp_path / "now", wait=wait)
        flushed.close()
    held = [saved.holds(directory) for directory in left]
    assert held == sorted(held)
    put_down(f"power {kind} {place} {wait=}", len(left))


# On disk a step of the struck rank would fail beside the save, and end the run of both.
@pytest.mark.parametrize("struck", [0, 1])
@pytest.mark.parametrize(("what", "place"), [("save", "host"), ("load", "host"), ("load", "disk")])
def test_a_call_of_one_of_two_ranks_fails(tmp_path: Path, nursery: Nursery, what: str, struck: int, place: str) -> None:
    run_ranks(
        nursery, tmp_path, 2, f"struck.saves_and_loads, {str(tmp_path)!r}, {what!r}, {struck}, {place!r}, 0, {STEP}"
    )
    put_down(f"two ranks {what} {struck=} {place}", int((tmp_path / f"points-{struck}").read_text()))


@pytest.mark.parametrize("struck", [0, 1])
def test_one_of_two_ranks_is_killed_at_a_call(tmp_path: Path, nursery: Nursery, struck: int) -> None:
    for number in itertools.count(step=STEP):
        directory = tmp_path / str(number)
        directory.mkdir()
        call = f"struck.is_killed_in_saving, {str(directory)!r}, {struck}, {number}"
        for one in start_ranks(nursery, directory, 2, call):
            one.wait()
        found, either = held(directory), torch.load(directory / "values.pt")
        assert any(all(map(torch.equal, found, values)) for values in either)
        if (directory / "survived").exists():
            break
    put_down(f"one of two ranks killed {struck=}", number // STEP)
