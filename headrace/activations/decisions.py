"""What leaves at a save, and what comes back at a use? As planned; under another plan's ceiling; or a few at a time.

With inputs of random length, or experts that get different tokens at every step, autograd saves sizes that no plan has
seen. Then the plan of another forward gives the ceiling and the share that leaves, and the rule of
planning/activations.py is applied to the items that are there: the earliest saved leave first, and items come back in
reverse order, as early as the ceiling allows.
"""

import itertools
import math
import weakref
from bisect import bisect_left
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from headrace.activations.item import Item, Presence
from headrace.activations.resident_index import Items, ResidentIndex
from headrace.planning import ActivationPlan

_UNPLANNED_COPIES = 2  # in flight at once in each direction, as long as there is no plan


class Basis(Enum):
    """What the decisions about a forward are based on."""

    PLAN = "its plan"
    SIMILAR = "the plan of a forward with other sizes"
    NOTHING = "nothing: it is the first of its kind"


class Decisions(Protocol):
    """The questions that a trace asks, in the order of events."""

    basis: Basis

    def leaves(self, item: Item) -> bool:
        """Whether the item's copy to the host begins now that it is saved."""

    def to_let_go(self, item: Item) -> Iterable[Item]:
        """The items whose device memory is freed now that `item` is saved; what was not copied yet is copied first."""

    def to_send_for(self, item: Item, backward_round: int) -> Iterable[Item]:
        """The items whose copies back begin now that backward uses `item`."""


class AsPlanned:
    """Follows the forward's own plan: every item is the one that the plan has at its index."""

    basis = Basis.PLAN

    def __init__(self, plan: ActivationPlan, items: Items) -> None:
        self._plan = plan
        self._items = items

    def leaves(self, item: Item) -> bool:
        return item.index in self._plan.offloaded

    def to_let_go(self, item: Item) -> Iterable[Item]:
        return self._present(self._plan.releases[item.index])

    def to_send_for(self, item: Item, backward_round: int) -> Iterable[Item]:
        position = self._plan.position_of_use.get(item.index)
        return () if position is None else self._present(self._plan.reloads[position])

    def _present(self, indices: Iterable[int]) -> Iterable[Item]:
        """The items at these indices that still exist. A backward within the forward runs before the last are saved."""
        saved = (self._items[index] for index in indices if index < len(self._items))
        return [item for ref in saved if (item := ref()) is not None]


class Unplanned:
    """Every item leaves as soon as it is saved, a few of them at a time."""

    basis = Basis.NOTHING

    def __init__(self, items: Items) -> None:
        self._items = items
        self._sent: list[int] = []  # indices of the items that left
        self._leaving: list[weakref.ref[Item]] = []  # the items that were being copied out at the last save

    def leaves(self, item: Item) -> bool:
        return True

    def to_let_go(self, item: Item) -> Iterable[Item]:
        if item.presence is Presence.LEAVING:  # there was host memory for its copy
            self._sent.append(item.index)
            self._leaving.append(weakref.ref(item))
        leaving = [
            other for ref in self._leaving if (other := ref()) is not None and other.presence is Presence.LEAVING
        ]
        self._leaving = [weakref.ref(other) for other in leaving]
        return [other for other in leaving[:-_UNPLANNED_COPIES] if other.is_alone]

    def to_send_for(self, item: Item, backward_round: int) -> Iterable[Item]:
        found: list[Item] = []
        for place in range(bisect_left(self._sent, item.index) - 1, -1, -1):
            other = self._items[self._sent[place]]()
            if other is not None and other.presence is not Presence.HERE and other.round != backward_round:
                found.append(other)
                if len(found) == _UNPLANNED_COPIES:
                    break
        return found


class ByCeiling:
    """Keeps to the ceiling of a plan for other sizes. Without `budget_bytes`, it is scaled to this forward's sizes.

    `items`: the items of the trace. Those that are there at construction were saved as planned.
    """

    basis = Basis.SIMILAR

    def __init__(self, plan: ActivationPlan, items: Items) -> None:
        problem = plan.problem
        count = len(items)
        self._plan = plan
        self._items = items
        self._planned_bytes = [0, *itertools.accumulate(saved.nbytes for saved in problem.saved)]  # before each save
        self._saved_bytes = self._planned_bytes[count]
        self._sent_bytes = sum(problem.saved[index].nbytes for index in plan.offloaded if index < count)
        self._largest_bytes = max((saved.nbytes for saved in problem.saved[:count]), default=0)
        # The first save in each module, by the module's name: there, saved bytes are compared with the planned ones.
        self._begins = {saved.name: index for index, saved in reversed(list(enumerate(problem.saved)))}
        self._reached = count  # the index in the plan's saves at which that was done last
        self._factor = 1.0 if count else None
        self._residents = ResidentIndex(items)
        self._round = -1
        self._next = 0  # items from this index on were sent for in this round, or need not be

    def leaves(self, item: Item) -> bool:
        # The earliest saved items leave, until those that stay fit under the ceiling.
        begin = self._begins.get(item.name, 0)
        if begin > self._reached and self._saved_bytes:
            self._reached, self._factor = begin, self._saved_bytes / self._planned_bytes[begin]
        stays_in_a_crowd = self._stays_in_a_crowd
        self._residents.note(item)  # counted at the next look, when it is known whether the item leaves
        self._saved_bytes += item.nbytes
        self._largest_bytes = max(self._largest_bytes, item.nbytes)
        staying_bytes = self._scale * self._plan.problem.nbytes - self._sent_bytes
        needed = staying_bytes + self._largest_bytes > self._forward_ceiling_bytes
        return needed and not stays_in_a_crowd and self._sends(item)

    def to_let_go(self, item: Item) -> Iterable[Item]:
        # Room is also made for the next item, which may be as large as the largest so far.
        problem, here = self._plan.problem, self._residents
        here.look()
        over_bytes = here.nbytes + self._largest_bytes - self._forward_ceiling_bytes
        crowd = 0 if problem.most_in_flight is None else here.leaving - problem.most_in_flight
        found = []
        index = 0
        while over_bytes > 0 or crowd > 0:
            late = problem.budget_bytes is not None and over_bytes > 0  # compute waits for a copy that begins only now
            other = here.first(index, max(0, self._bytes_left) if late else 0)
            if other is None:
                break
            index = other.index + 1
            if other.is_alone and (other.presence is Presence.LEAVING or self._sends(other)):
                found.append(other)
                over_bytes -= other.nbytes
                crowd -= 1
        return found

    def to_send_for(self, item: Item, backward_round: int) -> Iterable[Item]:
        if backward_round != self._round:
            self._round, self._next = backward_round, item.index
        self._next = min(self._next, item.index)
        self._residents.note(item)
        self._residents.look()
        here_bytes = self._residents.nbytes
        found: list[Item] = []
        while self._next > 0:
            other = self._items[self._next - 1]()
            if other is not None and other.presence is Presence.AWAY and other.round != backward_round:
                here_bytes += other.nbytes
                if here_bytes > self._ceiling_bytes:
                    break
                self._residents.note(other)
                found.append(other)
            self._next -= 1
        return found

    @property
    def _stays_in_a_crowd(self) -> bool:
        """Whether so many copies are under way that compute would wait for one, although no budget demands that."""
        problem = self._plan.problem
        if problem.most_in_flight is None or problem.budget_bytes is not None or problem.all_leave:
            return False
        self._residents.look()
        return self._residents.leaving >= problem.most_in_flight

    @property
    def _scale(self) -> float:
        """The ratio of this forward's bytes to the planned ones, judged by the saves so far."""
        if self._factor is not None:
            return self._factor
        return self._saved_bytes / self._planned_bytes[min(len(self._items), len(self._planned_bytes) - 1)]

    @property
    def _ceiling_bytes(self) -> float:
        budget_bytes = self._plan.problem.budget_bytes
        return self._scale * self._plan.peak_bytes if budget_bytes is None else budget_bytes

    @property
    def _forward_ceiling_bytes(self) -> float:
        return 0 if self._plan.problem.all_leave else self._ceiling_bytes

    @property
    def _bytes_left(self) -> int:
        """The largest size of an item that may still leave."""
        problem = self._plan.problem
        most_bytes = problem.nbytes if problem.offload_bytes is None else problem.offload_bytes
        if most_bytes < problem.nbytes:
            return math.floor(self._scale * most_bytes) - self._sent_bytes
        return self._largest_bytes

    def _sends(self, item: Item) -> bool:
        """Whether the item may leave; if so, its bytes are counted as sent."""
        if item.nbytes > self._bytes_left:
            return False
        self._sent_bytes += item.nbytes
        return True
