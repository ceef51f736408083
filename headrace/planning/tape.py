"""Which choices does a run offer: which block may be kept between which two uses?

A tape is one or more cycles laid out as slots. Each cycle is its boundary (slot `c * (visits + 1)`, no blocks, no
compute) followed by its visits. A tape is a ring, in which slot 0 follows the last slot, or a single pass, which begins
with an empty device and then ends. A gap lies between two consecutive uses of a block, at slots `begin` < `end`. Either
the block is *kept* through the gap, or it is evicted at slot `begin + 1` and loaded again for `end`, ahead of it or
late. Only this choice has to be made for each gap: see `schedule.py` for why everything else follows.
"""

from dataclasses import dataclass

from headrace.planning.problem import Problem


@dataclass(frozen=True, slots=True)
class Gap:
    """The slots between two uses of one block: begin + 1 to end - 1. Negative slots lie in the round before."""

    block: int
    begin: int
    end: int
    size: int  # bytes that the block takes while kept or loaded early (0 for a resident that is reloaded in place)
    seconds: float  # of its load on the onload lane, when not kept
    earliest: int  # the first slot that may issue the load
    keepable: bool
    free: bool  # no slot lies between the two uses, so keeping costs nothing


@dataclass(frozen=True, slots=True)
class Tape:
    """Slots and gaps of `cycles` cycles. `base[s]`: bytes in use at slot s; `budget`: what non-residents may hold."""

    problem: Problem
    cycles: int
    ring: bool
    compute: tuple[float, ...]
    other: tuple[float, ...]  # seconds for which each slot's other copies take the onload lane
    base: tuple[int, ...]
    gaps: tuple[Gap, ...]  # in the order of their ends: the order in which the lane serves them
    budget: int
    carries: bool  # a load may be issued in the round before its use

    @property
    def slots(self) -> int:
        return len(self.base)


def make_tape(problem: Problem, *, cycles: int = 1, ring: bool = True) -> Tape:
    """Lay out `cycles` cycles as a ring (the steady state), or one as a single pass."""
    period = len(problem.visits) + 1
    compute, other, base = [], [], []
    uses: dict[int, list[int]] = {}
    for cycle in range(cycles):
        compute.append(0.0)
        other.append(0.0)
        base.append(0)
        for index, visit in enumerate(problem.visits):
            managed = [block for block in visit.blocks if block not in problem.residents]
            compute.append(visit.compute_seconds)
            other.append(visit.other_load_seconds)
            base.append(sum(problem.block_bytes[block] for block in managed))
            for block in visit.blocks:
                if block not in problem.residents or block in problem.changing:
                    uses.setdefault(block, []).append(cycle * period + 1 + index)
    gaps: list[tuple[int, int, Gap]] = []
    for block in sorted(uses):
        gaps.extend(_gaps_of(problem, block, uses[block], period, cycles if ring else 0))
    gaps.sort(key=lambda item: item[:2])
    ordered = tuple(gap for _, _, gap in gaps)
    return Tape(
        problem=problem,
        cycles=cycles,
        ring=ring,
        compute=tuple(compute),
        other=tuple(other),
        base=tuple(base),
        gaps=ordered,
        budget=problem.budget_bytes - problem.resident_bytes,
        carries=any(gap.earliest < 0 for gap in ordered),
    )


def _gaps_of(
    problem: Problem, block: int, uses: list[int], period: int, ring_cycles: int
) -> list[tuple[int, int, Gap]]:
    """The gaps of one block, each with its sort key (end, place within the visit)."""
    resident = block in problem.residents
    found = []
    for place, end in enumerate(uses):
        if place:
            begin, fresh = uses[place - 1], True
        elif ring_cycles:
            begin, fresh = uses[-1] - ring_cycles * period, True
        else:
            begin, fresh = 0, resident
        expires = block in problem.changing and begin // period != end // period and (place > 0 or ring_cycles > 0)
        earliest = begin + 1
        if expires:
            earliest = end // period * period  # the boundary in front of the cycle of `end`
        if problem.max_ahead is not None:
            earliest = max(earliest, _slot_before(end, problem.max_ahead, period))
        gap = Gap(
            block=block,
            begin=begin,
            end=end,
            size=0 if resident else problem.block_bytes[block],
            seconds=problem.load_seconds[block],
            earliest=min(earliest, end),
            keepable=fresh and not expires,
            free=fresh and not expires and (resident or end == begin + 1),
        )
        found.append((end, problem.visits[end % period - 1].blocks.index(block), gap))
    return found


def _slot_before(slot: int, visits: int, period: int) -> int:
    """The slot of the visit that lies `visits` visits before the one at `slot`."""
    cycle, index = divmod(slot, period)
    back, index = divmod(index - 1 - visits, period - 1)
    return (cycle + back) * period + 1 + index
