"""Are the decisions those of a rule that looks at every item each time? In random forwards and backwards."""

import itertools
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.activations import trace as trace_file
from headrace.activations.decisions import Basis, ByCeiling, Decisions, Unplanned
from headrace.activations.item import Item, Presence
from headrace.activations.meter import ActivationMeter
from headrace.activations.stash import Stash
from headrace.activations.trace import Expected, ForwardTrace
from headrace.config import ActivationConfig
from headrace.memory.ledger import Ledger
from headrace.planning import ActivationPlan, ActivationProblem, Saved, plan_activations
from headrace.runtime.lanes import Lanes, open_lanes
from headrace.runtime.link import LaneUse

Items = list["weakref.ref[Item]"]
SIZES = [1, 64, 100, 1000, 1000, 1000, 4096]


class PlainByCeiling:
    """Sums and sorts whatever it needs to know."""

    basis = Basis.SIMILAR

    def __init__(self, plan: ActivationPlan, items: Items) -> None:
        count = len(items)
        self.plan, self.items = plan, items
        self.planned = [saved.nbytes for saved in plan.problem.saved]
        self.saved = self.planned[:count]
        self.sent_bytes = sum(self.planned[index] for index in plan.offloaded if index < count)
        self.names = [saved.name for saved in plan.problem.saved]
        self.reached = count
        self.factor = 1.0 if count else None
        self.here = dict(enumerate(items))
        self.round, self.next = -1, 0

    def leaves(self, item: Item) -> bool:
        begin = self.names.index(item.name) if item.name in self.names else 0
        if begin > self.reached and self.saved:
            self.reached, self.factor = begin, sum(self.saved) / sum(self.planned[:begin])
        self.here[item.index] = weakref.ref(item)
        self.saved.append(item.nbytes)
        staying_bytes = self.scale() * sum(self.planned) - self.sent_bytes
        problem = self.plan.problem
        if problem.most_in_flight is not None and problem.budget_bytes is None and not problem.all_leave:
            leaving = sum(other.presence is Presence.LEAVING for other in self.present())
            if leaving >= problem.most_in_flight:
                return False
        return staying_bytes + max(self.saved) > self.forward_ceiling() and self.sends(item)

    def to_let_go(self, item: Item) -> list[Item]:
        problem = self.plan.problem
        here = self.present()
        over_bytes = sum(other.nbytes for other in here) + max(self.saved) - self.forward_ceiling()
        leaving = sum(other.presence is Presence.LEAVING for other in here)
        crowd = 0 if problem.most_in_flight is None else leaving - problem.most_in_flight
        found = []
        for other in here:
            if over_bytes <= 0 and crowd <= 0:
                break
            late = problem.budget_bytes is not None and over_bytes > 0
            if other.is_alone and (other.presence is Presence.LEAVING or (late and self.sends(other))):
                found.append(other)
                over_bytes -= other.nbytes
                crowd -= 1
        return found

    def to_send_for(self, item: Item, backward_round: int) -> list[Item]:
        if backward_round != self.round:
            self.round, self.next = backward_round, item.index
        self.next = min(self.next, item.index)
        self.here[item.index] = weakref.ref(item)
        here_bytes = sum(other.nbytes for other in self.present())
        found: list[Item] = []
        while self.next > 0:
            other = self.items[self.next - 1]()
            if other is not None and other.presence is Presence.AWAY and other.round != backward_round:
                here_bytes += other.nbytes
                if here_bytes > self.ceiling():
                    break
                self.here[other.index] = weakref.ref(other)
                found.append(other)
            self.next -= 1
        return found

    def scale(self) -> float:
        if self.factor is not None:
            return self.factor
        return sum(self.saved) / sum(self.planned[: len(self.items)])

    def ceiling(self) -> float:
        budget_bytes = self.plan.problem.budget_bytes
        return self.scale() * self.plan.peak_bytes if budget_bytes is None else budget_bytes

    def forward_ceiling(self) -> float:
        return 0 if self.plan.problem.all_leave else self.ceiling()

    def sends(self, item: Item) -> bool:
        most_bytes = self.plan.problem.offload_bytes
        limited = most_bytes is not None and most_bytes < sum(self.planned)
        if limited and self.sent_bytes + item.nbytes > self.scale() * (most_bytes or 0):
            return False
        self.sent_bytes += item.nbytes
        return True

    def present(self) -> list[Item]:
        found = {index: item for index in sorted(self.here) if (item := self.here[index]()) is not None}
        self.here = {index: self.here[index] for index, item in found.items() if item.memory is not None}
        return [found[index] for index in self.here]


class PlainUnplanned:
    """All that leaves is let go of but two; two are sent for."""

    basis = Basis.NOTHING

    def __init__(self, items: Items) -> None:
        self.items = items

    def leaves(self, item: Item) -> bool:
        return True

    def to_let_go(self, item: Item) -> list[Item]:
        leaving = [other for ref in self.items if (other := ref()) is not None and other.presence is Presence.LEAVING]
        return [other for other in leaving[:-2] if other.is_alone]

    def to_send_for(self, item: Item, backward_round: int) -> list[Item]:
        before = [other for ref in reversed(self.items[: item.index]) if (other := ref()) is not None]
        return [other for other in before if other.presence is not Presence.HERE and other.round != backward_round][:2]


class Both:
    """Two that must say the same. `counts`: of what they said."""

    def __init__(self, ours: Decisions, plain: Decisions, counts: Counter[str]) -> None:
        self.ours, self.plain, self.counts = ours, plain, counts
        self.basis = ours.basis

    def leaves(self, item: Item) -> bool:
        leaves, expected = self.ours.leaves(item), self.plain.leaves(item)
        assert leaves == expected
        self.counts[f"{self.basis.name} leaves" if leaves else f"{self.basis.name} stays"] += 1
        return leaves

    def to_let_go(self, item: Item) -> list[Item]:
        return self.same(self.ours.to_let_go(item), self.plain.to_let_go(item), "let go")

    def to_send_for(self, item: Item, backward_round: int) -> list[Item]:
        ours = self.ours.to_send_for(item, backward_round)
        return self.same(ours, self.plain.to_send_for(item, backward_round), "sent for")

    def same(self, ours: Iterable[Item], plain: Iterable[Item], what: str) -> list[Item]:
        found = list(ours)
        assert [item.index for item in found] == [item.index for item in plain]
        self.counts[f"{self.basis.name} {what}"] += len(found)
        return found


class Autograd:
    """Saves, uses and lets go of items as autograd does, in any order."""

    def __init__(self, stash: Stash, expected: Expected) -> None:
        self.stash = stash
        stash.streams.now()
        self.expected = expected
        self.trace = ForwardTrace(stash, (), expected, lambda: 0)
        self.count = 0
        self.handles: dict[int, tuple[Item, Callable[[], None]]] = {}  # a handle is anything that can end
        self.held: dict[int, torch.Tensor] = {}  # by the user
        self.round = 0

    def save(self, nbytes: int, name: str, held: bool) -> None:
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        item = Item(self.trace, self.count, tensor.untyped_storage(), 0, nbytes, tensor, [], None, name)
        if held:
            self.held[self.count] = tensor
        del tensor
        handle = lambda: None  # noqa: E731
        self.stash.note_handle(item, handle)
        self.handles[self.count] = item, handle
        self.count += 1
        self.trace.saved(item)

    def use(self, item: Item, last: bool) -> None:
        """`last`: of its handles in this backward."""
        if item.round != self.round:
            item.round = self.round
            self.trace.used(item, self.round, recorded=False)
        else:
            if item.memory is None:
                self.stash.send_for(item, needed=True)
            self.stash.arrive(item)
            self.trace.used_again(item)
        if last:
            self.stash.put_back(item)

    def end_of_backward(self) -> None:
        self.trace.end_backward()
        self.round += 1

    def let_go(self, index: int) -> None:
        self.handles.pop(index, None)
        self.held.pop(index, None)
        self.stash.settle()


def random_plan(rng: random.Random) -> ActivationPlan:
    count = rng.randrange(1, 16)
    sizes = [rng.choice(SIZES) for _ in range(count)]
    total_bytes = sum(sizes)
    copy_seconds = rng.choice([0.1, 1.0, 3.0])
    all_leave = rng.random() < 0.2
    return plan_activations(
        ActivationProblem(
            saved=tuple(
                Saved(
                    nbytes=nbytes,
                    offload_seconds=copy_seconds,
                    onload_seconds=copy_seconds,
                    alone_at=min(index + 1, count - 1),
                    name=f"layers.{index // 3}",
                )
                for index, nbytes in enumerate(sizes)
            ),
            forward_seconds=(1.0,) * count,
            uses=tuple(reversed(range(count))),
            backward_seconds=(2.0,) * count,
            freed_at=tuple(range(count)),
            budget_bytes=None if all_leave else rng.choice([None, 0, 0, total_bytes // 3, total_bytes]),
            offload_bytes=rng.choice([None, None, total_bytes // 3, total_bytes]),
            most_in_flight=rng.choice([None, None, 0, 1, 2]),
            all_leave=all_leave,
        )
    )


def forward_and_backward(autograd: Autograd, rng: random.Random) -> None:
    """In which the user holds some, some are used again or in another backward, and some let go of at any time."""
    plan = autograd.expected.plan
    as_planned = 0 if plan is None else rng.randrange(len(plan.problem.saved))
    often_held = rng.choice([0.0, 0.3])
    for index in range(rng.randrange(1, 30)):
        planned = plan is not None and index < as_planned
        nbytes = plan.problem.saved[index].nbytes if plan is not None and planned else rng.choice(SIZES)
        autograd.save(nbytes, f"layers.{index // rng.choice([2, 3])}", rng.random() < often_held)
        if rng.random() < 0.1:
            autograd.held.pop(rng.randrange(index + 1), None)
        if rng.random() < 0.1:
            autograd.let_go(rng.randrange(index + 1))
        if rng.random() < 0.05 and autograd.handles:
            autograd.use(rng.choice([*autograd.handles.values()])[0], last=rng.random() < 0.5)
    if rng.random() < 0.8:
        autograd.trace.end_forward()
    for _ in range(rng.choice([1, 1, 2])):
        for index in reversed(range(autograd.count)) if rng.random() < 0.7 else rng.sample(range(autograd.count), 1):
            if index in autograd.handles:
                for _ in range(rng.choice([1, 1, 1, 2])):
                    autograd.use(autograd.handles[index][0], last=rng.random() < 0.7)
            if rng.random() < 0.3:
                autograd.let_go(index)
        autograd.end_of_backward()
    for index in range(autograd.count):
        autograd.let_go(index)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = open_lanes(torch.device("cpu"))
    yield lanes
    lanes.close()


@pytest.mark.parametrize("host_memory_bytes", [None, 3 * 4096])
def test_decisions(lanes: Lanes, host_memory_bytes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()

    def by_ceiling(plan: ActivationPlan, items: Items) -> Both:
        return Both(ByCeiling(plan, items), PlainByCeiling(plan, items), counts)

    monkeypatch.setattr(trace_file, "ByCeiling", by_ceiling)
    monkeypatch.setattr(trace_file, "Unplanned", lambda items: Both(Unplanned(items), PlainUnplanned(items), counts))
    config = ActivationConfig(host_memory_bytes=host_memory_bytes, stays_without_room=host_memory_bytes is not None)

    @given(st.integers(0, 2**32))
    @settings(max_examples=200)
    def play(seed: int) -> None:
        rng = random.Random(seed)
        stash = Stash(lanes, Ledger(), ActivationMeter(lanes, LaneUse()), config)
        plan = random_plan(rng)
        expected = rng.choice([Expected(plan, None, False), Expected(None, plan, False), Expected(None, None, False)])
        forward_and_backward(Autograd(stash, expected), rng)
        assert stash.pool.held_bytes == 0

    play()
    said = itertools.product(["SIMILAR", "NOTHING"], ["leaves", "let go", "sent for"])
    assert all(counts[f"{basis} {what}"] > 20 for basis, what in said), counts
    assert counts["SIMILAR stays"] > 20
