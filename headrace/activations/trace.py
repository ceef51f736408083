"""What happens during one forward and its backward? Items leave and come back, and are compared with the plan.

Each outermost forward has a trace of its own, which its saved tensors keep alive. So any number of forwards may come
before any number of backwards. What leaves and when is decided in decisions.py.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from headrace.activations.choices import Measured, ValueKind
from headrace.activations.decisions import AsPlanned, Basis, ByCeiling, Decisions, Unplanned
from headrace.activations.item import Item, Presence
from headrace.activations.stash import Stash
from headrace.planning import ActivationPlan
from headrace.runtime.device import allocated_bytes
from headrace.runtime.lanes import Tick

# What was known of a forward when it began: how many share the ceiling, the number of the choice of what checkpoints
# keep, and what `entry_of` says.
Entry = tuple[Any, ...]

_MOST_LOOKS = 512  # about how often, at most, a forward and its backward look at what else the device holds


@dataclass
class SaveRecord:
    """One save as it happened, with ticks of the compute lane before and after what headrace did at it."""

    nbytes: int
    name: str
    shape: str
    asked: Tick
    began: Tick
    weights_bytes: int  # the bytes of weights sent for since the beginning
    others: "Others"
    alone_at: int | None = None  # the save at which nobody else was found to hold the memory any more


@dataclass
class UseRecord:
    """The first use of an item in a backward, as it happened."""

    index: int
    asked: Tick
    began: Tick
    freed_at: int  # the position of the item's last use
    weights_bytes: int  # the bytes of weights sent for since the beginning
    others: "Others"
    recomputed: "Others"  # the most that was there at the end of a recomputation before the next use


class Others(NamedTuple):
    """What was on the device at a moment, beside the items of the trace: bytes that stay, and bytes that pass."""

    gradient_bytes: int  # gradients of parameters
    passing_bytes: int  # weights, and values that nobody saved


class Expected(NamedTuple):
    """What is known of a forward that begins: its plan, or the plan of a forward with other sizes.

    `timed`: whether its ticks are recorded, because there is no plan yet or the plan is still to be refined.
    """

    plan: ActivationPlan | None
    similar: ActivationPlan | None
    timed: bool


class ForwardTrace:
    """One forward and its backward."""

    def __init__(self, stash: Stash, entry: Entry, expected: Expected, gradient_bytes: Callable[[], int]) -> None:
        self._stash = stash
        self.entry = entry  # what was known when it began
        self._gradient_bytes = gradient_bytes  # the bytes of the parameters' gradients on the device now
        self.plan = expected.plan
        self.timed = expected.timed
        self.strayed = False
        self.is_over = False  # whether the forward has ended, by itself or because its backward has begun
        self.calls = 0  # how many calls of the model are under way: a backward within them is a part of the forward
        self.learned = False
        self.used_unplanned = False  # its backward used items that the plan's backward does not use
        self.saves: list[SaveRecord] = []
        self.uses: list[UseRecord] = []
        self.measured: dict[ValueKind, Measured] = {}  # what checkpoints have computed again for it, while they learn
        self.recomputed_names: dict[str, None] = {}  # of the modules that a backward has called again
        self._items: list[weakref.ref[Item]] = []
        self._decisions = _decisions(expected, self._items)
        self._others = Others(0, 0)  # as seen at the last look
        # In a timed trace: the items whose memory somebody else held at the last look.
        self._shared: list[tuple[Item, SaveRecord]] = []

    @property
    def basis(self) -> Basis:
        """What the decisions about this forward are based on."""
        return self._decisions.basis

    @property
    def is_part(self) -> bool:
        """Whether the record is partial: an interrupt left gaps in it, or backward used fewer items than planned."""
        used = {use.index for use in self.uses}
        if len(self.saves) < len(self._items) or len(used) < len(self.uses):
            return True
        return self.plan is not None and not self.plan.position_of_use.keys() <= used

    @property
    def is_held(self) -> bool:
        """Whether autograd still has an item that it saved."""
        return any(ref() is not None for ref in self._items)

    @property
    def is_gone(self) -> bool:
        """Whether autograd has let go of every item that it saved."""
        return bool(self._items) and not self.is_held

    # forward ----------------------------------------------------------------------------------------------------------
    def saved(self, item: Item) -> None:
        """Called when autograd saves an item for the first time: sends it out and lets go of others, as decided."""
        asked = self._stash.lanes.tick() if self.timed else None
        self._compare(item)
        self._items.append(weakref.ref(item))
        if self._decisions.leaves(item):
            self._stash.send_out(item)
        for other in self._decisions.to_let_go(item):
            self._stash.send_out(other)
            self._stash.let_go(other)
        if self.timed:
            weights_bytes, others = self._stash.meter.lane_use.weights_bytes, self._look_at_others()
            began = self._stash.lanes.tick()
            record = SaveRecord(item.nbytes, item.name, _shape(item), asked, began, weights_bytes, others)
            self.saves.append(record)
            self._shared.append((item, record))
            self.look_who_is_alone()

    def _look_at_others(self) -> Others:
        """What else the device holds. Only a trace that refines a plan looks, and a long one not every time, because
        a look goes through all items."""
        looks = len(self.saves) + len(self.uses)
        if self.plan is not None and looks % (1 + len(self.plan.problem.saved) // _MOST_LOOKS) == 0:
            self._others = self._others_now()
        return self._others

    def _others_now(self) -> Others:
        items = [item for ref in self._items if (item := ref()) is not None]
        gradient_bytes = self._gradient_bytes()
        counted_bytes = gradient_bytes + sum(item.nbytes for item in items if item.memory is not None)
        return Others(gradient_bytes, allocated_bytes(self._stash.lanes.device) - counted_bytes)

    def look_who_is_alone(self) -> None:
        """Records for each item when nobody else is found to hold its memory any more."""
        still_shared = []
        for item, record in self._shared:
            if item.memory is not None and not item.is_alone:
                still_shared.append((item, record))
            else:
                record.alone_at = len(self.saves) - 1
        self._shared = still_shared

    def end_forward(self) -> None:
        """Called when the forward ends, or when its backward begins."""
        if self.is_over:
            return
        self.is_over = True
        if self.plan is not None and len(self._items) != len(self.plan.problem.saved):
            self._stray(self.plan)
        if self.timed:
            self.look_who_is_alone()
            self._shared.clear()

    def _compare(self, item: Item) -> None:
        if self.plan is not None:
            planned = self.plan.problem.saved
            if item.index >= len(planned) or planned[item.index].nbytes != item.nbytes:
                self._stray(self.plan)

    def _stray(self, plan: ActivationPlan) -> None:
        if not self.strayed:
            self.strayed = True
            self.timed = False  # another forward is timed from its beginning instead
            self._decisions = ByCeiling(plan, self._items)

    # backward ---------------------------------------------------------------------------------------------------------
    def used(self, item: Item, backward_round: int, *, recorded: bool) -> None:
        """Called when a backward first needs the item: it is on the device when compute goes on."""
        stash = self._stash
        recorded = recorded and self.is_over
        self.used_unplanned |= recorded and self.plan is not None and item.index not in self.plan.position_of_use
        recorded = recorded and self.timed and not self.learned and item.use is None
        asked = stash.lanes.tick() if recorded else None
        if item.presence is Presence.AWAY:
            stash.meter.demand_onloads += 1
            stash.send_for(item, needed=True)
        else:
            stash.meter.hits += 1
        stash.arrive(item)
        if recorded:
            weights_bytes = stash.meter.lane_use.weights_bytes
            position, others = len(self.uses), self._look_at_others()
            use = UseRecord(item.index, asked, stash.lanes.tick(), position, weights_bytes, others, others)
            self.uses.append(use)
            item.use = use
        for other in self._decisions.to_send_for(item, backward_round):
            stash.send_for(other, needed=False)

    def used_again(self, item: Item) -> None:
        """Called when a backward that has used the item needs another saved tensor that is part of it."""
        if item.use is not None and not self.learned:
            item.use.freed_at = len(self.uses) - 1

    def recomputed(self, name: str) -> None:
        """Called when a recomputation for the last use has ended, and all its values are on the device. `name`: of the
        module that was called again."""
        self.recomputed_names[name] = None
        if self.timed and self.plan is not None and self.uses and not self.learned:
            use, others = self.uses[-1], self._others_now()
            item = self._items[use.index]()
            if item is not None and item.memory is None:  # what was computed from it still holds its memory
                others = others._replace(passing_bytes=others.passing_bytes - item.nbytes)
            use.recomputed = max(use.recomputed, others, key=lambda others: others.passing_bytes)

    def end_backward(self) -> None:
        """Lets go of the device memory of items that came back and are still held: the host has their bytes."""
        for ref in self._items:
            item = ref()
            if item is not None:
                self._stash.put_back(item)


def _shape(item: Item) -> str:
    """Dtype and shape of the first tensor that was saved of it."""
    handle = next(iter(item.handles))()
    return "" if handle is None else shape_text(handle.dtype, handle.size)


def shape_text(dtype: torch.dtype, size: torch.Size) -> str:
    """Dtype and shape, for texts."""
    return f"{dtype} {'x'.join(map(str, size))}".removeprefix("torch.")


def _decisions(expected: Expected, items: list[weakref.ref[Item]]) -> Decisions:
    if expected.plan is not None:
        return AsPlanned(expected.plan, items)
    return Unplanned(items) if expected.similar is None else ByCeiling(expected.similar, items)
