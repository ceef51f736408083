"""What stands in for weights of which experts are taken by number? A tensor that brings an expert when it is asked for.

It serves modules that take experts one by one, as `weight[number]`, or copies of several, as `weight[numbers]`:
transformers' loops over experts, and users' own modules. Experts keep their numbers. Whatever else a module does with a
weight is done with all of it, borrowed for the call. See docs/design/experts.md.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import nn

from headrace.memory.buffers import references_beside
from headrace.runtime.autograd import make_subclass, without_overrides
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.model.uses import StandIn
from headrace.weights.movement.banks import Bank
from headrace.weights.movement.block import Block
from headrace.weights.movement.slices import Slices
from headrace.weights.passes.parameter_access import borrow
from headrace.weights.passes.row_gradients import RowGradients


@contextlib.contextmanager
def standing_in(
    slices: Slices, module: nn.Module, names: Sequence[str], stand_ins: Sequence[torch.Tensor], count: int | None = None
) -> Iterator[None]:
    """Inside, the module has the stand-ins in the place of its parameters of these names, and `count` as its number of
    experts if that is given.
    """
    held: Any = module._parameters
    attributes = module.__dict__
    before = {name: dict.__getitem__(held, name) for name in names}
    all_experts = None if count is None else attributes["num_experts"]

    def put_back() -> None:
        dict.update(held, before)
        if count is not None:
            attributes["num_experts"] = all_experts

    slices.unfinished.append(put_back)  # first: Ctrl-C may come at any time
    try:
        if count is not None:
            attributes["num_experts"] = count
        dict.update(held, zip(names, stand_ins, strict=True))
        yield
    finally:
        put_back()
        slices.unfinished.remove(put_back)


class _GivenExpert(NamedTuple):
    """An expert's weight that the module was given, and may still have or have written to."""

    number: int
    place: int
    view: weakref.ref[torch.Tensor]  # what the module was given, as long as it has that
    alias: torch.Tensor  # of the same memory; its version tells of writes to the view
    version: int

    @property
    def is_written(self) -> bool:
        """Whether the module has written to the weight."""
        return self.alias._version != self.version


class _Gathered(NamedTuple):
    """Copies of the experts with these numbers, for the places of the block at which the module has not asked yet."""

    numbers: torch.Tensor  # as the module gave them
    used: torch.Tensor  # each number once, not negative and ascending, on the host
    weights: dict[int, torch.Tensor]


class ExpertsOfCall:
    """The experts that one call of a module takes by number, on the thread of the call and while it is under way.

    `used`: the numbers that the call says it uses, ascending. Where these are more than there are slots, they come in
    turns of half of the slots, so that the experts of the next turn load while the module computes with those of one.
    `gathers`: the module asks for copies of the same experts of all weights of the block.
    """

    def __init__(
        self, slices: Slices, block: Block, used: Sequence[int], gradients: RowGradients, *, gathers: bool
    ) -> None:
        self.whole = False  # whether all were needed: experts are then taken from the lent weights
        self.count = 0 if block.experts is None else block.experts.count
        self._slices = slices
        self._block = block
        self._gradients, self._alone = gradients, partial(gradients.alone, block)
        self._gathers = gathers
        self._banks = [slices.bank_of(block, len(used))]  # none once all of the weights are needed
        self._used = [number for number in used if 0 <= number < self.count]
        self._order = {number: place for place, number in enumerate(self._used)}
        slots = self._bank.slots
        self._turn_experts = len(self._used) if len(self._used) <= slots else max(1, slots // 2)
        self._turn = range(0)  # positions in the order, of the experts that the module is at
        self._slots: dict[int, int] = {}  # of experts that stay there, by number
        self._taken: list[_GivenExpert] = []  # what the module may still have, or has written to
        self._gathered: _Gathered | None = None
        if self._used:
            self._begin_turn(self._used[0])

    def take(self, place: int, number: int) -> torch.Tensor | None:
        """One expert's weight, of the parameter at that place of the block. None if no slot is free for the expert."""
        if not self._comes(number):
            return None
        param = self._block.params[place]
        given = partial(self._given, place, number)
        return self._gradients.computed(param, given, [number], self._alone, lambda gradient: gradient[None])

    def _given(self, place: int, number: int) -> torch.Tensor:
        weight = self._view(place, number)
        alias = weight.detach()
        self._taken.append(_GivenExpert(number, place, weakref.ref(weight), alias, alias._version))
        return weight

    def gather(self, place: int, numbers: torch.Tensor) -> torch.Tensor | None:
        """A copy of an expert's weight for each of the numbers. None if no slot is free for one of the experts."""
        gathered = self._gathered
        if gathered is None or gathered.numbers is not numbers or place not in gathered.weights:
            wanted = numbers.detach().to("cpu", torch.int64).flatten()
            wanted = torch.where(wanted < 0, wanted + self.count, wanted)
            if not len(wanted) or not 0 <= int(wanted.min()) <= int(wanted.max()) < self.count:
                if self._gradients.trains(self._block):
                    return None  # a use of no experts gives a trained weight a gradient of zeros
                return self._block.params[place].absent[numbers]  # no values, or raises as the weight does
            gathered = self._gathered = self._copies(place, numbers, wanted)
            if gathered is None:
                return None
        found, used, count = gathered.weights.pop(place), gathered.used, self.count

        def to_rows(gradient: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            numbers = torch.where(numbers < 0, numbers + count, numbers)
            where = torch.searchsorted(used.to(numbers.device, numbers.dtype), numbers)
            rows = gradient.new_zeros(len(used), *gradient.shape[where.dim() :])
            return rows.index_put_((where,), gradient, accumulate=True)

        # What is saved is what `weight[numbers]` saves, as for lookups in tables (lookup.py).
        return self._gradients.computed(
            self._block.params[place], lambda: found, used, self._alone, to_rows, numbers.detach()
        )

    def _copies(self, place: int, numbers: torch.Tensor, wanted: torch.Tensor) -> _Gathered | None:
        places = range(len(self._block.params)) if self._gathers else [place]
        used = torch.unique(wanted)
        copies: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for number in used.tolist():
                if not self._comes(number):
                    return None
                here = (wanted == number).nonzero().squeeze(1)
                for at in places:
                    weight = self._view(at, number)
                    if at not in copies:
                        copies[at] = weight.new_empty(*numbers.shape, *weight.shape)
                    copies[at].view(-1, *weight.shape)[here.to(weight.device)] = weight
                    del weight
        return _Gathered(numbers, used, copies)

    def lend(self, param: ManagedParam) -> torch.Tensor:
        """All of a weight, lent until the call ends: the module does more with it than take experts."""
        self.let_go()
        self.whole = True
        self._banks.clear()  # the block needs their memory
        return borrow(param.home)

    def let_go(self) -> None:
        """The call ends, or needs all of a weight: what the module wrote to experts is written to their homes, and what
        it still has becomes copies of its own.
        """
        self._gathered = None
        while self._taken:
            one = self._taken.pop()
            if one.is_written:
                self.whole = True
                param = self._block.params[one.place]
                param.touch()
                param.keep(param.data[one.number], one.alias)
            view = one.view()
            if view is not None:
                with torch.no_grad():
                    view.data = view.clone()
            del one, view

    @property
    def _bank(self) -> Bank:
        return self._banks[0]

    def _view(self, place: int, number: int) -> torch.Tensor:
        """The weight of an expert that has a slot. Compute waits until it has arrived."""
        slot = self._slots[number]
        self._slices.arrive(self._bank, slot)
        return self._slices.view(self._block, self._bank, slot, place)

    def _comes(self, number: int) -> bool:
        """Brings an expert, unless it is here or on its way. Returns False if no slot is free for it."""
        if number not in self._slots or self._order.get(number, -1) not in self._turn:
            self._begin_turn(number)
        return number in self._slots

    def _begin_turn(self, number: int) -> None:
        """Submits loads of the experts in the turn of this one and then, ahead of their use, of those in the next turn.

        It loads as many as there is room for: experts that the module still has keep their slots.
        """
        at = self._order.get(number)
        first = 0 if at is None else at - at % self._turn_experts
        self._turn = range(0) if at is None else range(first, min(first + self._turn_experts, len(self._used)))
        turn = [number] if at is None else [self._used[one] for one in self._turn]
        ahead = [] if at is None else self._used[self._turn.stop : self._turn.stop + self._turn_experts]
        missing = [[one for one in wanted if one not in self._slots] for wanted in (turn, ahead)]
        missing[0].sort(key=lambda one: one != number)
        if len(self._slots) + sum(map(len, missing)) > self._bank.slots:
            self._keep_only(turn)
            if number not in self._slots and len(self._slots) == self._bank.slots:  # another one came out of turn
                self._keep_only(())
        for wanted in missing:
            self._bring(wanted[: self._bank.slots - len(self._slots)])

    def _keep_only(self, turn: Sequence[int]) -> None:
        """Gives up the slots of all experts that are not in the turn and that the module no longer has. Gives up none
        if nothing tells what the module has, or if it has written to an expert: that would be lost with the slot.
        """
        if any(one.is_written for one in self._taken):
            return
        self._taken = [one for one in self._taken if one.view() is not None]
        unseen = self._slices.is_unseen(self._bank, self._slots.values())
        if unseen or references_beside(self._bank.buffer) == 2 * len(self._taken):  # the module made no views of them
            kept = {*turn, *(one.number for one in self._taken)}
            self._slots = {one: slot for one, slot in self._slots.items() if one in kept}

    def _bring(self, numbers: Sequence[int]) -> None:
        if numbers:
            self._bank.in_call = None
            found = self._slices.bring(self._block, self._bank, numbers, keep=self._slots.values())
            self._slots.update(zip(numbers, found, strict=True))


class WeightOfExperts(StandIn):
    """Stands in for a weight with experts as first dimension, which come when they are asked for by their number."""

    asked: ExpertsOfCall
    place: int
    param: ManagedParam

    @classmethod
    def of(cls, asked: ExpertsOfCall, place: int, param: ManagedParam) -> "WeightOfExperts":
        """The stand-in for a parameter, which is at that place of the block."""
        weight: WeightOfExperts = make_subclass(cls, param.absent, False)
        weight.asked, weight.place, weight.param = asked, place, param
        return weight

    def used(self) -> torch.Tensor:
        """All of the weight, for a torch function that does more than take experts."""
        return self.asked.lend(self.param)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Gives experts that are taken by their numbers; does anything else as StandIn does."""
        if func is torch.Tensor.__getitem__ and isinstance(args[0], cls) and not args[0].asked.whole:
            with without_overrides():
                found = _item(args[0], args[1])
            if found is not None:
                return found
        return super().__torch_function__(func, types, args, kwargs)


def _item(weight: WeightOfExperts, index: Any) -> torch.Tensor | None:
    """`weight[index]`, where that is some of the experts. None where it is something else."""
    first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    number = _number(first)
    if number is not None:
        number += weight.asked.count if number < 0 else 0
        if not 0 <= number < weight.asked.count:
            return weight.param.absent[index]  # raises as the weight does
        one = weight.asked.take(weight.place, number)
        return one if one is None or not rest else one[rest]
    if not rest and type(first) is torch.Tensor and first.dtype in (torch.int64, torch.int32):
        return weight.asked.gather(weight.place, first)
    return None


def _number(index: Any) -> int | None:
    if type(index) is torch.Tensor:
        integers = index.dim() == 0 and index.dtype in (torch.int64, torch.int32)
        return int(index) if integers else None
    return int(index) if isinstance(index, Integral) and not isinstance(index, bool) else None
