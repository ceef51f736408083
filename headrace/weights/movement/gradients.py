"""How do the gradients of one process reach their homes? Block by block during backward, while compute goes on.

Where the home has no gradient yet, the copy goes straight into the memory that becomes `home.grad`. Otherwise (a second
micro-batch, another dtype, a gradient that rests on disk) it goes into pinned staging memory, from which the host lane
adds, casts or copies.
"""

import mmap
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from headrace.errors import StateError
from headrace.memory.arena import KERNEL_ALIGNMENT_BYTES
from headrace.memory.disk import Request
from headrace.memory.ledger import Ledger, Tier
from headrace.runtime.autograd import grad_of, without_overrides
from headrace.runtime.holders import gradient_is_shared
from headrace.runtime.lanes import Copy, Event, Lane, Lanes
from headrace.runtime.pending import Unit
from headrace.runtime.threads import wait_asleep
from headrace.weights.meter import Meter
from headrace.weights.model.accumulation import (
    accumulate,
    accumulate_as_autograd,
    is_accumulated_itself,
    late_hooks,
)
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.movement.block import Block, block_of
from headrace.weights.movement.completeness import Completeness, tell_of_failure, tell_watchers
from headrace.weights.movement.flow import PURPOSE, GradientFlow, Leaving, Wanted
from headrace.weights.movement.host_gradients import HostGradient, laid_out
from headrace.weights.movement.staging import Additions, Remainder, Staged, Staging, add_up, remainders_of
from headrace.weights.rest.tiers import GradientMemory, Tiers

# Gradients of a block are sent in pieces of about this size: large enough for the link's full speed, small enough that
# little is left to send when backward ends.
_SEND_BYTES = 4 * 2**20


class Gradients(GradientFlow):
    """The gradient flow of one process: each home gets its leaf's gradient, added to the one that it had."""

    def __init__(
        self, lanes: Lanes, ledger: Ledger, meter: Meter, tiers: Tiers, grad_dtype: torch.dtype | None
    ) -> None:
        super().__init__(lanes, ledger, meter, tiers, grad_dtype)
        self._memory: dict[ManagedParam, HostGradient] = {}
        self._staging = Staging(lanes.device, ledger, tiers.most_staged_bytes)
        # Gradients that are complete and not submitted: parameter, pieces, and their rows where they are those of some.
        self._ready: list[tuple[ManagedParam, Sequence[torch.Tensor], torch.Tensor | None]] = []
        self._ready_bytes = 0
        self._sending: list[Copy] = []  # copies being submitted: kept, should Ctrl-C interrupt that
        self._last_sent: Event | None = None  # the end of the last copy, if the host has not waited for it
        self._blocks_passed = 0  # how many blocks backward has passed so far
        # Tensors on the host that gradients are copied to, and that homes get at the end of this backward.
        self._targets: dict[ManagedParam, torch.Tensor] = {}
        self._writes: list[Request] = []  # writes to disk under way; the host lane alone uses the list
        self._completeness = Completeness()
        # Homes whose earlier gradient is added to on the host lane, and whether others refer to that gradient.
        self._added: dict[ManagedParam, bool] = {}
        self._replaced: set[ManagedParam] = set()  # homes whose earlier gradient was added on the device (`continued`)
        self._announced: set[ManagedParam] = set()  # parameters that watchers were told are complete

    def _lacking(self, block: Block) -> list[ManagedParam]:
        """Also checks whether hooks watch gradients, and makes memory ready for the next ones: new memory, if a user
        keeps the last ones. While an update reads the last ones, this has to wait: the update frees them in time.
        """
        missing: list[ManagedParam] = []
        being_updated = bool(block.updates) and block.being_updated
        for param in block.params:
            home = param.home
            if param.node_is_watched or home._backward_hooks:  # `gradient_is_watched`, without a call
                param.look_for_watchers()
            memory = self._memory.get(param)
            if memory is None:
                if home.requires_grad:
                    missing.append(param)
            elif memory.next is None and (
                (home.grad is None and not being_updated) or param.node_is_watched or home._backward_hooks
            ):
                memory.make_next()
        return missing

    def _make(self, wanted: list[Wanted]) -> None:
        self._tiers.check_gradients(sum(offsets[-1] for _, _, offsets in wanted))
        short_bytes, shared = self._tiers.short_staging_bytes, self.ledger.share is not None
        least_bytes = 2 * (short_bytes + mmap.PAGESIZE) if shared and short_bytes is not None else 0  # of staging
        for block, params, offsets in wanted:
            memory = self._tiers.gradient_memory(block.name, offsets[-1], missing_bytes=least_bytes)
            make = partial(_more_memory, self._tiers, self._staging, block.name)
            for param, offset in zip(params, offsets, strict=False):
                self._memory[param] = HostGradient(param, self.dtype(param), memory, offset, make)
            largest_bytes = max(offsets[-1], block.nbytes)
            self._staging.grow(min(largest_bytes, _SEND_BYTES) if block.row_bytes else largest_bytes)
        if short_bytes is not None and not self.ledger.has_room(self._staging.missing_bytes):
            self._staging.limit(short_bytes)
            self._tiers.make_room(self._staging.missing_bytes)
        if short_bytes is not None and shared and self.ledger.fits(self._staging.missing_bytes):
            self._staging.make()  # another model may take the room before this one's backward

    def add_on_host(self, param: ManagedParam, gradient: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Takes a gradient that is in host memory already; the caller's thread adds it at once."""
        if gradient.layout != torch.strided:
            self.take(param, gradient)
            return
        self._submit_ready()
        self._staging.wait()
        target, adds, _ = self._destination(param)
        disk = self._memory[param].disk
        rest = [] if rows is None else remainders_of(target, rows, disk, adds=adds, large=_has_experts(param))
        add_up([*rest, Staged(gradient, gradient, target, adds, disk, rows)], self._writes)

    def watched(self, blocks: Iterable[Block]) -> str | None:
        """The name of a parameter with a hook that is to see each gradient; None: there is none."""
        for param in (param for block in blocks for param in block.params if param.home.requires_grad):
            param.look_for_watchers()
            if param.gradient_is_watched or late_hooks(param.home):
                return param.name
        return None

    def continued(self, param: ManagedParam) -> torch.Tensor | None:
        """The gradient that the home has already, if the caller may add to a copy of it on the device. It then gives
        the sum to `take`, after `replaces`. None: there is no such gradient.
        """
        there = param.home.grad
        if there is None or not self._is_added_in_place(param) or param in self._targets:
            return None
        param.wait_for_updates()
        return there

    def replaces(self, param: ManagedParam) -> None:
        """Notes that the gradient which `take` gets next contains the present one (see `continued`)."""
        self._replaced.add(param)

    def take(self, param: ManagedParam, *gradients: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        if param not in self._memory:  # a forward within a backward used it
            self.prepare([block_of(param)])
        self._announced.discard(param)  # it was not complete after all
        self._ready.append((param, gradients, rows))
        for gradient in gradients:
            if gradient.layout == torch.strided:
                self._ready_bytes += gradient.nbytes
        if param.unit is not None and param.unit.watchers:
            complete = self._completeness.complete(param, param.unit)
            if complete:
                self._announce(param.unit, complete)
        if self._ready_bytes >= _SEND_BYTES:
            self._submit_ready()

    def _announce(self, unit: Unit, params: list[ManagedParam]) -> None:
        """Called when all gradients of a unit are complete: its watchers may update its parameters at once."""
        if any(param.gradient_is_watched or late_hooks(param.home) for param in params):
            return  # hooks are to see gradients before anyone uses them
        if any(param.leaf_may_be_written for param in params):
            return  # the model may have written to a leaf: the home gets that first
        if any(is_accumulated_itself(param.home) for param in params):
            return  # autograd adds to these homes itself
        self._submit_ready()
        if any(self._added.get(param) for param in params):
            return  # others refer to the gradient, and may write it before the step
        sent, additions = self._last_sent, self._staging.under_way()
        targets = {param: self._targets.get(param, param.home.grad) for param in params}
        gradients = {param.home: target for param, target in targets.items() if target is not None}

        def arrived() -> None:
            if sent is not None:
                wait_asleep(sent)
            for addition in additions:
                addition.synchronize()

        self._announced.update(params)
        for watcher in list(unit.watchers):
            begun = {id(parameter) for parameter in watcher.complete(unit, gradients, arrived)}
            for param in params:
                if id(param.home) in begun:
                    param.changed_untraced()
                    self._completeness.taken(unit)

    def leave_block(self) -> None:
        self._submit_ready()
        while self._leaving and self._leaving[0].number < self._blocks_passed:
            self._release_oldest()
        self._blocks_passed += 1

    def deliver(self, in_hooks: Callable[[], None]) -> None:
        self._submit_ready()
        self._wait_for_sent()
        arrived, added, announced = self._targets, self._added, self._announced
        self._forget()
        params = list(arrived | added)
        hooked: dict[ManagedParam, None] = {}
        seen: dict[ManagedParam, list[torch.Tensor]] = {}
        for param in params:
            home = param.home
            if param.node_is_watched or home._backward_hooks:  # `gradient_is_watched`, without a call
                hooked[param] = None
                if param in arrived:
                    seen[param] = [arrived.pop(param)]
            elif home._post_accumulate_grad_hooks:
                hooked[param] = None
        with without_overrides():  # updates of these homes may be under way
            for param, gradient in arrived.items():
                home = param.home
                if home.grad is None and home.grad_dtype == gradient.dtype:
                    grad_of.__set__(home, gradient)
                else:
                    accumulate(home, gradient)
            self._completeness.end(completed=True)
            tell_watchers([param for param in params if param not in hooked], announced)
        try:
            accumulate_as_autograd([(param.home, gradient) for param, gradient in seen.items()], in_hooks)
            for param in hooked:
                for hook in () if param in seen else late_hooks(param.home):
                    hook(param.home)
        except BaseException:
            tell_of_failure(announced)
            raise
        with without_overrides():
            tell_watchers(hooked, announced)  # after hooks, which may change gradients

    def abandon(self) -> None:
        tell_of_failure(self._announced)
        self._ready.clear()
        self._ready_bytes = 0
        if self._sending:  # Ctrl-C came before the copy was noted: an empty copy ends after it
            self.lanes.copy(Lane.OFFLOAD, (), self.lanes.mark()).done.synchronize()
            self._sending = []
        self._wait_for_sent()
        self._forget()
        self._completeness.end(completed=False)
        super().abandon()

    def close(self) -> None:
        """There are no threads to end."""

    def _wait_for_sent(self) -> None:
        """The host waits for every copy (on one lane, the last one ends last), and for all additions."""
        if self._last_sent is not None:
            self._last_sent.synchronize()
            self._last_sent = None
        self._staging.wait()

    def _forget(self) -> None:
        """Called when backward is over: forgets what it noted, once compute has waited for what left."""
        while self._leaving:
            self._release_oldest()
        self._targets, self._added, self._replaced, self._announced = {}, {}, set(), set()

    def _submit_ready(self) -> None:
        """Submits copies of the complete gradients to the host, in several transfers where staging memory is short."""
        direct: list[Copy] = []
        staged: list[Staged | Remainder] = []
        self.ledger.add(Tier.DEVICE, PURPOSE, self._ready_bytes)
        self._staging.coming_bytes = self._ready_bytes + KERNEL_ALIGNMENT_BYTES * len(self._ready)
        ready, self._ready, self._ready_bytes = self._ready, [], 0
        what = ready[0][0].name if ready else ""
        for param, gradients, rows in ready:
            gradient, memory = gradients[0], self._memory[param]
            if gradient.layout is not torch.strided:
                if param in self._targets:  # a dense gradient, whose copy must have arrived
                    self._send(direct, staged, what)
                    direct, staged = [], []
                    self._wait_for_sent()
                self._take_sparse(param, gradient)
                continue
            # The usual case, as `_destination` has it, without calls.
            if param.home.grad is None and memory.next is not None and param not in self._targets:
                self._targets[param] = target = memory.next
                memory.next, adds, is_new = None, False, True
            else:
                target, adds, is_new = self._destination(param)
            disk = memory.disk
            straight = is_new and disk is None and gradient.dtype is memory.dtype
            if straight and rows is None:
                same = gradient.stride() == target.stride()
                direct.append((target, gradient if same else laid_out(gradient, target.stride(), gradient.dtype)))
                continue
            if rows is not None:
                staged += remainders_of(target, rows, disk, adds=adds, large=_has_experts(param))
                if straight and _has_experts(param):
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
        """Submits one transfer, and the job of the host lane that then adds up what it brings to staging memory."""
        copies = direct + [(one.piece, one.source) for one in staged if isinstance(one, Staged)]
        if not copies:
            return
        self._sending = copies
        transfer = self.lanes.copy(Lane.OFFLOAD, copies, self.lanes.mark())
        self.meter.offloaded(transfer, what)
        self._leaving.append(Leaving(self._blocks_passed, transfer, {}))
        self._last_sent = transfer.done
        self._sending = []
        if staged:
            self._staging.sent(Additions(self.lanes.run(lambda: add_up(staged, self._writes), transfer.done)))

    def _destination(self, param: ManagedParam) -> tuple[torch.Tensor, bool, bool]:
        """The tensor that a gradient goes to, whether it is added there, and whether that tensor is a new one."""
        if param in self._targets:
            return self._targets[param], True, False
        if param.home.grad is None or not self._is_added_in_place(param):
            self._targets[param] = target = self._memory[param].fresh()
            return target, False, True
        if param not in self._added:
            param.wait_for_updates()  # they read the gradient; a backward that needs no weight has not waited
            self._added[param] = gradient_is_shared(param.home)
        adds = param not in self._replaced
        self._replaced.discard(param)  # later ones are added
        return param.home.grad, adds, False

    def _is_added_in_place(self, param: ManagedParam) -> bool:
        """Whether a gradient is added to the present `home.grad` on the host lane, before backward ends."""
        if param in self._added:
            return True
        there = param.home.grad
        if there is None or there.layout != torch.strided or param.gradient_is_watched:
            return False
        return not is_accumulated_itself(param.home)  # autograd would add to it at the same time

    def _take_sparse(self, param: ManagedParam, gradient: torch.Tensor) -> None:
        """Copies a sparse gradient (nn.Embedding(sparse=True)) while the host waits, as its size is known last."""
        on_host = gradient.to("cpu")
        self._targets[param] = self._targets[param] + on_host if param in self._targets else on_host


def _has_experts(param: ManagedParam) -> bool:
    """Whether the rows of the parameter are experts."""
    return block_of(param).experts is not None


def refuse_graph(param: ManagedParam, gradient: torch.Tensor) -> None:
    """Raises StateError for a gradient with a graph, which it would lose on its way to the host."""
    if gradient.requires_grad:
        raise StateError(
            f"backward(create_graph=True) reached parameter {param.name!r}: a gradient that leaves the device loses"
            " its graph; use torch.autograd.grad(..., create_graph=True) for the inner derivative, then backward()"
        )


def _more_memory(tiers: Tiers, staging: Staging, name: str, nbytes: int) -> GradientMemory:
    """Makes more memory for a gradient. A function, as a bound method would keep the `Gradients` alive."""
    return tiers.gradient_memory(name, nbytes, missing_bytes=staging.missing_bytes)


def sum_of_rows(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All rows that any part has, and the sum of their gradients, added in the order of the parts. Empties `parts`.

    The sum is as if each part were a whole gradient, zero in other rows: adding such a zero turns -0 into +0. It comes
    in pieces, in the order of the rows.
    """
    if len(parts) == 1:
        own, gradient = parts.pop()
        return own, [gradient]
    named = torch.cat([rows for rows, _ in parts])
    rows, counts = named.unique(return_counts=True)
    if len(rows) == len(named):
        parts.reverse()
        return named, [parts.pop()[1].add(0.0) for _ in range(len(parts))]  # takes only one part's bytes more
    first = parts[0][1]
    total = first.new_zeros(len(rows), *first.shape[1:])
    for number, (own, gradient) in enumerate(parts):
        where = torch.searchsorted(rows, own).to(total.device)
        total.index_copy_(0, where, total.index_select(0, where).add_(gradient) if number else gradient)
    absent = (counts < len(parts)).nonzero().squeeze(1).to(total.device)
    parts.clear()
    return rows, [total.index_copy_(0, absent, total.index_select(0, absent).add_(0.0))]
