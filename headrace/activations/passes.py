"""Where do one forward and one backward begin and end, for activations? Autograd's own marks tell.

A forward opens a trace and pushes saved-tensor hooks, which need not stay on top all the time. A backward begins with
the first use of an item. It ends when autograd's engine calls back, or drops the callback without calling it.
"""

import contextlib
import functools
import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.activations.choices import Choices
from headrace.activations.item import Item
from headrace.activations.meter import ActivationMeter
from headrace.activations.plan_cache import PlanCache
from headrace.activations.saving import Forward
from headrace.activations.selection import Selection
from headrace.activations.spilling import DiskStash
from headrace.activations.stash import PURPOSE, Stash
from headrace.activations.trace import Entry, ForwardTrace
from headrace.config import ActivationConfig
from headrace.errors import StateError
from headrace.memory.disk import DiskStore
from headrace.memory.ledger import Ledger
from headrace.runtime.autograd import NO_TASK, EndOfBackward, backward_task
from headrace.runtime.device import is_capturing
from headrace.runtime.lanes import Lanes, Tick
from headrace.runtime.link import LaneUse

_REMEMBERED_FORWARDS = 256  # those before do not tell how many wait together: they may have been unusual


class Passes:
    """All forwards and backwards of one model, or of a part of one. `store`: where activations rest; None: the host."""

    def __init__(
        self,
        config: ActivationConfig,
        lanes: Lanes,
        ledger: Ledger,
        store: DiskStore | None = None,
        shared: LaneUse | None = None,
    ) -> None:
        self.meter = ActivationMeter(lanes, shared or LaneUse())
        self.stash: Stash
        if store is None:
            self.stash = Stash(lanes, ledger, self.meter, config)
        else:
            self.stash = DiskStash(lanes, ledger, self.meter, config, store)
        self.plans = PlanCache(config, lanes, self.meter)
        self.choices = Choices(config, lanes, ledger, PURPOSE)
        self._lanes = lanes
        self._has_ceiling = config.device_memory_bytes is not None
        self._waiting: weakref.WeakSet[ForwardTrace] = weakref.WeakSet()  # the forwards that no backward has used
        # How many forwards were waiting for their backwards together when each of the last ones began, itself included.
        self._together: deque[int] = deque(maxlen=_REMEMBERED_FORWARDS)
        self._rounds = itertools.count()
        # The backwards under way, by the number of their graph task, which keeps them alive.
        self._backwards: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()
        self._whole: _Backward | None = None  # the backward under way that consists of several

    def begin(self, entry: Entry, selection: Selection) -> Forward:
        """Begins a forward. Raises StateError while a CUDA graph is captured: a plan cannot be part of a graph."""
        if is_capturing(self._lanes.device):
            raise StateError(
                "activations cannot be offloaded while a CUDA graph is captured, because copies would be replayed into"
                " memory of another step; capture layers whose activations stay, or run without graphs"
            )
        return self.stash.guard(self._begin, entry, selection)

    def _begin(self, entry: Entry, selection: Selection) -> Forward:
        self.stash.begin()
        selection.begin()
        if self._has_ceiling:  # those that wait together share it, as the stages of a pipeline have several
            self._together.append(1 + sum(trace.is_held for trace in self._waiting))
        entry = (max(self._together, default=1), self.choices.number, *entry)
        trace = ForwardTrace(self.stash, entry, self.plans.expect(entry), selection.gradient_bytes)
        self._waiting.add(trace)
        return Forward(trace, self.stash, selection, self._use, self.plans, self.choices)

    # backward ---------------------------------------------------------------------------------------------------------
    def _use(self, item: Item) -> None:
        """Brings to the device an item that backward needs."""
        backward = self._backward()
        if backward is None:  # somebody looks at a node's saved tensors, outside of a backward
            backward_round = next(self._rounds)
        else:
            backward_round = backward.round
            backward.traces[item.trace] = None
        if item.round != backward_round:
            item.round, item.seen = backward_round, set()
            if backward is not None and not item.trace.calls:
                item.trace.end_forward()
            item.trace.used(item, backward_round, recorded=backward is not None)
        else:
            if item.memory is None:  # backward goes through a part of the graph twice
                self.stash.send_for(item, needed=True)
            self.stash.arrive(item)
            item.trace.used_again(item)

    def recomputed(self, name: str) -> None:
        """Called when the call of a module of this name ends within a backward: what it recomputed is on the device."""
        backward = self._whole or self._backwards.get(backward_task())
        if backward is not None:
            with self.stash.lock:
                for trace in backward.traces:
                    trace.recomputed(name)

    @contextlib.contextmanager
    def one_backward(self) -> Iterator[None]:
        """Surrounds a part of a backward: backwards nested in it count as parts of that backward."""
        self._whole = self._backward()
        try:
            yield
        finally:
            self._whole = None

    def _backward(self) -> "_Backward | None":
        """The backward that runs this code, if one does. Several may take turns on one device, and be nested."""
        task = backward_task()
        if self._whole is not None or task == NO_TASK:
            return self._whole
        backward = self._backwards.get(task)
        if backward is None:
            backward = _Backward(task, next(self._rounds), self._lanes.tick())
            EndOfBackward(functools.partial(self._ended, backward)).queue()
            self._backwards[task] = backward
        return backward

    def _ended(self, backward: "_Backward", *, completed: bool) -> None:
        """Called when backward has returned; or, on any thread at any moment, when autograd has let go of it."""
        if completed:
            self.stash.guard(self._end_backward, backward, completed)
        elif not backward.is_over:  # it raised
            self.stash.between_moves(functools.partial(self._end_backward, backward, completed))

    def _end_backward(self, backward: "_Backward", completed: bool) -> None:
        """Ends a backward. May be called again if Ctrl-C cut it short."""
        if completed:
            self.stash.settle()
        self._backwards.pop(backward.task, None)
        self.meter.backward_ended(backward.begun)
        for trace in backward.traces:
            self._waiting.discard(trace)
            trace.end_backward()
            if completed and trace.is_over and not trace.learned:
                self._learn(trace)
        backward.is_over = True

    def _learn(self, trace: ForwardTrace) -> None:
        if any(trace in other.traces for other in self._backwards.values()):  # a backward within another one
            return
        if trace.timed and not trace.is_part:
            trace.learned = True
            self.plans.learn(trace, self._lanes.tick())
            if self.plans.last_plan is not None:
                self.choices.learn(trace.measured, self.plans.last_plan)
        elif trace.used_unplanned and not trace.timed and not trace.strayed:
            self.plans.forget(trace.entry)


@dataclass(eq=False)
class _Backward:
    """One backward: one graph task of autograd's engine."""

    task: int
    round: int
    begun: Tick
    traces: dict[ForwardTrace, None] = field(default_factory=dict)  # the traces whose items it has used
    is_over: bool = False
