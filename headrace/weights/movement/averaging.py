"""How do the ranks of a node average gradients? Each sums up its part of every block, while backward goes on.

A rank's gradients of a block leave its device for memory that all ranks of the node see. When the gradients of all
ranks are there, each rank adds up its part of them, in the order of the ranks, into the one copy that the node keeps.
So the result is that of one process which accumulates the ranks' batches one after the other, bit for bit.

Blocks are averaged in one order on all ranks, whatever a rank's own backward does. For a block that its backward did
not reach, a rank gives nothing; gradients that come too late for their block are averaged at the end. See
docs/design/nodes.md.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from headrace.errors import LayoutError, StateError
from headrace.memory.arena import aligned, whole_pages
from headrace.memory.ledger import Ledger, Tier
from headrace.memory.shared import SharedArena
from headrace.runtime.autograd import without_overrides
from headrace.runtime.lanes import Lane, Lanes, LateTransfer, Transfer
from headrace.runtime.node import Counters
from headrace.runtime.threads import Job, OneThread
from headrace.weights.meter import Meter
from headrace.weights.model.accumulation import late_hooks
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.movement.block import Block, block_of
from headrace.weights.movement.common import CommonHomes
from headrace.weights.movement.flow import PURPOSE, GradientFlow, Leaving, Wanted
from headrace.weights.movement.gathering import Gathers
from headrace.weights.movement.host_gradients import NodeGradients, elements_of
from headrace.weights.movement.sums import DeviceSums, HostSums, Round, Sums
from headrace.weights.rest.tiers import Tiers

_ARRIVED, _SUMMED = 0, 1  # counters: the last round whose gradients this rank has given, and has summed up
_IN_A_PASS = 1 << 24  # numbers of rounds that each pass has: the most in one pass
_GIVES, _ADDS = 1, 2  # what a rank says of each parameter: it gives a gradient; its home has one already


class AveragedGradients(GradientFlow):
    """The gradient flow of several ranks: each home gets the average of all ranks' gradients."""

    def __init__(
        self,
        lanes: Lanes,
        ledger: Ledger,
        meter: Meter,
        tiers: Tiers,
        grad_dtype: torch.dtype | None,
        common: CommonHomes,
        gathers: Gathers | None,
    ) -> None:
        """With `gathers`, devices also add up gradients by collectives, and each device sends a part of the sums."""
        super().__init__(lanes, ledger, meter, tiers, grad_dtype)
        self._common, self._node = common, common.node
        self._homes: dict[ManagedParam, NodeGradients] = {}
        self._counters = Counters(self._node, 2)
        self._sums: Sums = (DeviceSums if gathers else HostSums)(self._node, self)
        self._keep_up: Callable[[], None] = gathers.keep_up if gathers else lambda: None  # while waiting
        self._half_bytes = 0  # the bytes that each rank has of a half
        self._halves: list[SharedArena] = []
        self._last_of_half: list[tuple[int, Job[list[ManagedParam]] | None]] = [(0, None)] * 2  # the last round in it
        self._meeting, self._summing = (OneThread(name, lanes.device) for name in ("headrace-average", "headrace-sum"))
        self._pass = self._rounds = 0
        self._places: dict[Block, int] = {}  # the place of each block in the order of rounds
        self._open: dict[Block, dict[ManagedParam, torch.Tensor]] = {}  # gradients on the device, in no round yet
        self._next = 0  # the place of the first block whose round has not begun in this backward
        self._late: dict[ManagedParam, torch.Tensor] = {}  # on the host: gradients that came after their block's round
        self._unsynchronised: dict[ManagedParam, torch.Tensor] = {}  # on the host: gradients of `no_sync` backwards
        self._of_this_backward: dict[ManagedParam, torch.Tensor] = {}  # the same, of the one under way
        common.discards.append(self._discard)
        self._jobs: list[tuple[Round, Job[list[ManagedParam]]]] = []
        self._averaged: set[ManagedParam] = set()  # parameters that this backward has averaged

    def prepare(self, blocks: Iterable[Block]) -> None:
        """Makes memory for gradients. To be called by all ranks, for the same blocks."""
        if self._pass != self._common.passes:  # all ranks have begun the pass: none has a round of the last one
            self._pass, self._rounds, self._last_of_half = self._common.passes, 0, [(0, None)] * 2
        # Blocks that stream, in the order in which backward comes to them, and then those that stay on the device.
        order = sorted(blocks, key=lambda block: block.index, reverse=True)
        if len(order) != len(self._places):
            self._places = {block: place for place, block in enumerate(order)}
        super().prepare(self._places)

    def _lacking(self, block: Block) -> list[ManagedParam]:
        _refuse_hooks(block)
        return [param for param in block.params if param.home.requires_grad and param not in self._homes]

    def _make(self, wanted: list[Wanted]) -> None:
        """Also makes the two halves of the memory through which gradients pass."""
        half_bytes = max(self._half_bytes, aligned(len(self._places)))
        for block in self._places:
            params = [param for param in block.params if param.home.requires_grad or param in self._homes]
            half_bytes = max(half_bytes, aligned(len(params)) + self._sums.given_bytes(params))
        size = self._node.size
        more_bytes = 2 * (self._part_of(half_bytes * size) - self._part_of(self._half_bytes * size))
        self._tiers.check_gradients(more_bytes + sum(self._part_of(offsets[-1]) for _, _, offsets in wanted))
        if half_bytes > self._half_bytes:  # before memory for averages, which may be on disk
            self._halves, self._half_bytes = [], 0
            self._tiers.make_room(2 * whole_pages(size * half_bytes))
            given = self._node, size * half_bytes, self.lanes.device, self.ledger, PURPOSE
            self._halves = [SharedArena(*given, by_ranks=True) for _ in range(2)]
            self._half_bytes = half_bytes
        for block, params, offsets in wanted:
            arena = self._tiers.common_gradient_memory(self._node, block.name, offsets[-1])
            homes = NodeGradients(arena, arena.own_view(), dict(zip(params, offsets, strict=False)))
            self._homes |= dict.fromkeys(params, homes)

    def _part_of(self, nbytes: int) -> int:
        """The bytes of the node's memory that this rank books."""
        part = self._node.part(whole_pages(nbytes)) if nbytes else slice(0, 0)
        return int(part.stop - part.start)

    def take(self, param: ManagedParam, *gradients: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Takes one gradient, of all rows: with several ranks, tables and experts travel whole."""
        (gradient,) = gradients
        block = block_of(param)
        if gradient.layout != torch.strided:
            raise LayoutError(
                f"parameter {param.name!r} has a sparse gradient (nn.Embedding(sparse=True)), which ranks cannot"
                " average; make it a dense one: sparse=False"
            )
        _refuse_hooks(block)  # hooks that were registered since forward
        if param not in self._homes:
            raise StateError(
                f"parameter {param.name!r} has a gradient, and no forward with gradients has begun on all ranks since"
                " it is trained: this backward recomputes a whole model (checkpoint(model, ..., use_reentrant=True));"
                " give use_reentrant=False, or checkpoint its layers"
            )
        if not self.synchronises:
            self._keep(self._of_this_backward, param, gradient)
        elif self._places[block] < self._next:
            self._keep(self._late, param, gradient)
        else:
            held = self._open.setdefault(block, {})
            if param not in held:
                self.ledger.add(Tier.DEVICE, PURPOSE, gradient.nbytes)
            held[param] = held[param] + gradient if param in held else gradient

    def leave_block(self) -> None:
        """Called when backward goes on to another block: begins the rounds of those before. Compute first waits for the
        gradients of earlier rounds.

        Where devices add up, a round's gradients leave only when all ranks have given theirs, and the host waits for
        that. So the last round may go on leaving: the host waits only for ranks that are two rounds behind.
        """
        self._wait_for_all_but(self._sums.in_flight - 1)
        streamed = [self._places[block] for block in self._open if block.index >= 0]
        if streamed:  # blocks that stay on the device come last
            self._average_up_to(max(streamed))

    def deliver(self, in_hooks: Callable[[], None]) -> None:
        """Called at the end of backward, on all ranks. When this returns, the averages are in the homes."""
        if not self.synchronises:
            for param, gradient in self._of_this_backward.items():
                self._keep(self._unsynchronised, param, gradient)
            self._of_this_backward.clear()
            return
        self._wait_for_all_but(0)
        self._average_up_to(len(self._places) - 1)
        self._finish_rounds()
        self._average_late()
        self._wait_for_all_but(0)
        self._unsynchronised.clear()  # the averages contain them
        self._next = 0
        with without_overrides():
            for homes in dict.fromkeys(self._homes.values()):
                self._show(homes)
        averaged, self._averaged = self._averaged, set()
        for param in sorted(averaged, key=lambda param: param.name):
            for hook in late_hooks(param.home):
                hook(param.home)

    def abandon(self) -> None:
        if self._open or self._jobs or self._next:
            self._node.break_off()
        for held in (self._open, self._late, self._of_this_backward):
            held.clear()
        jobs, self._jobs = self._jobs, []
        for _, job in jobs:
            job.exception()
        # Copies of a LateTransfer have ended, or were never submitted.
        self._leaving = deque(one for one in self._leaving if not isinstance(one.transfer, LateTransfer))
        super().abandon()
        self._averaged.clear()
        self._next = 0

    def close(self) -> None:
        """Waits for rounds that are under way, and ends the threads."""
        self._meeting.shutdown(wait=True)
        self._summing.shutdown(wait=True)
        self._sums.close()

    def _discard(self, parameters: Iterable[Any]) -> None:
        wanted = set(map(id, parameters))
        for param in [param for param in self._unsynchronised if id(param.home) in wanted]:
            del self._unsynchronised[param]

    def _keep(self, kept: dict[ManagedParam, torch.Tensor], param: ManagedParam, gradient: torch.Tensor) -> None:
        """Adds one more gradient of a parameter to those in `kept`, on the host."""
        gradient = gradient.detach().to("cpu", self.dtype(param), copy=param not in kept)
        kept[param] = kept[param].add_(gradient) if param in kept else gradient

    def _wait_for_all_but(self, last: int) -> None:
        """Compute waits for gradients that are leaving the device, except those of the `last` newest rounds."""
        while len(self._leaving) > last:
            self._leaving[0].transfer.done_while(self._keep_up)
            self._release_oldest()

    # rounds ----------------------------------------------------------------------------------------------------------
    def _average_up_to(self, place: int) -> None:
        """Begins the rounds of all blocks up to that place in the order that have not begun."""
        order = list(self._places)
        while self._next <= place:
            block = order[self._next]
            self._next += 1
            params = self._params_of(block)
            if params:
                kept = {param: self._unsynchronised[param] for param in params if param in self._unsynchronised}
                self._begin(block, params, self._open.pop(block, {}), kept)

    def _begin(
        self,
        block: Block,
        params: list[ManagedParam],
        gradients: dict[ManagedParam, torch.Tensor],
        from_host: dict[ManagedParam, torch.Tensor],
    ) -> None:
        block.wait_for_updates()  # updates read the gradients of the backward before
        self._wait_for_all_but(self._sums.in_flight - 1)
        number, half, before = self._next_round(f"room for gradients of {block.name!r}")
        says = []
        with without_overrides():
            for param in params:
                homes, held = self._homes[param], param.home.grad
                adds = held is not None or param in self._averaged
                says.append(_GIVES * (param in gradients or param in from_host) | _ADDS * adds)
                replaced = held is None or not homes.has_lent(param, held)
                if replaced and param not in self._averaged and homes.is_kept(param):
                    homes.leave_to_user()
        given = Round(block, number, half, self._half_bytes, params, says, from_host, before)
        transfer: Transfer | LateTransfer | None = self._sums.give(given, gradients)
        met = self._meeting.submit(self._meet, given)
        if given.rows:
            transfer = LateTransfer(Lane.OFFLOAD, sum(one.nbytes for one in given.rows.values()), met)
        more_bytes = -sum(one.nbytes for one in gradients.values())
        if transfer is not None:
            more_bytes += transfer.nbytes
            self._leaving.append(Leaving(number, transfer, given.rows))
        self.ledger.add(Tier.DEVICE, PURPOSE, more_bytes)
        job = self._summing.submit(self._sum, given, met)
        self._jobs.append((given, job))
        self._last_of_half[self._rounds % 2] = number, job

    def _meet(self, given: Round) -> Any:
        """On the meeting thread: waits until all ranks have given their gradients, and reads what each says of each
        parameter. Returns the transfer of the sums where devices add up; they leave the device only then.
        """
        node = self._node
        with torch.no_grad(), without_overrides():
            with self._counters.unbroken():
                self._sums.land(given)
            said = [given.said(rank) for rank in range(node.size)]
            said[node.rank].copy_(torch.tensor(given.says, dtype=torch.uint8))
            self._counters.come(_ARRIVED, given.number, f"its gradients of {given.block.name!r}")
            given.heard = torch.stack(said)  # once all have come to the next round, all have read these
            adds = given.heard & _ADDS
            uneven = (adds.amin(0) != adds.amax(0)).nonzero().flatten().tolist()
            if uneven:
                having = [node.ranks[rank] for rank in range(node.size) if adds[rank, uneven[0]]]
                raise _uneven(given.params[uneven[0]], f"ranks {having} alone, of {list(node.ranks)}")
            with self._counters.unbroken():  # others may be in a failed one until this rank ends: it waits for none
                return self._sums.exchange(given, given.heard & _GIVES)

    def _sum(self, given: Round, met: Job[Any]) -> list[ManagedParam]:
        """On the summing thread: sums up this rank's part of all gradients. Returns the parameters with an average."""
        met.result()
        if given.left is not None:
            given.left.synchronize()
        with torch.no_grad(), without_overrides():
            averaged = self._add_up(given, given.heard & _GIVES, given.heard & _ADDS)
        self._counters.post(_SUMMED, given.number)
        return averaged

    def _add_up(self, given: Round, gives: torch.Tensor, adds: torch.Tensor) -> list[ManagedParam]:
        node, averaged = self._node, []
        said = torch.stack([gives.amax(0), adds[0], _ADDS - adds[0]])
        node.reduce_across(said, "which gradients there are", largest=True)
        anywhere = said[0]
        uneven = (said[1] + said[2] > _ADDS).nonzero().flatten().tolist()
        if uneven:
            raise _uneven(given.params[uneven[0]], "some nodes alone")
        for index, param in enumerate(given.params):
            part = self._sums.part(param.home.numel())
            if not anywhere[index] and not adds[0, index]:
                continue
            common = self._homes[param].common(param, self.dtype(param))[part]
            before = common if param in self._averaged else _there_is(param)[part] if adds[0, index] else None
            # As in one process, gradients are added to the present one; of several nodes, or by devices, their sum is.
            continued = before is not None and node.across is None and self._sums.on_host
            begin = before.clone() if before is not None and continued else None
            total = self._sums.average(given, gives, index, begin)
            total = None if total is None else total.to(common.dtype)
            if anywhere[index] and node.across is not None:
                total = torch.zeros_like(common) if total is None else total
                node.reduce_across(total, f"the gradients of {param.name!r}")
            if before is not None and not continued:
                total = before if total is None else total.add_(before)
            if total is not None:
                common.copy_(total)
            averaged.append(param)
        return averaged

    def _next_round(self, what: str) -> tuple[int, SharedArena, Job[list[ManagedParam]] | None]:
        """The next round's number; its half of the memory; and the job that summed up there last. Where sums are made
        on the host, first waits until no rank reads this half.
        """
        self._rounds += 1
        number, turn = self._pass * _IN_A_PASS + self._rounds, self._rounds % 2
        last, job = self._last_of_half[turn]
        if self._sums.on_host:
            if job is not None:
                job.result()  # raises what failed in it
            self._counters.wait(_SUMMED, last, what)
        self._last_of_half[turn] = number, None
        return number, self._halves[turn], job

    def _finish_rounds(self) -> None:
        """Waits until all rounds are over on all ranks."""
        jobs, self._jobs = self._jobs, []
        for _, job in jobs:
            self._averaged.update(job.result())
        if jobs:
            self._counters.wait(_SUMMED, jobs[-1][0].number, "the end of its backward")

    def _average_late(self) -> None:
        """Averages the gradients that came too late on any rank."""
        blocks = list(self._places)
        units = {param.unit for param in self._late}
        late = torch.tensor([block in units for block in blocks], dtype=torch.uint8)
        for place in self._agreed(late).nonzero().flatten().tolist():
            params = self._params_of(blocks[place])
            self._begin(
                blocks[place], params, {}, {param: self._late.pop(param) for param in params if param in self._late}
            )
        self._finish_rounds()

    def _agreed(self, mine: torch.Tensor) -> torch.Tensor:
        """The maximum of `mine` over all ranks. Also checks that nodes agree. A collective."""
        if not self._halves:
            return mine
        number, half, _ = self._next_round("room for what came late")
        said = [half.tensor(rank * self._half_bytes, len(mine)) for rank in range(self._node.size)]
        said[self._node.rank].copy_(mine)
        self._counters.come(_ARRIVED, number, "the end of its backward")
        agreed = torch.cat([torch.stack(said).amax(0), self._common.seen()])
        self._node.reduce_across(agreed, "what came late", largest=True)
        self._counters.post(_SUMMED, number)
        self._common.check_nodes(agreed[len(mine) :])
        return agreed[: len(mine)]

    def _show(self, homes: NodeGradients) -> None:
        """Makes averages the homes' gradients. They contain what this rank wrote to its gradients before."""
        params = [param for param in homes.offsets if param in self._averaged]
        if not params:
            return
        homes.view.forget()
        homes.arena.forget()
        for param in params:
            dtype = self.dtype(param)
            gradient = param.home.grad
            if gradient is not None and homes.has_lent(param, gradient):
                torch.autograd.graph.increment_version(gradient)
                continue
            if dtype != param.home.grad_dtype:
                param.home.grad_dtype = dtype
            param.home.grad = homes.lend(param, dtype)

    def _params_of(self, block: Block) -> list[ManagedParam]:
        """The parameters of a block that have memory for gradients. They are the same on all ranks."""
        return [param for param in block.params if param in self._homes]


def _uneven(param: ManagedParam, where: str) -> StateError:
    return StateError(
        f"parameter {param.name!r} has a gradient already on {where}: set gradients to None, or accumulate, on all"
        " ranks or on none"
    )


def _there_is(param: ManagedParam) -> torch.Tensor:
    """The elements of the gradient that the home has."""
    gradient: Any = param.home.grad
    return elements_of(gradient.detach(), param, gradient.dtype)


def _refuse_hooks(block: Block) -> None:
    """Raises StateError for a hook that wants to see gradients before they are averaged."""
    for param in block.params:
        if param.home._backward_hooks:
            raise StateError(
                f"parameter {param.name!r} has a hook that sees gradients before they are averaged (register_hook);"
                " with several ranks use register_post_accumulate_grad_hook, which sees the average"
            )
