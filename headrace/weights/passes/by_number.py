"""What stands in for weights of which experts are taken by number? What brings an expert when it is asked for.

For modules of the user's own, which go on counting experts as they do. What they do with a weight besides taking
experts is done with all of it, lent for the call. See docs/design/experts.md.
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
from headrace.weights.movement.banks import Bank
from headrace.weights.movement.block import Block
from headrace.weights.movement.slices import Slices
from headrace.weights.passes.stray import lent_for_call
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


class Asked:
    """The experts of one call. `used`: those that it said it uses, ascending."""

    def __init__(self, slices: Slices, block: Block, used: Sequence[int], trained: Trained) -> None:
        self.whole = False  # all of them were needed: what is asked for is taken from the lent weights
        self._slices = slices
        self._block = block
        self._trained = trained
        self._banks = [slices.bank_of(block, used)]  # none any more where all of the weights are needed
        self.count = 0 if block.experts is None else block.experts.count
        self._used = [number for number in used if 0 <= number < self.count]
        self._slots: dict[int, int] = {}  # by number: experts that stay in their slots
        self._taken: list[_Taken] = []  # what the module may still have, or has written to
        self._bring(self._used[: self._bank.slots])

    def take(self, place: int, number: int) -> torch.Tensor | None:
        """One expert's weight, of the parameter at that place of the block; None where there is no slot for it."""
        if number not in self._slots and not self._make_room(number):
            return None
        return self._trained.one(self._block, self._block.slots[place], number, lambda: self._given(place, number))

    def _given(self, place: int, number: int) -> torch.Tensor:
        weight = self._view(place, number)
        alias = weight.detach()
        self._taken.append(_Taken(number, place, weakref.ref(weight), alias, alias._version))
        return weight

    def gather(self, place: int, numbers: torch.Tensor) -> torch.Tensor | None:
        """The weights of several, a copy for each; None where there is no slot for one."""
        wanted = numbers.detach().to("cpu", torch.int64).flatten()
        wanted = torch.where(wanted < 0, wanted + self.count, wanted)
        if not len(wanted) or not 0 <= int(wanted.min()) <= int(wanted.max()) < self.count:
            if self._trained.trains(self._block):
                return None  # who uses none of a trained weight gives it a gradient of zeros
            return self._block.slots[place].absent[numbers]  # no values, or raises what the weight does
        used, where = torch.unique(wanted, return_inverse=True)
        gathered: torch.Tensor | None = None
        with torch.no_grad():
            for number in used.tolist():
                if number not in self._slots and not self._make_room(number):
                    return None
                weight = self._view(place, number)
                if gathered is None:
                    gathered = weight.new_empty(len(wanted), *weight.shape)
                gathered[(wanted == number).nonzero().squeeze(1).to(weight.device)] = weight
                del weight
        if gathered is None:
            return None
        found = gathered.view(*numbers.shape, *gathered.shape[1:])
        there = where.view(numbers.shape).to(found.device)
        return self._trained.several(self._block, self._block.slots[place], used.tolist(), there, lambda: found)

    def lend(self, slot: Slot) -> torch.Tensor:
        """All of a weight, until the call ends."""
        self.let_go()
        self.whole = True
        self._banks.clear()  # whose memory the block needs
        return lent_for_call(slot.home)

    def let_go(self) -> None:
        """What the module wrote to experts is their homes', too; those that it still has become copies of its own."""
        while self._taken:
            one = self._taken.pop()
            if one.alias._version != one.version:
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

    def _make_room(self, number: int) -> bool:
        """Brings one that is not there, and others that are used and come after it. False: there is no slot."""
        if any(one.alias._version != one.version for one in self._taken):  # which would be lost with the slot
            return False
        self._taken = [one for one in self._taken if one.view() is not None]
        if len(self._slots) == self._bank.slots:
            for slot in self._slots.values():
                self._slices.arrive(self._bank, slot)
            unseen = self._slices.is_unseen(self._bank, self._slots.values())
            if not unseen and references_beside(self._bank.buffer) != 2 * len(self._taken):  # it made views of those
                return False
            kept = {one.number for one in self._taken}
            self._slots = {one: slot for one, slot in self._slots.items() if one in kept}
        later = [one for one in self._used if one > number and one not in self._slots]
        self._bring([number, *later][: self._bank.slots - len(self._slots)])
        return number in self._slots

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
        name = getattr(func, "__name__", "")
        with without_overrides():
            if name in _ASKS or (name == "__get__" and getattr(func.__self__, "__name__", "") in _ASKS):
                return func(*args, **(kwargs or {}))
            if name == "__getitem__" and isinstance(args[0], cls) and not args[0].asked.whole:
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


# About a tensor, but for its values.
_ASKS = frozenset(
    ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "size", "dim", "is_floating_point", "__len__")
)
