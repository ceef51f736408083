"""What is a plan made of? Of a trace, sizes, measured speeds and the budget, which are the planner's problem."""

import warnings
from collections.abc import Sequence

from headrace.planning import Phase, Plan, Problem, Visit, kept_free_for_rows, make_plan
from headrace.runtime.lanes import CollectiveLane
from headrace.weights.meter import Meter
from headrace.weights.movement.block import Block
from headrace.weights.movement.residency import Residency
from headrace.weights.movement.trace import Trace

WAITS = 0.05  # waits for the link, as a share of compute, above which loads are packed


class Planner:
    """Makes plans for one model."""

    def __init__(self, blocks: Sequence[Block], residency: Residency, meter: Meter, max_ahead: int | None) -> None:
        self._blocks = blocks
        self._residency = residency
        self._meter = meter
        self._max_ahead = max_ahead
        self._has_failed = False  # once it has, nobody is told again

    def make(self, trace: Trace, changed: frozenset[int], *, in_parts_bytes: int, rows_bytes: int) -> Plan | None:
        """Makes a plan for a trace in which the blocks `changed` change. None: that failed, and blocks come on demand.

        `in_parts_bytes`, `rows_bytes`: the bytes that experts which come one by one, and rows of tables, want.
        """
        try:
            plan = make_plan(self._problem(trace, changed, in_parts_bytes, rows_bytes))
            if trace.refined and plan.predicted.stall_seconds > WAITS * plan.predicted.compute_seconds:
                blocks = [block for block in self._blocks if not block.travels_in_parts]
                if self._residency.pack_loads(blocks, self._largest_bytes(trace), self._meter.link()):
                    # That took some of the budget.
                    plan = make_plan(self._problem(trace, changed, in_parts_bytes, rows_bytes))
            return plan
        except Exception as error:  # whatever it is: no pass depends on a plan
            if not self._has_failed:
                self._has_failed = True
                warnings.warn(
                    f"the planner failed for {len(trace.visits)} visits of {len(self._blocks)} blocks in"
                    f" {self._residency.streaming_budget_bytes:,} bytes, {type(error).__name__}: {error}. Such passes"
                    " load blocks on demand: results are the same, compute waits longer. Please report this",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return None

    def _largest_bytes(self, trace: Trace) -> int:
        """The most bytes of blocks that a visit needs."""
        return max(sum(self._blocks[index].nbytes for index in blocks) for blocks, _ in trace.visits)

    def _problem(self, trace: Trace, changed: frozenset[int], in_parts_bytes: int, rows_bytes: int) -> Problem:
        link, gather_link = self._meter.link(), None
        if self._residency.gathers is not None and any(phase is Phase.BACKWARD for _, phase in trace.visits):
            gather_link = self._meter.link(CollectiveLane.GATHER)
        budget_bytes = self._residency.streaming_budget_bytes
        largest = self._largest_bytes(trace)
        budget_bytes -= min(in_parts_bytes, budget_bytes - largest)
        if any(block.row_bytes for block in self._blocks):
            budget_bytes -= kept_free_for_rows(rows_bytes, budget_bytes, largest)
        return Problem(
            block_bytes=tuple(block.nbytes for block in self._blocks),
            load_seconds=tuple(self._residency.load_seconds(block, link, gather_link) for block in self._blocks),
            visits=tuple(
                Visit(blocks=blocks, phase=phase, compute_seconds=seconds, other_load_seconds=link.seconds(nbytes))
                for (blocks, phase), seconds, nbytes in zip(
                    trace.visits, trace.compute_seconds, trace.other_bytes or (0,) * len(trace.visits), strict=True
                )
            ),
            budget_bytes=budget_bytes,
            changing=changed,
            cyclic=trace.repeats,
            max_ahead=self._max_ahead,
            by_rows=frozenset(block.index for block in self._blocks if block.travels_in_parts or block.expert_key),
        )
