"""Which tasks does a step come to, on which lanes, and what waits for what?

What the executor does, visit by visit: compute, the loads that the plan issues there, gradients and activations that
leave, the update, and the disk's reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.planning.cost.hardware import Hardware
from headrace.planning.cost.lanes import CostLane, Task
from headrace.planning.cost.traffic import ACTIVATION_LAYERS, GRADIENT_BLOCKS, STAGED_BLOCKS, BlockTraffic
from headrace.planning.cost.work import Overlap
from headrace.planning.plan import Plan
from headrace.planning.visit import Phase, Visit

__all__ = ["StepGraph"]

_GRADIENT_PARTS = 4  # in which a block's gradients leave, at most: while the rest of its backward still computes
_GRADIENT_PART_BYTES = 4 * 2**20
_PLANNED_PARTS = 256  # of a whole step, about


class StepGraph:
    """The tasks of some steps, one behind the other."""

    def __init__(
        self, plan: Plan, traffic: Sequence[BlockTraffic], hardware: Hardware, overlap: Overlap, closing_seconds: float
    ) -> None:
        self.plan = plan
        self.traffic = traffic
        self.hardware = hardware
        self.overlap = overlap
        self.closing_seconds = closing_seconds
        self.tasks: list[Task] = []
        self.arrival: dict[int, int] = {}  # present block -> its load (-1: before all this)
        for block in plan.start | plan.problem.residents:
            self.arrival[block] = -1
        self.ready: dict[int, int] = {}  # block -> the task behind which its home is as it should be
        self.compute: list[int] = []  # compute tasks so far
        self.fetched: list[int] = []  # loads of fetched blocks, for the ring of staging buffers
        self.spilled: list[int] = []
        self.sent: list[int] = []  # for each layer of forward, the end of its activations' way out
        self.leaving: list[int] = []  # for each block of backward, the last offload of its gradients
        self.sums: list[int] = []  # for each block of backward, the sum of its gradients on the host
        self.last_gradient = -1
        self.gradients: dict[
            int, int
        ] = {}  # of this step: block -> the task behind which all of its gradients are here
        self.kept: dict[int, int] = {}  # block -> the offload of its activations
        self.back: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, visit in enumerate(plan.problem.visits):
            for block in visit.blocks:
                if visit.phase is Phase.BACKWARD:
                    last[block] = index
        self.last_backward = last

    def step(self, cycle: int) -> int:
        """Lays out one step; returns the index of its last task on the compute lane."""
        problem = self.plan.problem
        self.gradients, self.kept, self.back = {}, {}, {}
        for index, visit in enumerate(problem.visits):
            plan_step = self.plan.step(cycle, index)
            waits: list[int] = []
            for block in plan_step.evictions:
                gone = -1 if block in problem.residents else self.arrival.pop(block, -1)
                if gone >= 0:
                    waits.append(gone)
            for block in visit.blocks:
                if block not in self.arrival:
                    self._load(block)
            experts = [task for block in visit.blocks for task in self._experts(block)]
            for block in plan_step.loads:
                if block not in self.arrival:
                    self._load(block)
            if visit.phase is Phase.BACKWARD:
                self._bring_back(index)
            waits += [self.arrival[block] for block in visit.blocks if self.arrival[block] >= 0]
            waits += experts
            waits += [self.back[b] for b in visit.blocks if b in self.back and visit.phase is Phase.BACKWARD]
            if len(self.leaving) >= GRADIENT_BLOCKS and visit.phase is Phase.BACKWARD:
                waits.append(self.leaving[-GRADIENT_BLOCKS])
            if len(self.sent) >= ACTIVATION_LAYERS and visit.phase is Phase.FORWARD:
                waits.append(self.sent[-ACTIVATION_LAYERS])
            name = f"{visit.phase.value} {' '.join(map(str, visit.blocks))}"
            parts = self._parts(visit)
            for part in range(parts):
                done = self._add(CostLane.COMPUTE, name, visit.compute_seconds / parts, waits)
                waits = []
                for block in visit.blocks:
                    self._leave(index, block, visit.phase, done, part, parts)
            self.compute.append(done)
            if visit.phase is Phase.BACKWARD and any(self.traffic[block].gradient_bytes for block in visit.blocks):
                self.leaving.append(self.last_gradient)
        return self._boundary(cycle)

    def _parts(self, visit: Visit) -> int:
        """In how many parts the gradients of a visit leave."""
        nbytes = sum(self.traffic[block].gradient_bytes for block in visit.blocks)
        if visit.phase is not Phase.BACKWARD or not nbytes:
            return 1
        # In a long step a part more or less is nothing, and each costs time to plan.
        few = max(1, _PLANNED_PARTS // len(self.plan.problem.visits))
        return min(_GRADIENT_PARTS, few, -(-nbytes // _GRADIENT_PART_BYTES))

    def _bring_back(self, index: int) -> None:
        """Activations of this visit and of the next come back."""
        for visit in self.plan.problem.visits[index : index + 2]:
            for block in visit.blocks:
                nbytes = self.traffic[block].activation_bytes
                if visit.phase is Phase.BACKWARD and block in self.kept and block not in self.back:
                    waits = [self.kept[block], *self._now()]
                    if self.traffic[block].activations_spill:
                        waits.append(self._copy(CostLane.FETCH, "activations", block, nbytes, waits))
                    self.back[block] = self._copy(CostLane.ONLOAD, "activations", block, nbytes, waits)

    def _leave(self, index: int, block: int, phase: Phase, done: int, part: int, parts: int) -> None:
        """What leaves after a part of a visit: gradients in parts, the rest at the end."""
        own = self.traffic[block]
        last = phase is Phase.BACKWARD and self.last_backward[block] == index
        if phase is Phase.BACKWARD and own.gradient_bytes:
            nbytes = own.gradient_bytes * (part + 1) // parts - own.gradient_bytes * part // parts
            ready = [self._reduced(block, done, parts) if last or own.reduces_always else done]
            if own.sum_bytes and len(self.sums) >= GRADIENT_BLOCKS:
                ready.append(self.sums[-GRADIENT_BLOCKS])  # memory for each device's own, of two blocks
            self.last_gradient = self._copy(CostLane.OFFLOAD, "gradients", block, nbytes, ready)
        if part + 1 < parts:
            return
        if phase is Phase.FORWARD and own.activation_bytes:
            left = self._copy(CostLane.OFFLOAD, "activations", block, own.activation_bytes, [done])
            self.sent.append(left)
            if own.activations_spill:
                left = self._copy(CostLane.SPILL, "activations", block, own.activation_bytes, [left])
            self.kept[block] = left
            self.back.pop(block, None)  # what came back was of the micro-batch before
        arrived = self._summed(block) if phase is Phase.BACKWARD and own.gradient_bytes else -1
        if last and own.gradient_bytes:
            self.gradients[block] = self._norm(block, self._across_nodes(block, arrived))
        elif last and (own.update_bytes or own.reduce_seconds):
            self.gradients[block] = self._reduced(block, done)

    def _reduced(self, block: int, done: int, parts: int = 1) -> int:
        """A part of the block's gradients has been summed up across devices."""
        seconds = self.traffic[block].reduce_seconds / parts
        return self._among_devices("reduce", block, seconds, [done]) if seconds else done

    def _summed(self, block: int) -> int:
        """All devices' gradients of the block have come to the host, and this one's range of them is added up."""
        own = self.traffic[block]
        if not own.sum_bytes:
            return self.last_gradient
        seconds = own.sum_bytes / self.hardware.update_rate
        waits = [self.last_gradient]
        self.sums.append(
            self._add(CostLane.UPDATE, f"sum {block}", seconds, waits, dram_bytes=own.sum_bytes, block=block)
        )
        return self.sums[-1]

    def _across_nodes(self, block: int, arrived: int) -> int:
        """The range is summed up over all nodes."""
        own = self.traffic[block]
        if not own.network_seconds:
            return arrived
        return self._add(
            CostLane.NETWORK,
            f"sum over nodes {block}",
            own.network_seconds,
            [arrived],
            dram_bytes=own.network_dram_bytes,
            nbytes=own.network_bytes,
            block=block,
        )

    def _among_devices(self, what: str, block: int, seconds: float, after: list[int]) -> int:
        """Over links among devices, or both ways over each one's link to the host."""
        name = f"{what} {block}"
        if not self.traffic[block].over_link:
            return self._add(CostLane.COLLECTIVE, name, seconds, after, block=block)
        both = [self._add(lane, name, seconds, after, block=block) for lane in (CostLane.ONLOAD, CostLane.OFFLOAD)]
        return self._add(CostLane.COLLECTIVE, name, 0.0, both, block=block)

    def _gathered(self, block: int, after: list[int]) -> int:
        """The ranges of the other devices have come; -1: the whole block was loaded."""
        seconds = self.traffic[block].gather_seconds
        return self._among_devices("gather", block, seconds, after) if seconds else -1

    def _boundary(self, cycle: int) -> int:
        """The update, and the end of the step."""
        problem, gradients = self.plan.problem, self.gradients
        end = self.compute[-1]
        everything = list(gradients.values())
        if self.closing_seconds:
            end = self._add(CostLane.COMPUTE, "update on the device", self.closing_seconds, everything)
            self.compute.append(end)
        order = sorted(gradients) if self.overlap is not Overlap.BACKWARD else list(gradients)
        last = end
        for block in order:
            own_part = [gradients[block]] if self.overlap is Overlap.BACKWARD else everything
            # The host's part of an update does not wait for the device's; what has no part on the host does.
            after = own_part if self.traffic[block].update_bytes or not self.closing_seconds else [end]
            last = self._update(block, after)
            self.ready[block] = last
        if self.overlap is Overlap.NONE and order:
            # The host steps before it goes on: nothing of the next step is given to any lane until then.
            end = self._add(CostLane.COMPUTE, "wait for the update", 0.0, [last])
            self.compute.append(end)
            self.ready.update(dict.fromkeys(order, end))
        for block in sorted(problem.changing):
            self.arrival.pop(block, None)
        step = self.plan.step(cycle, len(problem.visits))
        for block in step.evictions:
            if block not in problem.residents:
                self.arrival.pop(block, None)
        for block in step.loads:
            if block not in self.arrival:
                self._load(block)
        if self.overlap is not Overlap.NONE or not order:
            end = self._add(CostLane.COMPUTE, "end of step", 0.0, [])
            self.compute.append(end)
        return end

    def _norm(self, block: int, arrived: int) -> int:
        """The gradient's part of the norm, as it arrives."""
        nbytes = self.traffic[block].norm_bytes
        if not nbytes:
            return arrived
        seconds = nbytes / self.hardware.update_rate
        return self._add(CostLane.UPDATE, f"norm {block}", seconds, [arrived], dram_bytes=nbytes, block=block)

    def _update(self, block: int, after: list[int]) -> int:
        own, hardware = self.traffic[block], self.hardware
        waits = list(after)
        moved = own.update_bytes
        moved_on_disk = own.state_bytes + own.spill_bytes
        if moved_on_disk:
            ring = [self.spilled[-STAGED_BLOCKS]] if len(self.spilled) >= STAGED_BLOCKS else []
            waits.append(self._copy(CostLane.FETCH, "state", block, moved_on_disk, ring))
        done = max(waits)
        if moved:
            seconds = hardware.dram_latency_seconds + moved / hardware.update_rate
            done = self._add(CostLane.UPDATE, f"update {block}", seconds, waits, dram_bytes=moved, block=block)
        passed = done
        if own.pass_on_seconds:
            passed = self._add(CostLane.COLLECTIVE, f"pass on {block}", own.pass_on_seconds, [done], block=block)
        if moved_on_disk:  # weights that rest there: also those that others have updated
            spill = self._copy(CostLane.SPILL, "state", block, moved_on_disk, [passed if own.spill_bytes else done])
            self.spilled.append(spill)
            return spill if own.spill_bytes else passed
        return passed

    def _load(self, block: int) -> None:
        problem, own = self.plan.problem, self.traffic[block]
        waits = self._now()
        if block in self.ready:
            waits.append(self.ready[block])
        if own.fetch_bytes:
            ring = [self.fetched[-STAGED_BLOCKS]] if len(self.fetched) >= STAGED_BLOCKS else []
            home = [self.ready[block]] if block in self.ready else []
            waits.append(self._copy(CostLane.FETCH, "weights", block, own.fetch_bytes, [*ring, *home]))
        nbytes = problem.block_bytes[block] if own.load_bytes is None else own.load_bytes
        # The plan's time is that of the slowest hop; the link's own is what its lane is busy for.
        own_link = self.hardware.link_latency_seconds + nbytes / self.hardware.onload_bytes_per_second
        seconds = problem.load_seconds[block]
        if own.fetch_bytes or own.load_bytes is not None:
            seconds = min(seconds, own_link)
        loaded = self._add(
            CostLane.ONLOAD, f"weights {block}", seconds, waits, dram_bytes=nbytes, nbytes=nbytes, block=block
        )
        gathered = self._gathered(block, [loaded])
        self.arrival[block] = loaded if gathered < 0 else gathered
        if own.fetch_bytes:
            self.fetched.append(self.arrival[block])

    def _experts(self, block: int) -> list[int]:
        """Experts that a visit wants come once its router has computed: here as if that took no time."""
        own = self.traffic[block].experts
        if not own.seconds:
            return []
        nbytes = round(own.nbytes)
        waits = self._now()
        if self.arrival[block] >= 0:
            waits.append(self.arrival[block])
        name = f"experts {block}"
        tasks = []
        if own.disk_seconds:
            tasks.append(self._add(CostLane.FETCH, name, own.disk_seconds, waits, nbytes=nbytes, block=block))
        tasks.append(
            self._add(CostLane.ONLOAD, name, own.link_seconds, waits, dram_bytes=nbytes, nbytes=nbytes, block=block)
        )
        return tasks

    def _now(self) -> list[int]:
        """What the host has given to compute so far: loads issued now start behind it."""
        return self.compute[-1:]

    def _copy(self, lane: CostLane, what: str, block: int, nbytes: int, after: list[int]) -> int:
        hardware = self.hardware
        latency, rate = {
            CostLane.ONLOAD: (hardware.link_latency_seconds, hardware.onload_bytes_per_second),
            CostLane.OFFLOAD: (hardware.link_latency_seconds, hardware.offload_bytes_per_second),
            CostLane.FETCH: (hardware.disk_latency_seconds, hardware.disk_read_bytes_per_second),
            CostLane.SPILL: (hardware.disk_latency_seconds, hardware.disk_write_bytes_per_second),
        }[lane]
        seconds = latency + nbytes / rate
        return self._add(lane, f"{what} {block}", seconds, after, dram_bytes=nbytes, nbytes=nbytes, block=block)

    def _add(
        self,
        lane: CostLane,
        name: str,
        seconds: float,
        after: Sequence[int],
        *,
        dram_bytes: float = 0.0,
        nbytes: int = 0,
        block: int = -1,
    ) -> int:
        self.tasks.append(Task(lane, name, seconds, tuple(sorted(set(after))), dram_bytes, nbytes, block))
        return len(self.tasks) - 1
