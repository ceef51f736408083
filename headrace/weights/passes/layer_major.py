"""How do several micro-batches go through a model together? Each block computes all of them before the next one comes.

So weights cross each link once for all of them, and a block's gradient leaves once. Each micro-batch is a fiber, which
stops where it calls a block; backward goes through the segments of all graphs in the reverse of that order. See
docs/design/layer_major.md.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from headrace.errors import StateError
from headrace.runtime.fibers import Fiber
from headrace.weights.model.home import Home, Leaf
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.movement.batch_sums import BatchSums, bytes_apart
from headrace.weights.movement.block import Block
from headrace.weights.movement.gradients import Gradients
from headrace.weights.passes.call import Call, Site
from headrace.weights.passes.engine import Engine
from headrace.weights.passes.graph_segments import CannotCutError, GraphSegments
from headrace.weights.passes.handles import unpack_of_checkpoint
from headrace.weights.passes.module_states import ModuleStates


class _Member:
    """One micro-batch. `at`: the site at whose call it waits for its turn. `calls`: its calls under way."""

    def __init__(
        self,
        number: int,
        compute: Callable[[], torch.Tensor],
        device: torch.device,
        on_use: Callable[[Any], None] | None,
    ) -> None:
        self.number = number
        self.segments = GraphSegments(on_use)
        self.fiber = Fiber(partial(self._compute, compute), number, device)
        self.at: Site | None = None
        self.calls: list[Call] = []
        self.grouped = 0  # the number of its last segment that has a turn

    def next_segment(self) -> int:
        """The number of the first segment that has no turn, and gets one now."""
        self.grouped += 1
        return self.grouped

    def _compute(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        with self.segments.watching():
            loss = compute()
        self.segments.end(loss)
        return loss.detach()


class _Turn(NamedTuple):
    """A segment of one micro-batch."""

    member: _Member
    segment: int


class LayerMajor:
    """One step of several micro-batches."""

    def __init__(self, engine: Engine, gradients: Gradients, states: ModuleStates | None) -> None:
        """`states`: what modules noted before; None where micro-batches are known to go together."""
        self._engine = engine
        self._executor = engine.passes.executor
        self._gradients = gradients
        self._states = states
        # Blocks that reentrant checkpoints compute again: micro-batch, function, and the segment of its node.
        self._computed_again: dict[Block, set[tuple[int, int, int]]] = {}
        self._computes_again = False  # whether blocks are computed again in backward
        self._groups: list[list[_Turn]] = []  # turns that come while one block is there, in order
        self._running: _Member | None = None
        self._turn = 0  # counts calls of _go_on()

    def run(
        self,
        computations: Sequence[Callable[[], torch.Tensor]],
        in_forward: AbstractContextManager[None],
        in_backward: AbstractContextManager[None],
    ) -> list[torch.Tensor]:
        """Runs forward and backward of all micro-batches, and returns their losses. Each computation gives one loss.

        `in_forward`, `in_backward`: contexts that activations want around these.

        Raises CannotCutError; nothing is left then of what was done, except for what user code did itself.
        """
        engine = self._engine
        members: list[_Member] = []
        losses: list[torch.Tensor] = []

        def forward() -> None:
            try:
                on_use = None if self._states is None else self._states.note_use
                for number, compute in enumerate(computations):
                    members.append(_Member(number, compute, engine.passes.device, on_use))
                self._forward(members)
            except BaseException:
                for member in members:
                    engine.passes.calls[:] = member.calls
                    member.fiber.abandon()
                    engine.passes.calls.clear()
                raise
            losses.extend(member.fiber.result for member in members)

        try:
            with in_forward:
                engine.forward_together(self, len(computations), forward)
            if self._computes_again and self._states is not None and self._states.buffers_changed():
                raise CannotCutError("modules write buffers, in forward and once more where checkpoints compute again")
            shared = None if self._states is None else self._states.shared_buffer()
            if shared is not None:
                raise CannotCutError(f"buffer {shared!r} is written and used with another block's turn in between")
            apart = self._apart(members)
            batch_sums = BatchSums(self._gradients, len(members), *apart)
            engine.backward_together(batch_sums, partial(self._backward, batch_sums, in_backward))
        finally:
            self._groups.clear()
            for member in members:
                member.segments.close()
        members[0].fiber.keep_random_states()
        return losses

    # forward ----------------------------------------------------------------------------------------------------------
    def _forward(self, members: Sequence[_Member]) -> None:
        self._groups.append([_Turn(member, 0) for member in members])
        self._go_on(members)
        while (first := next((member for member in members if member.at is not None), None)) is not None:
            together = [member for member in members if member.at is first.at]
            self._group_what_lies_between(together)
            self._groups.append([_Turn(member, member.next_segment()) for member in together])
            self._go_on(together)
        self._group_what_lies_between(members)

    def _group_what_lies_between(self, members: Sequence[_Member]) -> None:
        """Gives turns to segments that have begun without one."""
        while some := [member for member in members if member.grouped < member.segments.number]:
            self._groups.append([_Turn(member, member.next_segment()) for member in some])

    def _go_on(self, members: Sequence[_Member]) -> None:
        """Resumes the members one after the other; each goes on to where it stops next."""
        self._turn += 1
        for member in members:
            self._executor.take_turn(first=member is members[0], last=member is members[-1])
            self._resume(member)

    def _resume(self, member: _Member) -> None:
        calls = self._engine.passes.calls
        if self._states is not None:
            self._states.look_at_buffers(self._turn)
        calls[:], self._running = member.calls, member
        try:
            member.fiber.resume()
        finally:
            member.calls, self._running = list(calls), None
            calls.clear()
        if self._states is None:
            return
        self._states.look_at_buffers(self._turn)
        changed = self._states.changed_attribute()
        if changed is not None:
            raise CannotCutError(f"{changed!r} is written while micro-batches are computed, which others would see")

    def arrive(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """A micro-batch calls a block. Waits until the others that call it have come here; returns its inputs."""
        member = self._running
        if member is None:
            raise StateError("a block of the model is called by another thread while forward_backward() is under way")
        if member.segments.in_visit:
            return args, kwargs
        self._computes_again |= unpack_of_checkpoint() is not None or not torch.is_grad_enabled()
        member.at = call.site
        member.fiber.pause()
        member.at = None
        segments = member.segments
        segments.begin()
        self.note_use(*call.site.blocks)
        encloses = call.site.encloses
        inputs: tuple[Any, ...] = segments.enter_visit((args, kwargs), encloses=encloses)
        call.ends.append(partial(segments.leave_visit, encloses=encloses))
        return inputs

    def note_use(self, *blocks: Block) -> None:
        """Notes blocks that the micro-batch uses, or parts of them. If without gradients, it uses them again later."""
        if self._running is not None and not torch.is_grad_enabled():
            segments = self._running.segments
            for block in blocks:
                function = self._running.number, segments.function, segments.of_nodes
                self._computed_again.setdefault(block, set()).add(function)

    # between ----------------------------------------------------------------------------------------------------------
    def _apart(self, members: Sequence[_Member]) -> tuple[dict[ManagedParam, int], set[ManagedParam]]:
        """Parameters that get gradients in several groups, with the number of groups; and those of them that get some
        from reentrant checkpoints.

        Raises CannotCutError if parameters outside the model do, or if the gradients need more host memory than there
        is.
        """
        used_in: dict[torch.Tensor, set[int]] = {}
        owners: dict[Any, int] = {}
        groups: dict[tuple[int, int], int] = {}
        used_often: set[tuple[torch.Tensor, int]] = set()  # leaves that one turn of a micro-batch uses several times
        for index, group in enumerate(self._groups):
            for member, segment in group:
                groups[member.number, segment] = index
                for leaf, times in Counter(member.segments.leaves(segment, owners, member.number)).items():
                    used_in.setdefault(leaf, set()).add(index)
                    if (leaf, member.number) in used_often and isinstance(leaf, Leaf):
                        _refuse_order(leaf)
                    if times > 1:
                        used_often.add((leaf, member.number))
        self._check_owners(used_in)
        count = len(members)
        several = [leaf for leaf, used in used_in.items() if len(used) > 1]
        uses = {leaf.owner(): len(used) for leaf, used in used_in.items() if isinstance(leaf, Leaf)}
        one_by_one: dict[ManagedParam, int] = {}  # by recomputation, whose graphs are not there yet
        often = False  # whether a block is computed again for several checkpoints of a micro-batch
        for block, functions in self._computed_again.items():
            again = max(Counter(number for number, _, _ in functions).values())
            often |= again > 1
            in_order = len({groups[number, segment] for number, _, segment in functions}) == 1
            for param in block.params:
                in_all = again + uses.get(param, 0)
                if param.home.requires_grad and uses.get(param, 0) <= 1 and (in_all > 1 or not in_order):
                    one_by_one[param] = in_all
        if any(member.segments.checkpoints for member in members):
            stay = self._staying(any_of_them=often or not _in_order(members, groups))
            one_by_one |= {param: 1 + uses.get(param, 0) for param in stay if uses.get(param, 0) <= 1}
        apart = {param: used for param, used in uses.items() if param is not None and used > 1} | one_by_one
        others = [leaf for leaf in several if not isinstance(leaf, Leaf) and not self._is_passing(leaf, used_in[leaf])]
        if others:
            raise CannotCutError(
                f"a parameter of shape {tuple(others[0].shape)} that is not offloaded is used by several blocks, unseen"
                " by torch functions"
            )
        nbytes = bytes_apart(apart, count)
        if not self._gradients.ledger.has_room(nbytes):
            raise CannotCutError(
                f"gradients of weights that several blocks use would take {nbytes:,} bytes of host memory for {count}"
                " micro-batches"
            )
        return apart, set(one_by_one)

    def _staying(self, *, any_of_them: bool) -> Iterable[ManagedParam]:
        """Trained parameters that stay on the device and that several checkpoints may use unseen: those of several
        modules or, with `any_of_them`, all.
        """
        for block in self._engine.passes.residents:
            of_several = block.places.of_several_modules()
            yield from (one for one in block.params if one.home.requires_grad and (any_of_them or one in of_several))

    def _check_owners(self, leaves: Iterable[torch.Tensor]) -> None:
        own = {param for block in self._engine.passes.all_blocks() for param in block.params}
        for leaf in leaves:
            if isinstance(leaf, Home):
                raise CannotCutError("the loss uses a weight directly, outside of the model")
            if isinstance(leaf, Leaf) and leaf.owner() not in own:
                raise CannotCutError("another offloaded model is trained by the same loss")

    def _is_passing(self, leaf: torch.Tensor, groups: set[int]) -> bool:
        """Whether a leaf is no parameter, but a table's sign or a tensor that a block has made (T5's position bias)."""
        made_on_the_way = 0 in groups and len(groups) == 2 and leaf.grad is None and not isinstance(leaf, nn.Parameter)
        return made_on_the_way or self._engine.row_gradients.is_sign(leaf)

    # backward ---------------------------------------------------------------------------------------------------------
    def _backward(self, batch_sums: BatchSums, around: AbstractContextManager[None]) -> None:
        with around:
            while self._groups:
                group = self._groups.pop()
                for member, segment in group:
                    self._executor.take_turn(first=member is group[0].member, last=member is group[-1].member)
                    batch_sums.number = member.number
                    member.segments.backward(segment)
                batch_sums.leave_block()
        batch_sums.end()


def _refuse_order(leaf: Leaf) -> NoReturn:
    """Raises CannotCutError for what is used several times by a block, and then by another one: a loop adds the first
    block's gradients to the other's one by one, and not their sum.
    """
    name = getattr(leaf.owner(), "name", "")
    raise CannotCutError(f"parameter {name!r} is used several times by one block, and then by another one")


def _in_order(members: Sequence[_Member], groups: Mapping[tuple[int, int], int]) -> bool:
    """Whether each reentrant checkpoint is in one group for all members. `groups`: of each member's segments."""
    turns = ([groups[member.number, segment] for segment in member.segments.checkpoints] for member in members)
    return all(len(set(of_each)) == 1 for of_each in itertools.zip_longest(*turns))
