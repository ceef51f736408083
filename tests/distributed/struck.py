"""What two ranks run that save and load while calls of one of them fail; see tests/checkpoint/test_every_call.py."""

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import headrace
from headrace import DiskError, StateError, optim
from tests.checkpoint.faults import Nth, at_each_call, fails, is_killed
from tests.distributed.meshed import Model, batch, offloaded
from tests.distributed.on_disk import on_disk

SETTINGS: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}


class Ranks:
    """Two ranks that have one copy of a model, whose first step is saved."""

    def __init__(self, model: nn.Module, directory: Path) -> None:
        self.model, self.directory = model, directory
        self.optimizer = optim.SGD(model.parameters(), **SETTINGS)
        self.steps = 0
        self.step()
        self.save(1, wait=True)
        self.first = self.values()
        self.step()
        self.second = self.values()

    def step(self) -> None:
        self.model(batch(distributed.get_rank(), self.steps)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def save(self, number: int, *, wait: bool) -> bool:
        """By the first rank, beside a step of both. Whether that went well."""
        self.optimizer.consolidate_state_dict(to=0)
        saving, well = None, True
        if distributed.get_rank() == 0:
            try:
                path = self.directory / "runs" / f"step-{number}"
                saving = headrace.save(path, self.model, self.optimizer, keep=1, wait=wait)
            except (headrace.HeadraceError, OSError):
                well = False
        distributed.barrier()
        if not wait:
            self.step()
        if saving is not None:
            try:
                saving.wait()
            except (headrace.HeadraceError, OSError):
                well = False
        return _of_all(well)


def _of_all(well: bool) -> bool:
    found = torch.tensor([int(well)])
    distributed.all_reduce(found, distributed.ReduceOp.MIN)
    return bool(found)


def held(directory: Path) -> list[torch.Tensor]:
    """What the newest checkpoint has, in a model of this process alone."""
    newest = headrace.checkpoint.newest(directory / "runs")
    assert newest is not None
    model = Model()
    headrace.load(newest, model, optim.SGD(model.parameters(), **SETTINGS))
    return [p.detach() for p in model.parameters()]


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def saves_and_loads(root: str, what: str, struck: int, place: str, first: int, step: int) -> None:
    """A call of rank `struck` fails: in saving beside a step, or in loading."""
    points = 0
    for number in itertools.count(first, step):
        directory = Path(root) / str(number)
        model, calls = Model(), Nth(number if distributed.get_rank() == struck else 10**9, fails)
        with offloaded(model, **on_disk(str(directory)) if place == "disk" else {}):
            ranks = Ranks(model, directory)
            strike = at_each_call(calls)
            if what == "save":
                with strike:
                    well = ranks.save(2, wait=False)
                distributed.barrier()
                if distributed.get_rank() == 0:
                    assert _same(held(directory), ranks.second if well else ranks.first)
            else:
                _load(ranks, strike)
        if not _of_all(distributed.get_rank() != struck or calls.happened):
            break
        points += 1
    Path(root, f"points-{distributed.get_rank()}").write_text(str(points))


def _load(ranks: Ranks, strike: contextlib.AbstractContextManager[None]) -> None:
    path, well = ranks.directory / "runs" / "step-1", True

    def load() -> None:
        headrace.load(path, ranks.model, ranks.optimizer)

    with strike:
        try:
            load()
        except (headrace.HeadraceError, OSError):
            well = False
    if not well:
        with contextlib.suppress(StateError, DiskError):  # it says that it is torn, or a fetch of before has failed
            with torch.no_grad():
                ranks.model(batch(0, 0))
            assert _same(ranks.values(), ranks.second)
    if not _of_all(well):
        load()
    assert _same(ranks.values(), ranks.first)
    ranks.steps = 1
    ranks.step()
    assert _same(ranks.values(), ranks.second)


def is_killed_in_saving(root: str, struck: int, number: int) -> None:
    """Rank 0 saves beside a step of both; `struck` is killed at a call."""
    model = Model()
    calls: Callable[[str], None] = Nth(number if distributed.get_rank() == struck else 10**9, is_killed)
    with contextlib.suppress(headrace.HeadraceError, RuntimeError), offloaded(model):
        ranks = Ranks(model, Path(root))
        if distributed.get_rank() == 0:
            torch.save([ranks.first, ranks.second], Path(root) / "values.pt")
        with at_each_call(calls):
            ranks.save(2, wait=False)
        if distributed.get_rank() == struck:
            Path(root, "survived").touch()
