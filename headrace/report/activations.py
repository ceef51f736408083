"""What did activations move and hold, in numbers?"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import format_bytes
from headrace.planning import ActivationPlan, Fate
from headrace.planning.text import seconds_text
from headrace.report.rows import Row, rows_text

_SHOWN_KINDS = 8  # of modules, in each list: a report is short however odd their names


@dataclass(frozen=True, kw_only=True)
class ActivationStats:
    """What was measured since activations were offloaded or since `reset_stats()`, in bytes and seconds.

    `host_held_bytes` wait on the host now. `host_bytes` is the memory allocated for them, `host_peak_bytes` its peak,
    and `host_locked_bytes` its page-locked part. `device_peak_bytes` is the most that was on its way out or back at
    once. `offload_bytes` left in `offloads` copies, and `onload_bytes` came back in `onloads` copies. Of the uses in
    backward, `hits` found their tensor on the device or on its way there; `demand_onloads` did not. `spill_bytes` went
    to disk, and `fetch_bytes` came from there. `stall_seconds` is how long compute waited for copies. `skipped` counts
    tensors that cannot be offloaded (subclasses, sparse, quantised, parts of memory that others may write to).
    `pool_growths` is how often host memory was allocated. `planned_forwards` followed a plan, `recorded_forwards` were
    the first of their kind, and `similar_forwards` had sizes without a plan and kept to the ceiling of another one.
    """

    host_held_bytes: int
    host_bytes: int
    host_peak_bytes: int
    host_locked_bytes: int
    device_peak_bytes: int
    offload_bytes: int
    onload_bytes: int
    offloads: int
    onloads: int
    hits: int
    demand_onloads: int
    spill_bytes: int
    fetch_bytes: int
    stall_seconds: float
    skipped: int
    pool_growths: int
    planned_forwards: int
    similar_forwards: int
    recorded_forwards: int

    def rows(self) -> list[Row]:
        """Each number, with its name."""
        size = format_bytes
        by_limit = f"{self.similar_forwards} by the limit of another plan"
        on_disk = f"{size(self.spill_bytes)} written, {size(self.fetch_bytes)} read"
        return [
            ("activations on the host, peak", size(self.host_peak_bytes)),
            ("activations in flight, peak", size(self.device_peak_bytes)),
            ("activations offloaded", f"{size(self.offload_bytes)} in {_copies(self.offloads)}"),
            ("activations onloaded", f"{size(self.onload_bytes)} in {_copies(self.onloads)}"),
            *([("activations on disk", on_disk)] if self.spill_bytes or self.fetch_bytes else []),
            ("uses in backward", f"{self.hits} in time, {self.demand_onloads} on demand"),
            ("stall for activations", f"{self.stall_seconds:.3f} s"),
            ("forwards", f"{self.planned_forwards} as planned, {by_limit}, {self.recorded_forwards} recorded"),
        ]

    def to_text(self) -> str:
        """The numbers as a small table."""
        return rows_text(self.rows())

    @staticmethod
    def advice(beyond_bytes: int, names: Sequence[str]) -> str:
        """What to do about activations that do not fit and whose copies do not hide."""
        layers = ", ".join(name or "the model itself" for name in names[:_SHOWN_KINDS])
        layers += f" and {more} more" if (more := len(names[_SHOWN_KINDS:])) else ""
        return (
            f"{format_bytes(beyond_bytes)} of activations neither fit in device_memory nor hide behind compute:"
            f" recompute them (gradient checkpointing) in {layers}"
        )


def plan_rows(plan: ActivationPlan) -> list[Row]:
    """What the plan expects; and which kinds of tensors leave, stay or are recomputed, and why. Layers that differ in
    their numbers are one kind, and those with the most bytes are shown one by one."""
    problem = plan.problem
    leaving = [problem.saved[index] for index in plan.offloaded]
    out, back, forward, backward = map(
        seconds_text,
        (
            math.fsum(saved.offload_seconds for saved in leaving),
            math.fsum(saved.onload_seconds for saved in leaving),
            math.fsum(problem.forward_seconds),
            math.fsum(problem.backward_seconds),
        ),
    )
    share = f"{format_bytes(plan.host_bytes)} of {format_bytes(problem.nbytes)} leave"
    copies = f"copies take {out} of a forward of {forward}, and {back} of a backward of {backward}"
    rows = [("plan for activations", f"{share}; {copies}; compute waits {seconds_text(plan.stall_seconds)}")]
    kinds: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
    computed: Counter[str] = Counter()
    for index, (saved, seconds) in enumerate(zip(problem.saved, problem.forward_seconds, strict=True)):
        kinds[_kind(saved.name), saved.shape, _fate(plan, index)].append(saved.nbytes)
        computed[_kind(saved.name)] += seconds  # type: ignore[assignment]
    largest = sorted(kinds.items(), key=lambda group: -sum(group[1]))
    for (kind, shape, fate), sizes in largest[:_SHOWN_KINDS]:
        rows.append((f"saved in {kind}", f"{len(sizes):,} of {shape}, {format_bytes(sum(sizes))}: {fate}"))
    if others := largest[_SHOWN_KINDS:]:
        rows.append(("saved elsewhere", f"{len(others):,} more kinds, {format_bytes(sum(sum(g) for _, g in others))}"))
    again_kinds = list(dict.fromkeys(map(_kind, problem.recomputed)))
    for kind in again_kinds[:_SHOWN_KINDS]:
        again = f", in {seconds_text(computed[kind])}" if kind in computed else ""
        rows.append((f"the rest of {kind}", f"recomputed in backward{again}, by its checkpoints"))
    if more := len(again_kinds[_SHOWN_KINDS:]):
        rows.append(("the rest of others", f"{more:,} more kinds of modules are recomputed"))
    return rows


def choice_rows(fates: Sequence[Fate]) -> list[Row]:
    """What `checkpoint_contexts` chose for each kind of value that takes long to compute, and why."""
    rows = []
    for fate in sorted(fates, key=lambda fate: -fate.kind.seconds)[:_SHOWN_KINDS]:
        kind = fate.kind
        values = f"{kind.count:,} of {kind.shape}, {format_bytes(kind.nbytes)}"
        times = f"{seconds_text(kind.seconds)} to compute, {seconds_text(fate.copy_seconds)} to copy"
        rows.append((f"{kind.operation} in {_kind(kind.name)}", f"{values}, {times}: {_choice(fate)}"))
    if more := len(fates[_SHOWN_KINDS:]):
        rows.append(("computed elsewhere", f"{more:,} more kinds"))
    return rows


def _choice(fate: Fate) -> str:
    """What was chosen for a kind of value, and why."""
    if fate.kept == fate.kind.count:
        return "kept"
    again = f"{fate.kept:,} kept, the others recomputed" if fate.kept else "recomputed"
    return f"{again}, as {'something may write to them' if fate.kind.changes else 'neither device nor link has room'}"


def _kind(name: str) -> str:
    return re.sub(r"\d+", "*", name) or "the model itself"


def _fate(plan: ActivationPlan, index: int) -> str:
    """What becomes of a saved tensor, and why."""
    problem, saved = plan.problem, plan.problem.saved[index]
    if index in plan.offloaded:
        if problem.all_leave:
            return "leave, as all_leave says"
        return "leave, as " + ("copies hide" if problem.budget_bytes is None else "device_memory has no room for all")
    if index not in plan.position_of_use:
        return "stay, as backward has not used them"
    if saved.alone_at is None:
        return "stay, as something else holds them"
    if problem.offload_bytes is not None and plan.host_bytes + saved.nbytes > problem.offload_bytes:
        return "stay, as no more bytes may leave"
    return "stay, as " + ("compute would wait" if problem.budget_bytes is None else "device_memory has room")


def _copies(number: int) -> str:
    return f"{number:,} {'copy' if number == 1 else 'copies'}"
