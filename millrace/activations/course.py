"""What leaves and comes back during one forward and its backward? As the plan says; without one, a few at a time.

Each outermost forward has a course of its own, which its saved tensors keep alive. So any number of forwards may come
before any number of backwards. A course that has no plan, or that strays from it, is recorded and planned for.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from millrace.activations.item import Item, Place
from millrace.activations.stash import Stash
from millrace.planning import ActivationPlan
from millrace.runtime.device import allocated_bytes
from millrace.runtime.lanes import Tick

__all__ = ["Course", "SaveRecord", "UseRecord"]

_MOST_LOOKS = 512  # at what else the device holds, in one forward
_UNPLANNED_COPIES = 2  # in flight at once, each way, while nothing is planned


@dataclass
class SaveRecord:
    """One save as it happened; ticks of the compute lane before and after what was done at it."""

    nbytes: int
    name: str
    asked: Tick
    began: Tick
    weights_bytes: int  # what had been sent for by the weights since the beginning
    others: "Others"
    alone_at: int | None = None  # the save at which nobody else held the memory any more


@dataclass
class UseRecord:
    """One first use in backward as it happened."""

    index: int
    asked: Tick
    began: Tick
    freed_at: int  # the position of the item's last use
    weights_bytes: int  # what had been sent for by the weights since the beginning
    others: "Others"


class Others(NamedTuple):
    """What was on the device at a moment, beside what the course had there: bytes that stay, and others."""

    gradient_bytes: int  # of parameters
    passing_bytes: int  # weights, and values that nobody saved


class Course:
    """One forward and its backward. `timed`: its ticks are wanted, because there is no plan or one to be refined."""

    def __init__(
        self, stash: Stash, plan: ActivationPlan | None, gradient_bytes: Callable[[], int], *, timed: bool
    ) -> None:
        self._stash = stash
        self._gradient_bytes = gradient_bytes  # of the model's parameters, on the device now
        self.plan = plan
        self.timed = timed
        self.strayed = False
        self.is_over = False  # the forward
        self.calls = 0  # of the model, that are under way
        self.learned = False
        self.used_unplanned = False  # its backward went further than that which the plan was made of
        self.saves: list[SaveRecord] = []
        self.uses: list[UseRecord] = []
        self._positions: dict[int, int] = {}  # of first uses that were recorded, by the item's index
        self._items: list[weakref.ref[Item]] = []
        self._others = Others(0, 0)  # at the last look
        # Of a course that is timed: somebody else held their memory at the last look.
        self._shared: list[tuple[Item, SaveRecord]] = []

    @property
    def follows(self) -> ActivationPlan | None:
        """The plan, as long as the course is as planned."""
        return None if self.strayed else self.plan

    @property
    def is_part(self) -> bool:
        """Whether an interrupt left gaps in it, or its backward used less than that which the plan was made of."""
        if len(self.saves) < len(self._items) or len(self.uses) < len(self._positions):
            return True
        return self.plan is not None and not self.plan.position_of_use.keys() <= self._positions.keys()

    @property
    def is_gone(self) -> bool:
        """Whether all that it saved has been let go of."""
        return bool(self._items) and all(ref() is None for ref in self._items)

    # forward ----------------------------------------------------------------------------------------------------------
    def saved(self, item: Item) -> None:
        """Autograd saved an item for the first time: it is sent out, and others are let go of."""
        asked = self._stash.lanes.tick() if self.timed else None
        self._items.append(weakref.ref(item))
        self._compare(item)
        plan = self.follows
        if plan is None or item.index in plan.offloaded:
            self._stash.send_out(item)
        for other in self._to_let_go(item.index):
            self._stash.let_go(other)
        if self.timed:
            weights_bytes, others = self._stash.meter.lane_use.weights_bytes, self._look_at_others()
            began = self._stash.lanes.tick()
            record = SaveRecord(item.nbytes, item.name, asked, began, weights_bytes, others)
            self.saves.append(record)
            self._shared.append((item, record))
            self.look_who_is_alone()

    def _look_at_others(self) -> Others:
        """Looks at every item, so only a course that a plan is refined by asks, and in long ones not every time."""
        if self.plan is None or (len(self.saves) + len(self.uses)) % (1 + len(self.plan.problem.saved) // _MOST_LOOKS):
            return self._others
        items = [item for ref in self._items if (item := ref()) is not None]
        gradient_bytes = self._gradient_bytes()
        counted_bytes = gradient_bytes + sum(item.nbytes for item in items if item.memory is not None)
        self._others = Others(gradient_bytes, allocated_bytes(self._stash.lanes.device) - counted_bytes)
        return self._others

    def look_who_is_alone(self) -> None:
        """Notes whose memory is held by nobody else any more."""
        still_shared = []
        for item, record in self._shared:
            if item.memory is not None and not item.is_alone:
                still_shared.append((item, record))
            else:
                record.alone_at = len(self.saves) - 1
        self._shared = still_shared

    def end_forward(self) -> None:
        """The forward ends, or its backward begins."""
        if self.is_over:
            return
        self.is_over = True
        plan = self.follows
        if plan is not None and len(self._items) != len(plan.problem.saved):
            self._stray()
        if self.timed:
            self.look_who_is_alone()
            self._shared.clear()

    def _compare(self, item: Item) -> None:
        plan = self.follows
        if plan is None:
            return
        expected = plan.problem.saved
        if item.index >= len(expected) or expected[item.index].nbytes != item.nbytes:
            self._stray()

    def _stray(self) -> None:
        self.strayed = True
        self.timed = False  # its beginning was not timed: the next one is recorded from its beginning

    def _to_let_go(self, index: int) -> list[Item]:
        plan = self.follows
        if plan is not None:
            return [item for other in plan.releases[index] if (item := self._items[other]()) is not None]
        leaving = [item for ref in self._items if (item := ref()) is not None and item.place is Place.LEAVING]
        return [item for item in leaving[:-_UNPLANNED_COPIES] if item.is_alone]

    # backward ---------------------------------------------------------------------------------------------------------
    def used(self, item: Item, backward_round: int, *, recorded: bool) -> None:
        """Backward needs the item, for the first time in this backward: it is there when compute goes on."""
        stash = self._stash
        recorded = recorded and self.is_over
        self.used_unplanned |= recorded and self.plan is not None and item.index not in self.plan.position_of_use
        recorded = recorded and self.timed and not self.learned and item.index not in self._positions
        asked = stash.lanes.tick() if recorded else None
        if item.place is Place.AWAY:
            stash.meter.demand_onloads += 1
            stash.send_for(item, needed=True)
        else:
            stash.meter.hits += 1
        stash.arrive(item)
        if recorded:
            self._positions[item.index] = len(self.uses)
            weights_bytes = stash.meter.lane_use.weights_bytes
            position, others = len(self.uses), self._look_at_others()
            self.uses.append(UseRecord(item.index, asked, stash.lanes.tick(), position, weights_bytes, others))
        for other in self._to_send_for(item.index, backward_round):
            stash.send_for(other, needed=False)

    def used_again(self, item: Item) -> None:
        """Another saved tensor that is part of the item is needed."""
        position = self._positions.get(item.index)
        if position is not None and not self.learned:
            self.uses[position].freed_at = len(self.uses) - 1

    def end_backward(self) -> None:
        """What came back and is still held for somebody goes: the host has it."""
        for ref in self._items:
            item = ref()
            if item is not None:
                self._stash.put_back(item)

    def _to_send_for(self, index: int, backward_round: int) -> list[Item]:
        plan = self.follows
        if plan is not None:
            position = plan.position_of_use.get(index)
            wanted = () if position is None else plan.reloads[position]
            return [item for other in wanted if (item := self._items[other]()) is not None]
        found: list[Item] = []
        for ref in reversed(self._items[:index]):
            item = ref()
            if item is not None and item.place is not Place.HERE and item.round != backward_round:
                found.append(item)
                if len(found) == _UNPLANNED_COPIES:
                    break
        return found
