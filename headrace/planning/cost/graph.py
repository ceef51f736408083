"""Which tasks make up a step, on which lanes, and what waits for what?

The tasks are what the executor does, visit by visit: compute, the loads that the plan issues there, gradients and
activations that leave, the update, and the disk's reads and writes.
"""

import itertools
from collections.abc import Sequence

from headrace.planning.cost.hardware import Hardware
from headrace.planning.cost.lanes import PASS_THREAD, UPDATE_THREAD, CostLane, Task
from headrace.planning.cost.traffic import ACTIVATION_LAYERS, GRADIENT_BLOCKS, STAGED_BLOCKS, BlockTraffic
from headrace.planning.cost.work import Overlap
from headrace.planning.plan import Plan
from headrace.planning.problem import Phase, Visit

_GRADIENT_PARTS = 4  # a block's gradients leave in at most this many, while the rest of its backward still computes
_GRADIENT_PART_BYTES = 4 * 2**20
_UPDATE_PARTS = 8  # the device updates a block in this many; kernels take next to no time
_UPDATE_PIECE_BYTES = 16 * 2**20  # the pieces of a real update have at most this many
_PLANNED_PARTS = 256  # about this many in a whole step


class StepGraph:
    """The tasks of some consecutive steps."""

    def __init__(self, plan: Plan, traffic: Sequence[BlockTraffic], hardware: Hardware, overlap: Overlap) -> None:
        self.plan = plan
        self.traffic = traffic
        self.hardware = hardware
        self.overlap = overlap
        link, disk = hardware.link_latency_seconds, hardware.disk_latency_seconds
        self.copies = {  # latency and rate
            CostLane.ONLOAD: (link, hardware.onload_bytes_per_second),
            CostLane.OFFLOAD: (link, hardware.offload_bytes_per_second),
            CostLane.FETCH: (disk, hardware.disk_read_bytes_per_second),
            CostLane.SPILL: (disk, hardware.disk_write_bytes_per_second),
        }
        self.updates = any(own.update_in_bytes for own in traffic)  # whether the device updates
        self.tasks: list[Task] = []
        # Block on the device -> its load (-1: it was there at the start).
        self.arrival: dict[int, int] = dict.fromkeys(plan.start | plan.problem.residents, -1)
        self.ready: dict[int, int] = {}  # block -> the task after which its home has the updated weights
        self.last_compute = -1
        self.fetched: list[int] = []  # loads of fetched blocks, for the ring of staging buffers
        self.spilled: list[int] = []
        self.sent: list[int] = []  # for each layer of forward, the offload of its activations
        self.leaving: list[int] = []  # for each block of backward, the last offload of its gradients
        self.sums: list[int] = []  # for each block of backward, the sum of its gradients on the host
        self.last_gradient = -1
        self.updated = -1  # the last copy of updates by the device
        self.behind: list[int] = []  # for each task, the last of these copies that ends before it can begin; -1: none
        self.submitted: dict[tuple[CostLane, int], int] = {}  # the last task that each thread gave each lane
        # In this step: block -> the task after which all of its gradients are where they are used.
        self.gradients: dict[int, int] = {}
        self.begun: set[int] = set()  # blocks whose homes have gradients of this step
        self.kept: dict[int, int] = {}  # block -> the last copy of its activations on their way out (offload or spill)
        self.back: dict[int, int] = {}
        self.last_backward = {
            block: index
            for index, visit in enumerate(plan.problem.visits)
            for block in visit.blocks
            if visit.phase is Phase.BACKWARD
        }

    def step(self, cycle: int) -> int:
        """Lays out one step; returns the index of its last task on the compute lane."""
        self.gradients, self.kept, self.back, self.begun = {}, {}, {}, set()
        for index, visit in enumerate(self.plan.problem.visits):
            before = self._bring_for_sums(visit)
            waits = self._moved_before(cycle, index, visit)
            name = f"{visit.phase.value} {' '.join(map(str, visit.blocks))}"
            parts, seconds = self._parts(visit), visit.compute_seconds
            for arrived, of_part in before:
                self._add(CostLane.COMPUTE, name, of_part, waits)
                waits, seconds = [arrived], seconds - of_part
            for part in range(parts):
                done = self._add(CostLane.COMPUTE, name, seconds / parts, waits)
                waits = []
                for block in visit.blocks:
                    self._leave(index, block, visit.phase, done, part, parts)
            self.last_compute = done
            if visit.phase is Phase.BACKWARD and any(self.traffic[block].gradient_bytes for block in visit.blocks):
                self.leaving.append(self.last_gradient)
        return self._boundary(cycle)

    def _moved_before(self, cycle: int, index: int, visit: Visit) -> list[int]:
        """Adds all that a visit loads; returns the tasks that its compute waits for."""
        plan_step, backward = self.plan.step(cycle, index), visit.phase is Phase.BACKWARD
        waits = self._evict(plan_step.evictions)
        self._load_missing(visit.blocks)
        parts = [task for block in visit.blocks for task in self._load_parts(block, visit.phase)]
        self._load_missing(plan_step.loads)
        if backward:
            self._bring_back(index)
            waits += [self.back[block] for block in visit.blocks if block in self.back]
        waits += [self.arrival[block] for block in visit.blocks if self.arrival[block] >= 0]
        waits += parts
        leaving = _back(self.leaving, GRADIENT_BLOCKS) if backward else _back(self.sent, ACTIVATION_LAYERS)
        return waits + leaving

    def _bring_for_sums(self, visit: Visit) -> list[tuple[int, float]]:
        """Adds the onloads of gradients that sums of micro-batches begin with, in parts. Returns the task of each part,
        and the seconds of the first micro-batch's backward after which compute waits for it.
        """
        found = []
        for block in visit.blocks if visit.phase is Phase.BACKWARD else ():
            own = self.traffic[block]
            whole = own.sum_begins_bytes if block in self.begun else 0
            for part in range(_GRADIENT_PARTS if whole else 0):
                nbytes = whole * (part + 1) // _GRADIENT_PARTS - whole * part // _GRADIENT_PARTS
                arrived = self._copy(CostLane.ONLOAD, "gradients", block, nbytes, self._now())
                found.append((arrived, own.first_batch_seconds / _GRADIENT_PARTS))
            self.begun.add(block)
        return found

    def _evict(self, blocks: Sequence[int]) -> list[int]:
        """Evicts these blocks; returns their loads, which must be over first."""
        gone = (self.arrival.pop(block, -1) for block in blocks if block not in self.plan.problem.residents)
        return [task for task in gone if task >= 0]

    def _load_missing(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block not in self.arrival:
                self._load(block)

    def _parts(self, visit: Visit) -> int:
        """The number of parts in which the gradients of a visit leave."""
        nbytes = sum(self.traffic[block].gradient_bytes for block in visit.blocks)
        sums = any(self.traffic[block].sum_begins_bytes for block in visit.blocks)  # which leave when all are there
        if visit.phase is not Phase.BACKWARD or not nbytes or sums:
            return 1
        # In a long step a part more or less changes little, and each part costs time to plan.
        few = max(1, _PLANNED_PARTS // len(self.plan.problem.visits))
        return min(_GRADIENT_PARTS, few, -(-nbytes // _GRADIENT_PART_BYTES))

    def _bring_back(self, index: int) -> None:
        """Adds the way back of the activations of this visit and of the next."""
        for visit in self.plan.problem.visits[index : index + 2]:
            for block in visit.blocks:
                nbytes = self.traffic[block].activation_bytes
                if visit.phase is Phase.BACKWARD and block in self.kept and block not in self.back:
                    waits = [self.kept[block], *self._now()]
                    if self.traffic[block].activations_spill:
                        waits.append(self._copy(CostLane.FETCH, "activations", block, nbytes, waits))
                    self.back[block] = self._copy(CostLane.ONLOAD, "activations", block, nbytes, waits)

    def _leave(self, index: int, block: int, phase: Phase, done: int, part: int, parts: int) -> None:
        """Adds what leaves after a part of a visit: gradients in parts, the rest after the last part."""
        own = self.traffic[block]
        last = phase is Phase.BACKWARD and self.last_backward[block] == index
        if phase is Phase.BACKWARD and own.gradient_bytes:
            nbytes = own.gradient_bytes * (part + 1) // parts - own.gradient_bytes * part // parts
            ready = [self._reduced(block, done, parts) if last or own.reduces_always else done]
            ready += _back(self.sums, GRADIENT_BLOCKS) if own.sum_bytes else []  # memory for each device's own
            self.last_gradient = self._copy(CostLane.OFFLOAD, "gradients", block, nbytes, ready)
        if part + 1 < parts:
            return
        if phase is Phase.FORWARD and own.activation_bytes:
            left = self._copy(CostLane.OFFLOAD, "activations", block, own.activation_bytes, [done])
            self.sent.append(left)
            if own.activations_spill:
                left = self._copy(CostLane.SPILL, "activations", block, own.activation_bytes, [left])
            self.kept[block] = left
            self.back.pop(block, None)  # the copy that came back belongs to the micro-batch before
        arrived = self._summed(block) if phase is Phase.BACKWARD and own.gradient_bytes else -1
        if last and own.gradient_bytes:
            self.gradients[block] = self._norm(block, self._across_nodes(block, arrived))
        elif last and (own.update_bytes or own.update_in_bytes or own.reduce_seconds):
            self.gradients[block] = self._reduced(block, done)

    def _reduced(self, block: int, done: int, parts: int = 1) -> int:
        """The task after which a part of the block's gradients has been summed up across devices."""
        seconds = self.traffic[block].reduce_seconds / parts
        return self._among_devices("reduce", block, seconds, [done]) if seconds else done

    def _summed(self, block: int) -> int:
        """The task after which the host has added up this device's range of all devices' gradients of the block."""
        own = self.traffic[block]
        if not own.sum_bytes:
            return self.last_gradient
        self.sums.append(self._pass_over(f"sum {block}", own.sum_bytes, [self.last_gradient]))
        return self.sums[-1]

    def _across_nodes(self, block: int, arrived: int) -> int:
        """The task after which the device's range of the block's gradients is summed up over all nodes."""
        own = self.traffic[block]
        if not own.network_seconds:
            return arrived
        dram, nbytes, name = own.network_dram_bytes, own.network_bytes, f"sum over nodes {block}"
        return self._add(CostLane.NETWORK, name, own.network_seconds, [arrived], dram_bytes=dram, nbytes=nbytes)

    def _among_devices(self, what: str, block: int, seconds: float, after: list[int]) -> int:
        """Adds a transfer over the links among devices, or both ways over each device's link to the host."""
        name = f"{what} {block}"
        if not self.traffic[block].over_link:
            return self._add(CostLane.COLLECTIVE, name, seconds, after)
        both = [self._add(lane, name, seconds, after) for lane in (CostLane.ONLOAD, CostLane.OFFLOAD)]
        return self._add(CostLane.COLLECTIVE, name, 0.0, both)

    def _boundary(self, cycle: int) -> int:
        """Adds the update and the end of the step; returns its last task on the compute lane."""
        problem, gradients = self.plan.problem, self.gradients
        # Lanes run in order, so that the last task of each is behind all of its tasks.
        everything = list({self.tasks[task].lane: task for task in sorted(gradients.values())}.values())
        closing = sum(own.device_update_seconds for own in self.traffic)
        if closing:
            self.last_compute = self._add(CostLane.COMPUTE, "update on the device", closing, everything)
        last = end = self.last_compute
        order = sorted(gradients) if self.overlap is not Overlap.BACKWARD else list(gradients)
        for block in order:
            own_part = [gradients[block]] if self.overlap is Overlap.BACKWARD else everything
            # The host's part of an update does not wait for the device's; a block without a part on the host does.
            on_host = self.traffic[block].update_bytes or self.traffic[block].update_in_bytes
            after = own_part if on_host or not closing else [end]
            last = self._update(block, after)
            self.ready[block] = last
        waits = self.overlap is Overlap.NONE and bool(order)
        if waits:
            # The host finishes the update before it goes on, and gives no lane anything of the next step until then.
            self.last_compute = self._add(CostLane.COMPUTE, "the next step", 0.0, [last])
            self.ready.update(dict.fromkeys(order, self.last_compute))
        for block in problem.changing:
            self.arrival.pop(block, None)
        step = self.plan.step(cycle, len(problem.visits))
        self._evict(step.evictions)
        self._load_missing(step.loads)
        if not waits:
            self.last_compute = self._add(CostLane.COMPUTE, "end of step", 0.0, [])
        return self.last_compute

    def _norm(self, block: int, arrived: int) -> int:
        """The task after which the block's gradients have arrived and count in the norm."""
        nbytes = self.traffic[block].norm_bytes
        return self._pass_over(f"norm {block}", nbytes, [arrived]) if nbytes else arrived

    def _pass_over(self, name: str, nbytes: float, after: list[int], latency: float = 0.0) -> int:
        """Adds a task in which the host's cores read and write `nbytes` of its memory."""
        seconds = latency + nbytes / self.hardware.update_rate
        return self._add(CostLane.UPDATE, name, seconds, after, dram_bytes=nbytes)

    def _update(self, block: int, after: list[int]) -> int:
        own = self.traffic[block]
        waits = list(after)
        on_disk = own.state_bytes + own.spill_bytes
        if on_disk:
            waits.append(self._copy(CostLane.FETCH, "state", block, on_disk, _back(self.spilled, STAGED_BLOCKS)))
        done = max(waits)
        if own.update_bytes:
            done = self._pass_over(f"update {block}", own.update_bytes, waits, self.hardware.dram_latency_seconds)
        if own.update_in_bytes:
            done = self._update_on_device(block, waits)
        passed = done
        if own.pass_on_seconds:
            passed = self._add(CostLane.COLLECTIVE, f"pass on {block}", own.pass_on_seconds, [done])
        if on_disk:  # also weights there that other devices have updated
            after = [passed if own.spill_bytes else done]
            self.spilled.append(self._copy(CostLane.SPILL, "state", block, on_disk, after))
        return self.spilled[-1] if own.spill_bytes else passed

    def _update_on_device(self, block: int, waits: Sequence[int]) -> int:
        """Adds the copies of an update by the device, in parts: some leave while others arrive, a piece behind them.

        Their thread submits only a few ahead, so that loads come in between. Beside passes, it waits for the last copy
        of each block before it begins with the next block: this costs the time of the last piece's way back.
        """
        into, out = self.traffic[block].update_in_bytes, self.traffic[block].update_out_bytes
        ends_each = self.overlap is not Overlap.NONE and self.updated >= 0
        begins = [*waits, self.updated] if ends_each else list(waits)
        piece = min(1 / _UPDATE_PARTS, _UPDATE_PIECE_BYTES / into)
        middle = [piece + (1 - 2 * piece) * part / (_UPDATE_PARTS - 2) for part in range(_UPDATE_PARTS - 1)]
        arrived = -1
        for start, stop in itertools.pairwise([0.0, *middle, 1.0]):
            before, nbytes = arrived, round(into * stop) - round(into * start)
            arrived = self._copy(CostLane.ONLOAD, "update", block, nbytes, begins, UPDATE_THREAD)
            nbytes = round(out * stop) - round(out * start)
            first_leaves = arrived if before < 0 or stop == 1.0 else before
            self.updated = self._copy(CostLane.OFFLOAD, "update", block, nbytes, [first_leaves], UPDATE_THREAD)
            begins = [arrived]
        return self.updated

    def _load(self, block: int) -> None:
        problem, own = self.plan.problem, self.traffic[block]
        home = [self.ready[block]] if block in self.ready else []
        waits = self._now() + home
        if own.fetch_bytes:
            ring = _back(self.fetched, STAGED_BLOCKS)
            waits.append(self._copy(CostLane.FETCH, "weights", block, own.fetch_bytes, ring + home))
        nbytes = problem.block_bytes[block] if own.load_bytes is None else own.load_bytes
        # The plan's seconds are those of the slowest hop; the link's lane is busy for the link's own time.
        own_link = self.hardware.link_latency_seconds + nbytes / self.hardware.onload_bytes_per_second
        seconds = problem.load_seconds[block]
        if own.fetch_bytes or own.load_bytes is not None:
            seconds = min(seconds, own_link)
        loaded = self._add(CostLane.ONLOAD, f"weights {block}", seconds, waits, dram_bytes=nbytes, nbytes=nbytes)
        if own.gather_seconds:  # the ranges of the other devices
            loaded = self._among_devices("gather", block, own.gather_seconds, [loaded])
        self.arrival[block] = loaded
        if own.fetch_bytes:
            self.fetched.append(self.arrival[block])

    def _load_parts(self, block: int, phase: Phase) -> list[int]:
        """Adds the loads of a visit's experts, or rows. They begin after its router, which takes no time here."""
        own = self.traffic[block].parts
        if not own.seconds or (phase is Phase.BACKWARD and not own.in_backward):
            return []
        nbytes = round(own.nbytes)
        waits = self._now()
        if self.arrival[block] >= 0:
            waits.append(self.arrival[block])
        name = f"{'experts' if own.in_backward else 'rows'} {block}"
        tasks = []
        if own.disk_seconds:
            tasks.append(self._add(CostLane.FETCH, name, own.disk_seconds, waits, nbytes=nbytes))
        tasks.append(self._add(CostLane.ONLOAD, name, own.link_seconds, waits, dram_bytes=nbytes, nbytes=nbytes))
        return tasks

    def _now(self) -> list[int]:
        """The last compute task so far, if any: loads that are issued now start after it."""
        return [self.last_compute] if self.last_compute >= 0 else []

    def _copy(
        self, lane: CostLane, what: str, block: int, nbytes: int, after: Sequence[int], thread: int = PASS_THREAD
    ) -> int:
        latency, rate = self.copies[lane]
        seconds = latency + nbytes / rate
        return self._add(lane, f"{what} {block}", seconds, after, dram_bytes=nbytes, nbytes=nbytes, thread=thread)

    def _add(
        self,
        lane: CostLane,
        name: str,
        seconds: float,
        after: Sequence[int],
        *,
        dram_bytes: float = 0.0,
        nbytes: int = 0,
        thread: int = PASS_THREAD,
    ) -> int:
        waits = tuple(sorted(set(after)) if len(after) > 1 else after)
        self.tasks.append(Task(lane, name, seconds, waits, dram_bytes, nbytes, thread))
        if self.updates:
            self._submit(len(self.tasks) - 1)
        return len(self.tasks) - 1

    def _submit(self, number: int) -> None:
        """Notes when a task is submitted. The thread of updates submits it when it can begin. The thread of the pass
        does when the host has waited for all updates before it; a load from disk, when it has been read.
        """
        task, key = self.tasks[number], (self.tasks[number].lane, self.tasks[number].thread)
        if task.thread == UPDATE_THREAD:
            task.submitted_after = task.after
            self.behind.append(number)
            return
        before = [self.submitted[key]] if key in self.submitted else []
        last = max([self.behind[other] for other in (*task.after, *before)], default=-1)
        self.behind.append(last)
        self.submitted[key] = number
        task.submitted_after = (last,) if last >= 0 else ()
        if task.lane is CostLane.ONLOAD:
            task.submitted_after += tuple([o for o in task.after if self.tasks[o].lane is CostLane.FETCH])


def _back(tasks: Sequence[int], count: int) -> list[int]:
    """The task `count` places back, if there is one. When it ends, its place is free."""
    return [tasks[-count]] if len(tasks) >= count else []
