"""How does a plan read?"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.planning.plan import Plan
from headrace.planning.problem import Problem


def plan_text(plan: Plan) -> str:
    """The plan as text: the times, what stays, and one row for each step that loads or drops something."""
    return "\n".join([*_summary(plan), "", *_table(plan)]) + "\n"


def _summary(plan: Plan) -> list[str]:
    problem, predicted = plan.problem, plan.predicted
    total = sum(problem.block_bytes)
    kept = plan.kept
    bound = predicted.lower_bound_seconds
    ratio = f" ({predicted.cycle_seconds / bound:.3f} of it)" if bound else ""
    turns = "" if len(plan.cycles) == 1 else f", repeating after {len(plan.cycles)} cycles"
    return [
        f"blocks    {len(problem.block_bytes)} of {size_text(total)} in all; budget {size_text(problem.budget_bytes)}; "
        f"{len(problem.visits)} visits per cycle{turns}",
        *([f"by rows   {indices_text(problem.by_rows)}"] if problem.by_rows else []),
        f"stays     {len(kept)} blocks, {size_text(sum(problem.block_bytes[b] for b in kept))}: {indices_text(kept)}",
        f"onloads   {predicted.onloads:g} per cycle, {size_text(predicted.onload_bytes)}; "
        f"prefetch up to {ahead(plan)} visits ahead",
        f"peak      {size_text(predicted.peak_bytes)}",
        f"cycle     {seconds_text(predicted.cycle_seconds)} = {seconds_text(predicted.compute_seconds)} compute + "
        f"{seconds_text(predicted.stall_seconds)} stall; no schedule is below {seconds_text(bound)}{ratio}",
    ]


def _table(plan: Plan) -> list[str]:
    rows = [("cycle", "visit", "phase", "uses", "compute", "evicts", "loads")]
    for cycle, steps in enumerate(plan.cycles):
        for index, step in enumerate(steps):
            if index < len(plan.problem.visits):
                visit = plan.problem.visits[index]
                named = (visit.phase.value, _list(visit.blocks), seconds_text(visit.compute_seconds))
            else:
                named = ("boundary", "", "")
            rows.append((str(cycle), str(index), *named, _list(step.evictions), _list(step.loads)))
    return columns(rows)


def ahead(plan: Plan) -> int:
    """The most visits that lie between a load's issue and its use."""
    visits = plan.problem.visits
    period = len(visits)
    farthest = 0
    for steps in plan.cycles:
        for index, step in enumerate(steps):
            farthest = max(farthest, *(_until_use(plan.problem, index, block) for block in step.loads), 0)
    return min(farthest, period)


def _until_use(problem: Problem, index: int, block: int) -> int:
    period = len(problem.visits)
    for distance in range(period + 1):
        if block in problem.visits[(index + distance) % period].blocks:
            return distance
    return 0


def size_text(count: int) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or above."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def decimal_text(nbytes: float, digits: int = 3) -> str:
    """Bytes in decimal units, in which memory and drives are sold."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.{digits}g} {name}"
    return f"{nbytes:.0f} B"


def columns(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Rows as lines, cells below each other; with `right` all but the first are set to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if right and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def seconds_text(seconds: float) -> str:
    """Seconds in s, ms or us."""
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds} s"


def indices_text(blocks: frozenset[int]) -> str:
    """Sorted indices with runs folded: 0-3, 7, 9-10."""
    runs: list[list[int]] = []
    for block in sorted(blocks):
        if runs and runs[-1][1] == block - 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "none"


def _list(blocks: tuple[int, ...]) -> str:
    return " ".join(map(str, blocks))
