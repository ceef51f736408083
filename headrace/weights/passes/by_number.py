"""What stands in for weights of which experts are taken by number? What brings an expert when it is asked for?

For modules that take experts one by one, as `weight[number]`, or a copy of several, as `weight[numbers]`: transformers'
loops over experts, and modules of the user's own. They go on counting experts as they do. What they do with a weight
besides is done with all of it, borrowed for the call. See docs/design/experts.md.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import nn

from headrace.memory.buffers import references_beside
from headrace.runtime.autograd import make_subclass, tree_map_only, without_overrides
from headrace.weights.model.slot import Slot
from headrace.weights.model.uses import Use, use_of
from headrace.weights.movement.banks import Bank
from headrace.weights.movement.block import Block
from headrace.weights.movement.slices import Slices
from headrace.weights.passes.stray import borrowed
from headrace.weights.passes.trained import Trained

__all__ = ["Asked", "ByNumber", "standing_in"]


@contextlib.contextmanager
def standing_in(
    slices: Slices, module: nn.Module, names: Sequence[str], stand_ins: Sequence[torch.Tensor], count: int | None = None
) -> Iterator[None]:
    """The module has these in the place of its parameters of those names, and `count` experts where that is given."""
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


class _Taken(NamedTuple):
    """An expert's weight that the module was given."""

    number: int
    place: int
    view: weakref.ref[torch.Tensor]  # what it was given, as long as it has that
    alias: torch.Tensor  # of the same memory, whose version tells what was written to the view
    version: int

    @property
    def is_written(self) -> bool:
        return self.alias._version != self.version


class _Gathered(NamedTuple):
    """Copies of the experts with these numbers, for each place of the block where none was asked for yet."""

    numbers: torch.Tensor  # as the module gave them
    used: list[int]
    where: torch.Tensor  # of each number, which of those it is; on the device
    weights: dict[int, torch.Tensor]


class Asked:
    """The experts of one call, which says that it uses those with the numbers `used`, ascending.

    More of them than there are slots come in turns of half of the slots, so that the next turn's come while the module
    computes with one. `gathers`: it asks for copies of the same experts of all weights of the block.
    """

    def __init__(self, slices: Slices, block: Block, used: Sequence[int], trained: Trained, *, gathers: bool) -> None:
        self.whole = False  # all of them were needed: what is asked for is taken from the lent weights
        self.count = 0 if block.experts is None else block.experts.count
        self._slices = slices
        self._block = block
        self._trained = trained
        self._gathers = gathers
        self._banks = [slices.bank_of(block, used)]  # none any more where all of the weights are needed
        self._used = [number for number in used if 0 <= number < self.count]
        self._order = {number: place for place, number in enumerate(self._used)}
        slots = self._bank.slots
        self._turn_experts = len(self._used) if len(self._used) <= slots else max(1, slots // 2)
        self._turn = range(0)  # of the order, that the module is at
        self._slots: dict[int, int] = {}  # by number: experts that stay in their slots
        self._taken: list[_Taken] = []  # what the module may still have, or has written to
        self._gathered: _Gathered | None = None
        if self._used:
            self._begin_turn(self._used[0])

    def take(self, place: int, number: int) -> torch.Tensor | None:
        """One expert's weight, of the parameter at that place of the block; None where there is no slot for it."""
        if not self._comes(number):
            return None
        return self._trained.one(self._block, self._block.slots[place], number, lambda: self._given(place, number))

    def _given(self, place: int, number: int) -> torch.Tensor:
        weight = self._view(place, number)
        alias = weight.detach()
        self._taken.append(_Taken(number, place, weakref.ref(weight), alias, alias._version))
        return weight

    def gather(self, place: int, numbers: torch.Tensor) -> torch.Tensor | None:
        """The weights of several, a copy for each; None where there is no slot for one."""
        gathered = self._gathered
        if gathered is None or gathered.numbers is not numbers or place not in gathered.weights:
            wanted = numbers.detach().to("cpu", torch.int64).flatten()
            wanted = torch.where(wanted < 0, wanted + self.count, wanted)
            if not len(wanted) or not 0 <= int(wanted.min()) <= int(wanted.max()) < self.count:
                if self._trained.trains(self._block):
                    return None  # who uses none of a trained weight gives it a gradient of zeros
                return self._block.slots[place].absent[numbers]  # no values, or raises what the weight does
            gathered = self._gathered = self._copies(place, numbers, wanted)
            if gathered is None:
                return None
        found = gathered.weights.pop(place)
        slot = self._block.slots[place]
        return self._trained.several(self._block, slot, gathered.used, gathered.where, lambda: found)

    def _copies(self, place: int, numbers: torch.Tensor, wanted: torch.Tensor) -> _Gathered | None:
        places = range(len(self._block.slots)) if self._gathers else [place]
        used, where = torch.unique(wanted, return_inverse=True)
        copies: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for number in used.tolist():
                if not self._comes(number):
                    return None
                here = (wanted == number).nonzero().squeeze(1)
                for at in places:
                    weight = self._view(at, number)
                    if at not in copies:
                        copies[at] = weight.new_empty(len(wanted), *weight.shape)
                    copies[at][here.to(weight.device)] = weight
                    del weight
        found = {at: copy.view(*numbers.shape, *copy.shape[1:]) for at, copy in copies.items()}
        return _Gathered(numbers, used.tolist(), where.view(numbers.shape).to(self._bank.buffer.device), found)

    def lend(self, slot: Slot) -> torch.Tensor:
        """All of a weight, until the call ends."""
        self.let_go()
        self.whole = True
        self._banks.clear()  # whose memory the block needs
        return borrowed(slot.home)

    def let_go(self) -> None:
        """What the module wrote to experts is their homes', too; those that it still has become copies of its own."""
        self._gathered = None
        while self._taken:
            one = self._taken.pop()
            if one.is_written:
                self.whole = True
                slot = self._block.slots[one.place]
                slot.touch()
                slot.keep(slot.data[one.number], one.alias)
            view = one.view()
            if view is not None:
                with torch.no_grad():
                    view.data = view.clone()
            del one, view

    @property
    def _bank(self) -> Bank:
        return self._banks[0]

    def _view(self, place: int, number: int) -> torch.Tensor:
        """Of one that is there."""
        slot = self._slots[number]
        self._slices.arrive(self._bank, slot)
        return self._slices.view(self._block, self._bank, slot, place)

    def _comes(self, number: int) -> bool:
        """Whether an expert is here, or on its way: False where there is no slot for it."""
        if number not in self._slots or self._order.get(number, -1) not in self._turn:
            self._begin_turn(number)
        return number in self._slots

    def _begin_turn(self, number: int) -> None:
        """The experts of the turn of this one come, if they are not here, and then the next turn's, ahead of their use.

        As far as there is room: experts that the module still has keep their slots.
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
        for wanted in missing:
            self._bring(wanted[: self._bank.slots - len(self._slots)])

    def _keep_only(self, turn: Sequence[int]) -> None:
        """Slots of all others are free, but for what the module has. None is, where nobody knows what that is, or where
        it has written to one, which would be lost with the slot.
        """
        if any(one.is_written for one in self._taken):
            return
        self._taken = [one for one in self._taken if one.view() is not None]
        unseen = self._slices.is_unseen(self._bank, self._slots.values())
        if unseen or references_beside(self._bank.buffer) == 2 * len(self._taken):  # it made no views of those
            kept = {*turn, *(one.number for one in self._taken)}
            self._slots = {one: slot for one, slot in self._slots.items() if one in kept}

    def _bring(self, numbers: Sequence[int]) -> None:
        if numbers:
            self._bank.called = None
            found = self._slices.bring(self._block, self._bank, numbers, keep=self._slots.values())
            self._slots.update(zip(numbers, found, strict=True))


class ByNumber(torch.Tensor):
    """A weight with experts as first dimension, which come when they are asked for by their number."""

    asked: Asked
    place: int
    slot: Slot

    @classmethod
    def of(cls, asked: Asked, place: int, slot: Slot) -> "ByNumber":
        """For the parameter of that slot, which is at that place of the block."""
        weight: ByNumber = make_subclass(cls, slot.absent, False)
        weight.asked, weight.place, weight.slot = asked, place, slot
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Experts, or what is asked about the weight; anything else is done with all of it."""
        with without_overrides():
            if use_of(func) in (Use.ASK, Use.LOOK):
                return func(*args, **(kwargs or {}))
            if func is torch.Tensor.__getitem__ and isinstance(args[0], cls) and not args[0].asked.whole:
                found = _item(args[0], args[1])
                if found is not None:
                    return found
            args, kwargs = tree_map_only(cls, lambda weight: weight.asked.lend(weight.slot), (args, kwargs or {}))
        return func(*args, **kwargs)


def _item(weight: ByNumber, index: Any) -> torch.Tensor | None:
    """`weight[index]`, where that is some of the experts; None where it is not."""
    first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    number = _number(first)
    if number is not None:
        number += weight.asked.count if number < 0 else 0
        if not 0 <= number < weight.asked.count:
            return weight.slot.absent[index]  # raises what the weight does
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
