"""What will the next forward save, and what is planned for it? The model's inputs and modes tell."""

import itertools
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from headrace.activations.meter import ActivationMeter
from headrace.activations.trace import Entry, Expected, ForwardTrace, Others, UseRecord
from headrace.config import ActivationConfig
from headrace.planning import ActivationPlan, ActivationProblem, Saved, plan_activations
from headrace.runtime.autograd import in_backward
from headrace.runtime.lanes import Lanes, Tick
from headrace.runtime.link import LinkSpeed
from headrace.runtime.tensors import tensors_in

_MOST_ENTRIES = 64  # how many entries are remembered, and how many kinds of them; the least recently used goes first


def entry_of(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Entry:
    """What determines how much a forward saves: the shapes and dtypes of its inputs, the modes of the model and of
    autocast, and whether it runs within a backward, whose values are on the device too."""
    shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in((args, kwargs)))
    return (training, torch.is_autocast_enabled(), in_backward(), *shapes)


def _kind_of(entry: Entry) -> Entry:
    """The entry without its sizes: it is the same for inputs of any size."""
    return tuple((len(part[0]), part[1]) if isinstance(part, tuple) else part for part in entry)


@dataclass
class _Known:
    """What is known of one entry: its plan, or how many more forwards go without one (`left`, `patience` at first)."""

    plan: ActivationPlan | None = None
    is_refined: bool = False
    left: int = 1
    patience: int = 1


class PlanCache:
    """Plans by entry. A plan is made from a recorded forward, and refined once: from the first forward that follows it.

    A new entry keeps to the ceiling of a similar one and gets a plan only when it comes again, because the host waits
    while a plan is made. An entry whose forwards stray from their plan gets another one after two, four, ... forwards.
    """

    def __init__(self, config: ActivationConfig, lanes: Lanes, meter: ActivationMeter) -> None:
        self._config = config
        self._lanes = lanes
        self._meter = meter
        self._known: OrderedDict[Entry, _Known] = OrderedDict()
        # For each kind, the entry that saves the most, and its plan.
        self._similar: OrderedDict[Entry, tuple[Entry, ActivationPlan]] = OrderedDict()
        self.last_plan: ActivationPlan | None = None
        self._planner_failed = False  # and the user has been told, once

    def expect(self, entry: Entry) -> Expected:
        """What is known of a forward of this entry that begins now."""
        known = self._know(entry)
        kind = _kind_of(entry)
        similar = None
        if kind in self._similar:
            self._similar.move_to_end(kind)
            similar = self._similar[kind][1]
        self.last_plan = known.plan or similar or self.last_plan
        if known.plan is not None:
            return Expected(known.plan, None, timed=not known.is_refined)
        if similar is None:
            return Expected(None, None, timed=True)
        known.left -= 1
        return Expected(None, similar, timed=known.left < 0)

    def _know(self, entry: Entry) -> _Known:
        """What is known of the entry, which becomes the most recently used one."""
        known = self._known.setdefault(entry, _Known())
        self._known.move_to_end(entry)
        if len(self._known) > _MOST_ENTRIES:
            self._known.popitem(last=False)
        return known

    def strayed(self, entry: Entry) -> None:
        """Called when a forward of this entry did not go as planned: its plan is dropped."""
        known = self._known.get(entry)
        if known is not None and known.plan is not None:
            known.patience *= 2
            known.plan, known.left = None, known.patience

    def forget(self, entry: Entry) -> None:
        """Forgets the entry, because a backward used items that the plan's backward does not use."""
        self._known.pop(entry, None)
        kind = _kind_of(entry)
        if kind in self._similar and self._similar[kind][0] == entry:
            del self._similar[kind]

    def learn(self, trace: ForwardTrace, end: Tick) -> None:
        """Makes a plan from a trace that was timed from its first save to the end of its first backward."""
        entry = trace.entry
        try:
            plan = plan_activations(self._problem(trace, end))
        except Exception as error:  # whatever it is: no step depends on a plan
            self._tell(error, trace)
            return
        known = self._know(entry)
        known.plan, known.is_refined = plan, trace.plan is not None
        kind = _kind_of(entry)
        largest, similar = self._similar.get(kind, (entry, plan))
        if largest == entry or similar.problem.nbytes <= plan.problem.nbytes:
            self._similar[kind] = entry, plan
            self._similar.move_to_end(kind)
            if len(self._similar) > _MOST_ENTRIES:
                self._similar.popitem(last=False)
        self.last_plan = plan

    def _tell(self, error: Exception, trace: ForwardTrace) -> None:
        """Warns, once, that the planner failed."""
        if not self._planner_failed:
            self._planner_failed = True
            warnings.warn(
                f"the planner of activations failed for a forward that saved {len(trace.saves)} tensors,"
                f" {type(error).__name__}: {error}. Such forwards have no plan: results are the same, compute may wait"
                " longer. Please report this",
                RuntimeWarning,
                stacklevel=2,
            )

    def _problem(self, trace: ForwardTrace, end: Tick) -> ActivationProblem:
        offload, onload = self._meter.speeds()
        config, saves, uses = self._config, trace.saves, trace.uses
        after_saves = [save.asked for save in saves[1:]] + [uses[0].asked if uses else end]
        after_uses = [use.asked for use in uses[1:]] + [end]
        nbytes = sum(save.nbytes for save in saves)
        others = [*(save.others for save in saves), *(use.others for use in uses)]
        room = config.host_memory_bytes if config.stays_without_room and config.tier == "host" else None
        least = min(each.passing_bytes for each in others)  # weights, and what else is there all the time
        return ActivationProblem(
            saved=tuple(
                Saved(
                    nbytes=save.nbytes,
                    offload_seconds=max(
                        offload.load_seconds(save.nbytes), save.nbytes * self._meter.spill_seconds_per_byte
                    ),
                    onload_seconds=max(
                        onload.load_seconds(save.nbytes), save.nbytes * self._meter.fetch_seconds_per_byte
                    ),
                    alone_at=save.alone_at,
                    name=save.name,
                    shape=save.shape,
                )
                for save in saves
            ),
            forward_seconds=self._seconds([save.began for save in saves], after_saves),
            uses=tuple(use.index for use in uses),
            backward_seconds=self._seconds([use.began for use in uses], after_uses),
            freed_at=tuple(use.freed_at for use in uses),
            budget_bytes=None if config.device_memory_bytes is None else config.device_memory_bytes // trace.entry[0],
            offload_bytes=min(int(nbytes * config.fraction), nbytes if room is None else room),
            most_in_flight=config.most_in_flight,
            all_leave=config.all_leave,
            other_seconds=self._weights_seconds(trace, onload),
            forward_other_bytes=_forward_bytes(others[: len(saves) + 1], least)[: len(saves)],
            backward_other_bytes=_backward_bytes(uses, least),
            recomputed=tuple(trace.recomputed_names),
        )

    @staticmethod
    def _weights_seconds(trace: ForwardTrace, onload: LinkSpeed) -> tuple[float, ...]:
        """For each use, how long the onload lane was busy with weights since the use before it."""
        counts = [trace.saves[-1].weights_bytes, *(use.weights_bytes for use in trace.uses)]
        return tuple(onload.seconds(after - before) for before, after in itertools.pairwise(counts))

    def _seconds(self, begins: list[Tick], ends: list[Tick]) -> tuple[float, ...]:
        return tuple(max(0.0, self._lanes.seconds(begin, end)) for begin, end in zip(begins, ends, strict=True))


def _forward_bytes(others: list[Others], least: int) -> tuple[int, ...]:
    """The other bytes on the device from each save to the next, as seen at both of them."""
    pairs = itertools.pairwise([*others, others[-1]])
    return tuple(each.gradient_bytes + max(each.passing_bytes, after.passing_bytes) - least for each, after in pairs)


def _backward_bytes(uses: list[UseRecord], least: int) -> tuple[int, ...]:
    """The other bytes on the device from each use to the next: incoming and outgoing gradients, and the weights' own.

    Where layers are recomputed, the recomputed values and incoming gradients coexist with the first outgoing gradient.
    """
    ends = [*(use.others for use in uses[1:]), Others(uses[-1].others.gradient_bytes, least)] if uses else []
    return tuple(
        after.gradient_bytes + (use.recomputed.passing_bytes - least) + (after.passing_bytes - least)
        for use, after in zip(uses, ends, strict=True)
    )
