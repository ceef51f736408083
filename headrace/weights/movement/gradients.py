"""How do the gradients of one process reach their homes? Block by block during backward, beside what computes.

Where the home has no gradient yet, the copy goes straight into the memory that becomes `home.grad`. Otherwise (a second
micro-batch, another dtype, a gradient that rests on disk) it goes into pinned staging memory, from which the host lane
adds, casts or copies.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from headrace.errors import StateError
from headrace.memory.disk import Request
from headrace.memory.ledger import Ledger, Tier
from headrace.runtime.autograd import grad_of, without_overrides
from headrace.runtime.holders import gradient_is_shared
from headrace.runtime.lanes import Copy, Event, Lane, Lanes
from headrace.runtime.pending import Unit
from headrace.weights.meter import Meter
from headrace.weights.model.accumulation import (
    accumulate,
    accumulate_as_autograd,
    is_accumulated_itself,
    late_hooks,
)
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.movement.arrivals import Arrivals, tell_of_failure, tell_watchers
from headrace.weights.movement.block import Block
from headrace.weights.movement.flow import PURPOSE, GradientFlow, Leaving, Wanted
from headrace.weights.movement.host_gradients import HostGradient, laid_out
from headrace.weights.movement.staging import Additions, Remainder, Staged, Staging, add_up, remainders_of
from headrace.weights.rest.placement import GradientMemory, HostTiers

__all__ = ["Gradients", "refuse_graph", "sum_of_rows"]

_SEND_BYTES = 4 * 2**20  # gradients of a block are sent in pieces of about this size: large enough for the link's full
# speed, small enough that little is left to send when backward ends


class Gradients(GradientFlow):
    """Gradients of one process: each home has what its leaf received, added to what it had before."""

    def __init__(
        self, lanes: Lanes, ledger: Ledger, meter: Meter, tiers: HostTiers, grad_dtype: torch.dtype | None
    ) -> None:
        super().__init__(lanes, ledger, meter, tiers, grad_dtype)
        self._memory: dict[ManagedParam, HostGradient] = {}
        self._staging = Staging(lanes.device, ledger, tiers.most_staged_bytes)
        # Complete on the device, not submitted yet; of a table, the gradient may be that of some rows.
        self._ready: list[tuple[ManagedParam, Sequence[torch.Tensor], torch.Tensor | None]] = []
        self._ready_bytes = 0
        self._sending: list[Copy] = []  # being submitted: alive even if that is interrupted
        self._last_sent: Event | None = None  # of the last copy; compute may have waited for it, the host has not
        self._blocks_left = 0  # how many blocks backward has left behind
        self._arriving: dict[
            ManagedParam, torch.Tensor
        ] = {}  # what is accumulated into homes at the end of this backward
        self._writes: list[Request] = []  # to disk; the host lane's own
        self._arrivals = Arrivals()
        # Homes whose gradient was there before and is added to on the host lane, and whether others have it, too.
        self._added: dict[ManagedParam, bool] = {}
        self._replaced: set[ManagedParam] = set()  # of those: what comes has been added on the device
        self._announced: set[ManagedParam] = set()  # complete in this backward, as watchers were told

    def _lacking(self, block: Block) -> list[ManagedParam]:
        """Also looks who watches gradients; and where the next gradients go, other memory is made ready if somebody
        keeps the last ones. Not while an update reads those: it will be done with them in time.
        """
        missing: list[ManagedParam] = []
        being_updated = bool(block.updates) and block.being_updated
        for slot in block.slots:
            home = slot.home
            if slot.node_is_watched or home._backward_hooks:
                slot.look_for_watchers()
            memory = self._memory.get(slot)
            if memory is None:
                if home.requires_grad:
                    missing.append(slot)
            elif memory.next is None and (
                (home.grad is None and not being_updated) or slot.node_is_watched or home._backward_hooks
            ):
                memory.renew()
        return missing

    def _make(self, wanted: list[Wanted]) -> None:
        self._tiers.check_gradients(sum(offsets[-1] for _, _, offsets in wanted))
        for block, slots, offsets in wanted:
            memory = self._tiers.gradient_memory(block.name, offsets[-1])
            make = partial(_more_memory, self._tiers, self._staging, block.name)
            for slot, offset in zip(slots, offsets, strict=False):
                self._memory[slot] = HostGradient(slot, self.dtype(slot), memory, offset, make)
            largest_bytes = max(offsets[-1], block.nbytes)
            self._staging.grow(min(largest_bytes, _SEND_BYTES) if block.row_bytes else largest_bytes)
        short_bytes = self._tiers.short_staging_bytes
        if short_bytes is not None and not self.ledger.has_room(self._staging.missing_bytes):
            self._staging.limit(short_bytes)
            self._tiers.make_room(self._staging.missing_bytes)

    def add_on_host(self, slot: ManagedParam, gradient: torch.Tensor, rows: torch.Tensor | None) -> None:
        """As `take`, for a gradient that is in host memory already; the caller's thread adds it at once."""
        if gradient.layout != torch.strided:
            self.take(slot, gradient)
            return
        self._submit_ready()
        self._staging.wait()
        target, adds, _ = self._destination(slot)
        disk = self._memory[slot].disk
        rest = [] if rows is None else remainders_of(target, rows, disk, adds=adds, large=_has_experts(slot))
        add_up([*rest, Staged(gradient, gradient, target, adds, disk, rows)], self._writes)

    def watched(self, blocks: Iterable[Block]) -> str | None:
        """The name of a parameter of which somebody wants to see each gradient; None: of none."""
        for slot in (slot for block in blocks for slot in block.slots if slot.home.requires_grad):
            slot.look_for_watchers()
            if slot.gradient_is_watched or late_hooks(slot.home):
                return slot.name
        return None

    def continued(self, slot: ManagedParam) -> torch.Tensor | None:
        """A copy on the device of the gradient that the home has already. The caller adds to it and gives the sum to
        `take`, which puts it in that gradient's place. None: there is no gradient that could be added to.
        """
        there = slot.home.grad
        if there is None or not self._is_added_in_place(slot) or slot in self._arriving:
            return None
        slot.wait_for_updates()
        self._replaced.add(slot)
        return there.to(self.lanes.device, copy=True)

    def take(self, slot: ManagedParam, *gradients: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        if slot not in self._memory and isinstance(slot.unit, Block):  # of a forward within a backward
            self.prepare([slot.unit])
        self._announced.discard(slot)  # it was not complete
        self._ready.append((slot, gradients, rows))
        for gradient in gradients:
            if gradient.layout == torch.strided:
                self._ready_bytes += gradient.nbytes
        if slot.unit is not None and slot.unit.watchers:
            complete = self._arrivals.complete(slot, slot.unit)
            if complete:
                self._announce(slot.unit, complete)
        if self._ready_bytes >= _SEND_BYTES:
            self._submit_ready()

    def _announce(self, unit: Unit, slots: list[ManagedParam]) -> None:
        """All gradients of a unit are complete: who watches it may update its parameters at once."""
        if any(slot.gradient_is_watched or late_hooks(slot.home) for slot in slots):
            return  # they want to see gradients before anyone uses them
        if any(slot.leaf_may_be_written for slot in slots):
            return  # by the model itself, computed again: that is kept first
        if any(is_accumulated_itself(slot.home) for slot in slots):
            return  # there is more to come
        self._submit_ready()
        if any(self._added.get(slot) for slot in slots):
            return  # others have the gradient, too, and may write it before the step
        sent, additions = self._last_sent, self._staging.under_way()
        targets = {slot: self._arriving.get(slot, slot.home.grad) for slot in slots}
        gradients = {slot.home: target for slot, target in targets.items() if target is not None}

        def arrived() -> None:
            if sent is not None:
                sent.synchronize()
            for addition in additions:
                addition.synchronize()

        self._announced.update(slots)
        for watcher in list(unit.watchers):
            begun = {id(parameter) for parameter in watcher.complete(unit, gradients, arrived)}
            for slot in slots:
                if id(slot.home) in begun:
                    slot.changed_untraced()
                    self._arrivals.taken(unit)

    def leave_block(self) -> None:
        self._submit_ready()
        while self._leaving and self._leaving[0].number < self._blocks_left:
            self._let_go()
        self._blocks_left += 1

    def deliver(self, in_hooks: Callable[[], None] = lambda: None) -> None:
        self._submit_ready()
        self._wait_for_sent()
        arrived, added, announced = self._arriving, self._added, self._announced
        self._forget()
        slots = list(arrived | added)
        hooked: dict[ManagedParam, None] = {}
        seen: dict[ManagedParam, list[torch.Tensor]] = {}
        for slot in slots:
            home = slot.home
            if slot.node_is_watched or home._backward_hooks:
                hooked[slot] = None
                if slot in arrived:
                    seen[slot] = [arrived.pop(slot)]
            elif home._post_accumulate_grad_hooks:
                hooked[slot] = None
        with without_overrides():  # homes may be being updated already
            for slot, gradient in arrived.items():
                home = slot.home
                if home.grad is None and home.grad_dtype == gradient.dtype:
                    grad_of.__set__(home, gradient)
                else:
                    accumulate(home, gradient)
            self._arrivals.end(completed=True)
            tell_watchers([slot for slot in slots if slot not in hooked], announced)
        try:
            accumulate_as_autograd([(slot.home, gradient) for slot, gradient in seen.items()], in_hooks)
            for slot in hooked:
                for hook in () if slot in seen else late_hooks(slot.home):
                    hook(slot.home)
        except BaseException:
            tell_of_failure(announced)
            raise
        with without_overrides():
            tell_watchers(hooked, announced)  # of what hooks have left

    def abandon(self) -> None:
        tell_of_failure(self._announced)
        self._ready.clear()
        self._ready_bytes = 0
        if self._sending:  # Ctrl-C between a copy and its note: whatever was submitted is before an empty copy
            self.lanes.copy(Lane.OFFLOAD, (), self.lanes.mark()).done.synchronize()
            self._sending = []
        self._wait_for_sent()
        self._forget()
        self._arrivals.end(completed=False)
        super().abandon()

    def close(self) -> None:
        """There are no threads to end."""

    def _wait_for_sent(self) -> None:
        """The host waits for every copy: of those on one lane, the last one ends last."""
        if self._last_sent is not None:
            self._last_sent.synchronize()
            self._last_sent = None
        self._staging.wait()

    def _forget(self) -> None:
        """The backward is over: nothing is left of what it noted."""
        while self._leaving:
            self._let_go()
        self._arriving, self._added, self._replaced, self._announced = {}, {}, set(), set()

    def _submit_ready(self) -> None:
        """Copies out the gradients that are complete, in several transfers where staging memory is short."""
        direct: list[Copy] = []
        staged: list[Staged | Remainder] = []
        self.ledger.add(Tier.DEVICE, PURPOSE, self._ready_bytes)
        ready, self._ready, self._ready_bytes = self._ready, [], 0
        what = ready[0][0].name if ready else ""
        for slot, gradients, rows in ready:
            gradient, memory = gradients[0], self._memory[slot]
            if gradient.layout is not torch.strided:
                if slot in self._arriving:  # a dense one, which has to be there
                    self._send(direct, staged, what)
                    direct, staged = [], []
                    self._wait_for_sent()
                self._take_sparse(slot, gradient)
                continue
            if slot.home.grad is None and memory.next is not None and slot not in self._arriving:  # as most come
                self._arriving[slot] = target = memory.next
                memory.next, adds, is_new = None, False, True
            else:
                target, adds, is_new = self._destination(slot)
            disk = memory.disk
            straight = is_new and disk is None and gradient.dtype is memory.dtype
            if straight and rows is None:
                same = gradient.stride() == target.stride()
                direct.append((target, gradient if same else laid_out(gradient, target.stride(), gradient.dtype)))
                continue
            if rows is not None:
                staged += remainders_of(target, rows, disk, adds=adds, large=_has_experts(slot))
                if straight and _has_experts(slot):
                    each = (one for piece in gradients for one in piece.contiguous())
                    direct += [(target[row], one) for row, one in zip(rows.tolist(), each, strict=True)]
                    continue
            for source, part, of in self._staging.parts(gradients, target, rows):
                page = None if disk is None or of is not None else disk.offset_of(part)
                if not self._staging.fits(source.nbytes, page):
                    self._send(direct, staged, what)
                    direct, staged = [], []
                staged.append(Staged(self._staging.carve(source, page), source, part, adds, disk, of))
        self._send(direct, staged, what)

    def _send(self, direct: list[Copy], staged: list[Staged | Remainder], what: str) -> None:
        """Submits one transfer, and what the host lane does with the gradients in staging memory after it."""
        copies = direct + [(one.piece, one.source) for one in staged if isinstance(one, Staged)]
        if not copies:
            return
        self._sending = copies
        transfer = self.lanes.copy(Lane.OFFLOAD, copies, self.lanes.mark())
        self.meter.offloaded(transfer, what)
        self._leaving.append(Leaving(self._blocks_left, transfer, {}))
        self._last_sent = transfer.done
        self._sending = []
        if staged:
            self._staging.turn(Additions(self.lanes.run(lambda: add_up(staged, self._writes), transfer.done)))

    def _destination(self, slot: ManagedParam) -> tuple[torch.Tensor, bool, bool]:
        """Where a gradient goes, whether it is added to what is there, and whether nothing is there yet."""
        if slot in self._arriving:
            return self._arriving[slot], True, False
        if slot.home.grad is None or not self._is_added_in_place(slot):
            self._arriving[slot] = target = self._memory[slot].fresh()
            return target, False, True
        if slot not in self._added:
            slot.wait_for_updates()  # which read it: this backward may need no weight, and so not have waited
            self._added[slot] = gradient_is_shared(slot.home)
        adds = slot not in self._replaced
        self._replaced.discard(slot)  # what comes later is added to it
        return slot.home.grad, adds, False

    def _is_added_in_place(self, slot: ManagedParam) -> bool:
        """Whether a gradient is added to the `home.grad` that there is, on the host lane, before backward ends."""
        if slot in self._added:
            return True
        there = slot.home.grad
        if there is None or there.layout != torch.strided or slot.gradient_is_watched:
            return False
        return not is_accumulated_itself(slot.home)  # autograd would add to it at the same time

    def _take_sparse(self, slot: ManagedParam, gradient: torch.Tensor) -> None:
        """A sparse gradient (nn.Embedding(sparse=True)) is copied while the host waits: its size comes last."""
        on_host = gradient.to("cpu")
        self._arriving[slot] = self._arriving[slot] + on_host if slot in self._arriving else on_host


def _has_experts(slot: ManagedParam) -> bool:
    """Whether its rows are experts."""
    return isinstance(slot.unit, Block) and slot.unit.experts is not None


def refuse_graph(slot: ManagedParam, gradient: torch.Tensor) -> None:
    """Raises StateError for a gradient that has a graph of its own, which it would lose."""
    if gradient.requires_grad:
        raise StateError(
            f"backward(create_graph=True) reached parameter {slot.name!r}: a gradient that leaves the device loses"
            " its graph; use torch.autograd.grad(..., create_graph=True) for the inner derivative, then backward()"
        )


def _more_memory(tiers: HostTiers, staging: Staging, name: str, nbytes: int) -> GradientMemory:
    """More memory for a gradient. It is no method, as that would tie the memory to the object that has it."""
    return tiers.gradient_memory(name, nbytes, missing_bytes=staging.missing_bytes)


def sum_of_rows(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The rows of any part, and the sum of their gradients on the device, in the order of the parts; these are emptied.

    As if each part were a whole gradient, zero in other rows: where such a zero is added, no -0 is left. The sum comes
    in pieces, of rows in their order.
    """
    if len(parts) == 1:
        own, gradient = parts.pop()
        return own, [gradient]
    named = torch.cat([rows for rows, _ in parts])
    rows, counts = named.unique(return_counts=True)
    if len(rows) == len(named):
        parts.reverse()
        return named, [parts.pop()[1].add(0.0) for _ in range(len(parts))]  # as many bytes as before, and one part's
    first = parts[0][1]
    total = first.new_zeros(len(rows), *first.shape[1:])
    for number, (own, gradient) in enumerate(parts):
        where = torch.searchsorted(rows, own).to(total.device)
        total.index_copy_(0, where, total.index_select(0, where).add_(gradient) if number else gradient)
    absent = (counts < len(parts)).nonzero().squeeze(1).to(total.device)
    parts.clear()
    return rows, [total.index_copy_(0, absent, total.index_select(0, absent).add_(0.0))]
