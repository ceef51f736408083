"""How do gradients leave the device? Block by block during backward, and they are in `home.grad` when it returns.

Where the home has no gradient yet, the copy goes straight into the memory that becomes `home.grad`. Otherwise (a second
micro-batch, another dtype, a gradient that rests on disk) it goes into pinned staging memory, from which the host lane
adds, casts or copies.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from headrace.errors import StateError
from headrace.memory.arena import aligned
from headrace.memory.disk import Request
from headrace.memory.ledger import Ledger, Tier
from headrace.runtime.autograd import backward_task, grad_of, without_overrides, without_transforms
from headrace.runtime.holders import gradient_is_shared
from headrace.runtime.lanes import Copy, Event, Lane, Lanes, Transfer
from headrace.runtime.pending import Unit
from headrace.weights.meter import Meter
from headrace.weights.model.accumulation import (
    accumulate,
    accumulate_as_autograd,
    is_accumulated_itself,
    late_hooks,
)
from headrace.weights.model.slot import Slot
from headrace.weights.movement.arrivals import Arrivals, tell_of_failure, tell_watchers
from headrace.weights.movement.block import Block
from headrace.weights.movement.gradient_memory import Additions, HostGradient, Staging
from headrace.weights.movement.staged import Remainder, Staged, add_up, laid_out_like, rest_of, sum_of_rows
from headrace.weights.rest.placement import GradientMemory, HostTiers

__all__ = ["Gradients", "refuse_graph"]

_PURPOSE = "gradients"
_SEND_BYTES = 4 * 2**20  # gradients of a block are sent in pieces of about this size: large enough for the link's full
# speed, small enough that little is left to send when backward ends


class Gradients:
    """Gradients of all blocks, between the leaf that received them and the home that keeps them."""

    def __init__(
        self, lanes: Lanes, ledger: Ledger, meter: Meter, tiers: HostTiers, grad_dtype: torch.dtype | None
    ) -> None:
        self._lanes = lanes
        self._ledger = ledger
        self._tiers = tiers
        self._meter = meter
        self._grad_dtype = grad_dtype
        self._memory: dict[Slot, HostGradient] = {}
        self._staging = Staging(lanes.device, ledger, tiers.most_staged_bytes)
        # Complete on the device, not submitted yet; of a table, the gradient may be that of some rows.
        self._ready: list[tuple[Slot, Sequence[torch.Tensor], torch.Tensor | None]] = []
        self._ready_bytes = 0
        # Not complete yet, of each backward: a nested one adds up its own.
        self._of_rows: dict[tuple[Slot, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        # Submitted, with the count of blocks before; they hold the device gradients until compute has waited for them.
        self._leaving: deque[tuple[int, Transfer]] = deque()
        self._sending: list[Copy] = []  # being submitted: alive even if that is interrupted
        self._last_sent: Event | None = None  # of the last copy; compute may have waited for it, the host has not
        self._blocks_left = 0  # how many blocks backward has left behind
        self._arriving: dict[Slot, torch.Tensor] = {}  # what is accumulated into homes at the end of this backward
        self._writes: list[Request] = []  # to disk; the host lane's own
        self._arrivals = Arrivals()
        # Homes whose gradient was there before and is added to on the host lane, and whether others have it, too.
        self._added: dict[Slot, bool] = {}
        self._replaced: set[Slot] = set()  # of those: what comes has been added on the device
        self._announced: set[Slot] = set()  # complete in this backward, as watchers were told

    def prepare(self, blocks: Iterable[Block]) -> None:
        """Makes memory for gradients of trainable parameters that have none. Not in backward: pinning takes time.

        And looks who watches gradients.
        """
        wanted: list[tuple[Block, list[Slot], list[int]]] = []
        # Memory of ours, in whatever transform the model is called; and a look at a gradient waits for nobody.
        with without_transforms(), without_overrides():
            for block in blocks:
                slots = self._renew_memory(block)
                if slots:
                    sizes = [aligned(slot.home.numel() * self.dtype(slot).itemsize) for slot in slots]
                    wanted.append((block, slots, sizes))
            self._tiers.check_gradients(sum(sum(sizes) for _, _, sizes in wanted))
            self._make(wanted)

    def _renew_memory(self, block: Block) -> list[Slot]:
        """Where gradients of the block come next lies beside what was there, if somebody has that. Those without any.

        Memory that an update still reads is free in time.
        """
        missing: list[Slot] = []
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

    def _make(self, wanted: "list[tuple[Block, list[Slot], list[int]]]") -> None:
        for block, slots, sizes in wanted:
            memory = self._tiers.gradient_memory(block.name, sum(sizes))
            make = partial(_more_memory, self._tiers, self._staging, block.name)
            for index, slot in enumerate(slots):
                self._memory[slot] = HostGradient(slot, self.dtype(slot), memory, sum(sizes[:index]), make)
            largest_bytes = max(sum(sizes), block.nbytes)
            self._staging.grow(min(largest_bytes, _SEND_BYTES) if block.row_bytes else largest_bytes)
        short_bytes = self._tiers.short_staging_bytes
        if short_bytes is not None and not self._ledger.has_room(self._staging.missing_bytes):
            self._staging.limit(short_bytes)
            self._tiers.make_room(self._staging.missing_bytes)

    def add_on_host(self, slot: Slot, gradient: torch.Tensor, rows: torch.Tensor | None) -> None:
        """As `take`, at once, of what is in host memory already."""
        self._submit_ready()
        self._staging.wait()
        target, adds = self._destination(slot)
        disk = self._memory[slot].disk
        rest = [] if rows is None else rest_of(target, rows, disk, adds=adds, large=_has_experts(slot))
        add_up([*rest, Staged(gradient, gradient, target, adds, disk, rows)], self._writes)

    def watched(self, blocks: Iterable[Block]) -> str | None:
        """The name of a parameter of which somebody wants to see each gradient; None: of none."""
        for slot in (slot for block in blocks for slot in block.slots if slot.home.requires_grad):
            slot.look_for_watchers()
            if slot.gradient_is_watched or late_hooks(slot.home):
                return slot.name
        return None

    def take_rows(self, slot: Slot, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """A gradient of some rows of a table, or of some experts, which are named once each; others may follow."""
        refuse_graph(slot, gradient)
        self._of_rows.setdefault((slot, backward_task()), []).append((rows, gradient))

    def add_up_rows(self, slot: Slot) -> None:
        """No others follow: they are one gradient, as if they had been added up as tables."""
        parts = self.rows_of(slot)
        if parts:
            rows, gradients = sum_of_rows(parts)
            self.take(slot, *gradients, rows=rows)

    def rows_of(self, slot: Slot) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What `take_rows` was given, for who adds it up itself."""
        return self._of_rows.pop((slot, backward_task()), [])

    def continued(self, slot: Slot) -> torch.Tensor | None:
        """A copy on the device of the gradient that the home has already, to which `take` is given the sum: that takes
        its place. None: there is none that could be added to.
        """
        there = slot.home.grad
        if there is None or not self._is_added_in_place(slot) or slot in self._arriving:
            return None
        slot.wait_for_updates()
        self._replaced.add(slot)
        return there.to(self._lanes.device, copy=True)

    def take(self, slot: Slot, *gradients: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """A complete gradient on the device goes to its home with its block's.

        With `rows`, that of some rows of a table, or of some experts, in pieces; without, that of all, in one.
        """
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

    def _announce(self, unit: Unit, slots: list[Slot]) -> None:
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
        """Backward goes on to another block. Compute waits for what the block before this one sent, and that goes.

        So the device holds the gradients of two blocks at most: those that leave, and those that are being computed.
        """
        self._submit_ready()
        while self._leaving and self._leaving[0][0] < self._blocks_left:
            self._let_go()
        self._blocks_left += 1

    def deliver(self, in_hooks: Callable[[], None] = lambda: None) -> None:
        """The end of backward: every gradient is in its home when this returns. Then the homes' own hooks fire.

        Where that takes another backward, `in_hooks` is called in it before any of them.
        """
        self._submit_ready()
        self._wait_for_sent()
        arrived, added, announced = self._arriving, self._added, self._announced
        self._forget()
        slots = list(arrived | added)
        hooked: dict[Slot, None] = {}
        seen: dict[Slot, list[torch.Tensor]] = {}
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
        """Backward raised: what it computed is dropped, once nothing is in flight any more."""
        tell_of_failure(self._announced)
        self._ready.clear()
        self._of_rows.clear()
        self._ready_bytes = 0
        if self._sending:  # Ctrl-C between a copy and its note: whatever was submitted is before an empty copy
            self._lanes.copy(Lane.OFFLOAD, (), self._lanes.mark()).done.synchronize()
            self._sending = []
        self._wait_for_sent()
        self._forget()
        self._arrivals.end(completed=False)
        self._ledger.add(Tier.DEVICE, _PURPOSE, -self._ledger.held_bytes(Tier.DEVICE, _PURPOSE))

    def close(self) -> None:
        """Nothing is to be ended."""

    def _wait_for_sent(self) -> None:
        """The host waits for every copy: of those on one lane, the last one ends last."""
        if self._last_sent is not None:
            self._last_sent.synchronize()
            self._last_sent = None
        self._staging.wait()

    def _forget(self) -> None:
        while self._leaving:
            self._let_go()
        self._arriving, self._added, self._replaced, self._announced = {}, {}, set(), set()

    def _let_go(self) -> None:
        _, transfer = self._leaving.popleft()
        self._lanes.wait(transfer.done)
        self._ledger.add(Tier.DEVICE, _PURPOSE, -transfer.nbytes)

    def _submit_ready(self) -> None:
        """Copies out the gradients that are complete, in several transfers where staging memory is short."""
        direct: list[Copy] = []
        staged: list[Staged | Remainder] = []
        self._ledger.add(Tier.DEVICE, _PURPOSE, self._ready_bytes)
        ready, self._ready, self._ready_bytes = self._ready, [], 0
        what = ready[0][0].name if ready else ""
        arriving = self._arriving
        for slot, gradients, rows in ready:
            gradient = gradients[0]
            memory = self._memory[slot]
            if (
                slot.home.grad is None
                and rows is None
                and slot not in arriving
                and gradient.dtype is memory.dtype
                and gradient.layout is torch.strided
                and memory.disk is None
            ):  # as most come: into memory that `prepare` has made
                target, memory.next = memory.next if memory.next is not None else memory.fresh(), None
                arriving[slot] = target
                same = gradient.stride() == target.stride()
                direct.append((target, gradient if same else laid_out_like(gradient, target)))
            elif gradient.layout != torch.strided:
                if slot in self._arriving:  # a dense one, which has to be there
                    self._send(direct, staged, what)
                    direct, staged = [], []
                    self._wait_for_sent()
                self._take_sparse(slot, gradient)
            elif (rows is None or _has_experts(slot)) and self._goes_straight(slot, gradient):
                target = memory.fresh()
                arriving[slot] = target
                if rows is None:
                    direct.append((target, laid_out_like(gradient, target)))
                else:
                    each = (one for piece in gradients for one in piece.contiguous())
                    direct += [(target[row], one) for row, one in zip(rows.tolist(), each, strict=True)]
                    staged += rest_of(target, rows, None, adds=False, large=True)
            else:
                target, adds = self._destination(slot)
                disk = memory.disk
                if rows is not None:
                    staged += rest_of(target, rows, disk, adds=adds, large=_has_experts(slot))
                for source, part, of in self._parts(gradients, target, rows):
                    page = None if disk is None or of is not None else disk.offset_of(part)
                    if not self._staging.fits(source.nbytes, page):
                        self._send(direct, staged, what)
                        direct, staged = [], []
                    staged.append(Staged(self._staging.carve(source, page), source, part, adds, disk, of))
        self._send(direct, staged, what)

    def _parts(
        self, gradients: Sequence[torch.Tensor], target: torch.Tensor, rows: torch.Tensor | None
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """What fits into staging memory at once, where it goes, and which rows of that it is."""
        if rows is None:
            dense = self._staging.cut(laid_out_like(gradients[0], target), target)
            return ((source, part, None) for source, part in dense)
        count = self._staging.rows_at_once(gradients[0])
        sources = [source for gradient in gradients for source in gradient.contiguous().split(count)]
        of_each = rows.split([len(source) for source in sources])
        return ((source, target, of) for source, of in zip(sources, of_each, strict=True))

    def _send(self, direct: list[Copy], staged: list[Staged | Remainder], what: str) -> None:
        copies = direct + [(one.piece, one.source) for one in staged if isinstance(one, Staged)]
        if not copies:
            return
        self._sending = copies
        transfer = self._lanes.copy(Lane.OFFLOAD, copies, self._lanes.mark())
        self._meter.offloaded(transfer, what)
        self._leaving.append((self._blocks_left, transfer))
        self._last_sent = transfer.done
        self._sending = []
        if staged:
            self._staging.turn(Additions(self._lanes.run(lambda: add_up(staged, self._writes), transfer.done)))

    def _goes_straight(self, slot: Slot, gradient: torch.Tensor) -> bool:
        """Whether a copy into fresh memory is all that the home needs."""
        if slot in self._arriving or self._is_added_in_place(slot):
            return False
        memory = self._memory[slot]
        memory.renew()
        return gradient.dtype == memory.dtype and memory.disk is None

    def _destination(self, slot: Slot) -> tuple[torch.Tensor, bool]:
        """Where a staged gradient goes, and whether it is added to what is there."""
        if slot in self._arriving:
            return self._arriving[slot], True
        if slot.home.grad is not None and self._is_added_in_place(slot):
            if slot not in self._added:
                slot.wait_for_updates()  # which read it: this backward may need no weight, and so not have waited
                self._added[slot] = gradient_is_shared(slot.home)
            adds = slot not in self._replaced
            self._replaced.discard(slot)  # what comes later is added to it
            return slot.home.grad, adds
        self._arriving[slot] = self._memory[slot].fresh()
        return self._arriving[slot], False

    def _is_added_in_place(self, slot: Slot) -> bool:
        """Whether a gradient is added to the `home.grad` that there is, on the host lane, before backward ends."""
        if slot in self._added:
            return True
        there = slot.home.grad
        if there is None or there.layout != torch.strided or slot.gradient_is_watched:
            return False
        return not is_accumulated_itself(slot.home)  # autograd would add to it at the same time

    def _take_sparse(self, slot: Slot, gradient: torch.Tensor) -> None:
        """A sparse gradient (nn.Embedding(sparse=True)) is copied while the host waits: its size comes last."""
        on_host = gradient.to("cpu")
        self._arriving[slot] = self._arriving[slot] + on_host if slot in self._arriving else on_host

    def dtype(self, slot: Slot) -> torch.dtype:
        """Of the gradient in the home."""
        return slot.dtype if self._grad_dtype is None else self._grad_dtype


def _has_experts(slot: Slot) -> bool:
    """Whether its rows are experts."""
    return isinstance(slot.unit, Block) and slot.unit.experts is not None


def refuse_graph(slot: Slot, gradient: torch.Tensor) -> None:
    if gradient.requires_grad:
        raise StateError(
            f"backward(create_graph=True) reached parameter {slot.name!r}: a gradient that leaves the device loses"
            " its graph; use torch.autograd.grad(..., create_graph=True) for the inner derivative, then backward()"
        )


def _more_memory(tiers: HostTiers, staging: Staging, name: str, nbytes: int) -> GradientMemory:
    """For a gradient beside others; a function, as a method would tie the memory to what has it."""
    return tiers.gradient_memory(name, nbytes, missing_bytes=staging.missing_bytes)
