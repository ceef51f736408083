"""Which activations leave the device between forward and backward, when do they go, and when do they come back?

The machine has compute, the offload lane and the onload lane, each serial. A copy out starts when its tensor is saved
and the lane is free; compute waits for its end before the device memory is released. Reloads are issued during
backward, in the order of use, as soon as they fit; compute waits for each at its use. The tensors saved first leave
first, because they are needed last. See docs/design/activations.md.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

_HIDDEN_SHARE = 0.005  # a stall below this share of compute counts as none
_BISECTIONS = 24


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One tensor that autograd keeps from forward to backward.

    - `offload_seconds`, `onload_seconds`: how long its copies take on their lanes, alone.
    - `alone_at`: the index of the save from which only autograd holds its memory. None: never in forward.
    - `name`, `shape`: the module that saved it, and its dtype and shape, for texts.
    """

    nbytes: int
    offload_seconds: float
    onload_seconds: float
    alone_at: int | None
    name: str = ""
    shape: str = ""


@dataclass(frozen=True, kw_only=True)
class ActivationProblem:
    """What one forward saves and its backward uses.

    - `saved[k]`: in the order of saving; `forward_seconds[k]`: compute from that save to the next, or to the first use.
    - `uses`: indices of `saved` in the order of their first use in backward, each at most once;
      `backward_seconds[j]`: compute from that use to the next, or to the end; `freed_at[j]`: the position of the use
      after which the tensor of the j-th use is freed.
    - `budget_bytes`: ceiling for these tensors on the device. None: as few stay as copies can hide behind compute.
    - `all_leave`: every tensor that may leave leaves, even if compute waits, and comes back as early as is useful.
    - `offload_bytes`: the most bytes that may leave; `most_in_flight`: the most copies out at once. None: no limit.
    - `other_seconds[j]`: how long other loads (weights), issued between the use before and the j-th, take the onload
      lane. Empty: there are none.
    - `forward_other_bytes[k]`, `backward_other_bytes[j]`: the most that other things (values on their way, gradients)
      take on the device from that save or use to the next. Only the peak of the whole uses them. Empty: nothing.
    - `recomputed`: the modules that are called again in backward, for texts.
    """

    saved: tuple[Saved, ...]
    forward_seconds: tuple[float, ...]
    uses: tuple[int, ...]
    backward_seconds: tuple[float, ...]
    freed_at: tuple[int, ...]
    budget_bytes: int | None = None
    offload_bytes: int | None = None
    most_in_flight: int | None = None
    other_seconds: tuple[float, ...] = ()
    forward_other_bytes: tuple[int, ...] = ()
    backward_other_bytes: tuple[int, ...] = ()
    all_leave: bool = False
    recomputed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.forward_seconds) != len(self.saved):
            raise ValueError(f"{len(self.saved)} tensors are saved, but {len(self.forward_seconds)} times are given")
        if not len(self.uses) == len(self.backward_seconds) == len(self.freed_at):
            raise ValueError(f"{len(self.uses)} uses need as many entries in backward_seconds and freed_at")
        if len(set(self.uses)) != len(self.uses) or not all(0 <= index < len(self.saved) for index in self.uses):
            raise ValueError(f"uses are {list(self.uses)}; give each of 0 to {len(self.saved) - 1} at most once")
        if len(self.other_seconds) not in (0, len(self.uses)):
            raise ValueError(
                f"other_seconds has {len(self.other_seconds)} entries; give one for each of the uses, or none"
            )
        others = len(self.forward_other_bytes), len(self.backward_other_bytes)
        if others not in ((0, 0), (len(self.saved), len(self.uses))):
            raise ValueError(f"other bytes are given for {others} saves and uses; give one for each, or none")

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all saved tensors."""
        return sum(saved.nbytes for saved in self.saved)

    @property
    def compute_seconds(self) -> float:
        """Forward and backward without any stall."""
        return math.fsum(self.forward_seconds) + math.fsum(self.backward_seconds)


@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """Frozen decisions for one forward and its backward.

    `releases[k]`: tensors whose device memory is released right after the k-th save. `reloads[j]`: tensors whose
    reloads are issued at the j-th use, in this order, behind the one that the use itself needs. `offloaded`: all
    tensors that leave; the others are not copied. `peak_bytes`: the most that saved tensors take on the device at once;
    `saving_bytes`: how much lower the device's peak, with all else that it holds, is than if all tensors stayed.
    `beyond_bytes`: bytes that neither fit `budget_bytes` nor hide behind compute; `recompute` names the modules whose
    recomputation (gradient checkpointing) would save at least that.
    """

    problem: ActivationProblem
    releases: tuple[tuple[int, ...], ...]
    reloads: tuple[tuple[int, ...], ...]
    offloaded: frozenset[int]
    host_bytes: int
    peak_bytes: int
    saving_bytes: int
    seconds: float
    stall_seconds: float
    beyond_bytes: int
    recompute: tuple[str, ...]

    @cached_property
    def position_of_use(self) -> dict[int, int]:
        """For each index of `saved`, the position of its first use."""
        return {index: position for position, index in enumerate(self.problem.uses)}


def plan_activations(problem: ActivationProblem) -> ActivationPlan:
    """The plan: under a budget, what fits stays and the rest leaves; without one, as much leaves as compute hides."""
    if problem.all_leave:  # of the walks that are no slower, the one with the lowest peak in backward
        fastest = _Walk(problem, 0, problem.nbytes)
        return _plan(problem, _lowest(problem, lambda ceiling: _Walk(problem, 0, ceiling), fastest.seconds))
    hidden = _lowest(problem, lambda ceiling: _Walk(problem, ceiling, waits=False), problem.compute_seconds)
    budget_bytes = problem.budget_bytes
    if budget_bytes is None:
        return _plan(problem, hidden)
    # The walk that exceeds the budget less, or the faster one. With too many copies under way, tensors stay or wait.
    walks = [_Walk(problem, budget_bytes, waits=waits) for waits in (False, True)]
    walk = min(walks, key=lambda walk: (max(0, walk.peak_bytes - budget_bytes), walk.seconds))
    stalls = walk.seconds - problem.compute_seconds > _HIDDEN_SHARE * problem.compute_seconds
    peak_bytes = max(walk.peak_bytes, hidden.peak_bytes) if stalls else walk.peak_bytes
    return _plan(problem, walk, beyond_bytes=max(0, peak_bytes - budget_bytes))


def _lowest(problem: ActivationProblem, walk_under: Callable[[int], _Walk], seconds: float) -> _Walk:
    """The walk under the lowest ceiling that keeps it within `seconds`, as the highest ceiling always does."""
    low, high = 0, problem.nbytes
    best = walk_under(high)
    for _ in range(_BISECTIONS):
        if high - low <= max(1, problem.nbytes >> 12):
            break
        middle = (low + high) // 2
        walk = walk_under(middle)
        if walk.seconds - seconds > _HIDDEN_SHARE * problem.compute_seconds:
            low = middle
        else:
            high = middle
            best = walk if walk.peak_bytes <= best.peak_bytes else best
    return best


def _plan(problem: ActivationProblem, walk: _Walk, beyond_bytes: int = 0) -> ActivationPlan:
    return ActivationPlan(
        problem=problem,
        releases=tuple(map(tuple, walk.releases)),
        reloads=tuple(map(tuple, walk.reloads)),
        offloaded=frozenset(walk.away),
        host_bytes=sum(problem.saved[index].nbytes for index in walk.away),
        peak_bytes=walk.peak_bytes,
        saving_bytes=_Walk(problem, problem.nbytes).whole_peak_bytes - walk.whole_peak_bytes,
        seconds=walk.seconds,
        stall_seconds=max(0.0, walk.seconds - problem.compute_seconds),
        beyond_bytes=beyond_bytes,
        recompute=_largest_names(problem.saved, beyond_bytes),
    )


def _largest_names(saved: Sequence[Saved], wanted_bytes: int) -> tuple[str, ...]:
    """The modules that saved the most, as many as make up `wanted_bytes`."""
    by_name: Counter[str] = Counter()
    for each in saved:
        by_name[each.name] += each.nbytes
    names: list[str] = []
    for name, nbytes in by_name.most_common():
        if wanted_bytes <= 0:
            break
        names.append(name)
        wanted_bytes -= nbytes
    return tuple(names)


class _Walk:
    """One forward and backward under a ceiling for the bytes on the device, which is exceeded only if it must be.

    If `most_in_flight` copies are under way already, compute waits for the first of them, or, without `waits`, the
    tensor that was just saved stays.
    """

    def __init__(
        self,
        problem: ActivationProblem,
        budget_bytes: int,
        backward_budget_bytes: int | None = None,
        *,
        waits: bool = True,
    ) -> None:
        self._problem = problem
        self._waits = waits
        self._budget_bytes = budget_bytes
        self._backward_budget_bytes = budget_bytes if backward_budget_bytes is None else backward_budget_bytes
        self.seconds = 0.0
        self.peak_bytes = 0
        self.whole_peak_bytes = 0  # with all else that is on the device
        self.away: set[int] = set()
        self.releases: list[list[int]] = [[] for _ in problem.saved]
        self.reloads: list[list[int]] = [[] for _ in problem.uses]
        self._held_bytes = 0
        self._forward()
        self._backward()

    def _hold(self, nbytes: int) -> None:
        self._held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)

    def _between(self, other_bytes: int) -> None:
        self.whole_peak_bytes = max(self.whole_peak_bytes, self._held_bytes + other_bytes)

    def _forward(self) -> None:
        problem = self._problem
        others = problem.forward_other_bytes or (0,) * len(problem.saved)
        lane_end = 0.0
        ends: dict[int, float] = {}
        flying: deque[int] = deque()  # tensors that leave, until their copies are done
        ready: list[int] = []  # a heap of tensors that may go
        held_until: dict[int, list[int]] = defaultdict(list)  # tensors that others hold, by the last such save
        reloadable = set(problem.uses)
        left_bytes = problem.nbytes if problem.offload_bytes is None else problem.offload_bytes
        for index, saved in enumerate(problem.saved):
            self._hold(saved.nbytes)
            self._between(others[index])
            stays = saved.nbytes > left_bytes or (not self._waits and self._crowded(flying, ends, coming=1))
            if index in reloadable and saved.alone_at is not None and not stays:
                left_bytes -= saved.nbytes
                lane_end = max(lane_end, self.seconds) + saved.offload_seconds
                ends[index] = lane_end
                flying.append(index)
                held_until[max(index, saved.alone_at)].append(index)
            for candidate in held_until.pop(index, ()):
                heappush(ready, candidate)
            coming_bytes = problem.saved[index + 1].nbytes if index + 1 < len(problem.saved) else 0
            while ready and (self._held_bytes + coming_bytes > self._budget_bytes or self._crowded(flying, ends)):
                candidate = heappop(ready)
                self.seconds = max(self.seconds, ends[candidate])
                self._held_bytes -= problem.saved[candidate].nbytes
                self.away.add(candidate)
                self.releases[index].append(candidate)
            self._between(others[index])
            self.seconds += problem.forward_seconds[index]

    def _crowded(self, flying: deque[int], ends: dict[int, float], coming: int = 0) -> bool:
        """Whether too many copies are under way, with `coming` more. Copies end in the order of saving, each before its
        memory goes."""
        while flying and ends[flying[0]] <= self.seconds:
            flying.popleft()
        most = self._problem.most_in_flight
        return most is not None and len(flying) + coming > most

    def _backward(self) -> None:
        problem = self._problem
        others = problem.backward_other_bytes or (0,) * len(problem.uses)
        began = self.seconds
        lane_end = 0.0
        arrival: dict[int, float] = {}
        pending = deque(index for index in problem.uses if index in self.away)
        freed: dict[int, int] = {}  # bytes by the position of the use at which they are free
        for index, position in zip(problem.uses, problem.freed_at, strict=True):
            freed[position + 1] = freed.get(position + 1, 0) + problem.saved[index].nbytes

        def send_for(index: int) -> None:
            nonlocal lane_end
            self._hold(problem.saved[index].nbytes)
            lane_end = max(lane_end, self.seconds) + problem.saved[index].onload_seconds
            arrival[index] = lane_end

        for position, index in enumerate(problem.uses):
            self._held_bytes -= freed.get(position, 0)
            if problem.other_seconds and problem.other_seconds[position]:
                lane_end = max(lane_end, self.seconds) + problem.other_seconds[position]
            if pending and pending[0] == index:
                send_for(pending.popleft())
            self.seconds = max(self.seconds, arrival.get(index, 0.0))
            while pending and self._held_bytes + problem.saved[pending[0]].nbytes <= self._backward_budget_bytes:
                self.reloads[position].append(pending[0])
                send_for(pending.popleft())
            self._between(others[position])
            self.seconds += problem.backward_seconds[position]
        # Other loads on the lane have deadlines of their own: if all together outlast backward, the step is longer.
        busy = math.fsum(problem.other_seconds) + math.fsum(problem.saved[index].onload_seconds for index in arrival)
        self.seconds = max(self.seconds, began + busy if problem.other_seconds else 0.0)
