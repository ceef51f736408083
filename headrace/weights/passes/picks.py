"""How does a module compute with some of its experts? Its `forward` is ours: those that are used come, and are counted
from zero.

The host reads which ones are wanted: it waits once for what the device computes before. See docs/design/experts.md.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from headrace.errors import StateError
from headrace.runtime.autograd import in_transform, make_subclass, overrides_are_on, without_overrides
from headrace.weights.model.experts import Taking, is_marked, named_index_of, routing_of, taking_of
from headrace.weights.model.slot import Slot
from headrace.weights.movement.banks import Bank
from headrace.weights.movement.block import Block, Presence
from headrace.weights.movement.executor import Executor
from headrace.weights.movement.slices import Slices
from headrace.weights.passes.adapted import AdaptedCall, AdaptedCalls, compute_adapted, wrappers_of
from headrace.weights.passes.by_number import Asked, ByNumber, standing_in
from headrace.weights.passes.lending import Lending
from headrace.weights.passes.site import Site
from headrace.weights.passes.trained import Trained

__all__ = ["Picks"]


class _NeedsAllError(Exception):
    """A module does something else with its weights than to take experts one by one."""


class Picks:
    """Calls of modules that pick experts, of one model. `call` is the engine's, for a visit to a whole block."""

    def __init__(
        self,
        device: torch.device,
        executor: Executor,
        lending: Lending,
        trained: Trained,
        call: Callable[..., Any],
    ) -> None:
        self.block_of: Callable[[nn.Module], Block | None] = lambda _module: None  # of a module that picks experts
        self._device = device
        self._executor = executor
        self._lending = lending
        self._trained = trained
        self._call = call
        self._adapted = AdaptedCalls()

    def compute(
        self, site: Site, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of the module's `forward`; `own` is its own, and `site` that of a call that needs all experts."""
        block = site.blocks[-1]
        if is_marked(module):
            return self._by_number(site, block, module, own, args, kwargs)
        adapted = self._adapted.of.get(module)
        if adapted is not None:
            return self._with_adapters(adapted, block, module, own, args, kwargs)
        is_of_class = getattr(own, "func", None) is type(module).forward  # nobody gave the instance another one
        names = self._names(block, module) if is_of_class else None
        routing = routing_of(module, args, kwargs)
        taking = taking_of(module)
        if names is not None and routing is not None and taking is not None and self._goes_by_slices(block, routing):
            pick = _Pick(self._executor.slices, block, module, names, self._device, self._trained)
            found = pick.compute(own, *routing, taking)
            if found is not None:
                return found
            if pick.failed:
                with without_overrides():
                    self._executor.travels_whole(block)
        return self._with_all(site, own, args, kwargs)

    def _with_all(self, site: Site, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that computes with all experts of the block."""
        found = self._call(site, own, args, kwargs)
        self._trained.came_whole(site.blocks[-1], found)
        return found

    def adapt(self, wrapper: Any, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the `forward` of what adapts a weight of experts; `own` is its own, which needs all of them."""
        module = wrapper.get_base_layer()
        if module in self._adapted.of:
            return wrapper.base_layer(*args, **kwargs)
        call = self._adapted_call(wrapper, module, args, kwargs)
        if call is None:
            return own(*args, **kwargs)
        self._adapted.of[module] = call
        try:
            return wrapper.base_layer(*args, **kwargs)
        finally:
            del self._adapted.of[module]

    def _adapted_call(
        self, wrapper: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AdaptedCall | None:
        block = self.block_of(module)
        if block is None or block.experts is None or is_marked(module) or "parametrizations" in module._modules:
            return None
        wrappers = wrappers_of(wrapper)
        routing = routing_of(module, args, kwargs)
        if wrappers is None or routing is None or taking_of(module) is None or self._names(block, module) is None:
            return None
        if self._trained.trains(block) or not self._goes_by_slices(block, routing):
            return None
        with without_overrides():
            used, where = torch.unique(routing[1].detach().to("cpu", torch.int64), return_inverse=True)
        return AdaptedCall(wrappers, used, where) if 0 <= int(used[0]) <= int(used[-1]) < block.experts.count else None

    def _by_number(
        self, site: Site, block: Block, module: nn.Module, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a user's own module, which goes on counting experts as it does."""
        names = None if self._trained.is_known_whole(block) else self._names(block, module)
        index = named_index_of(module, own, args, kwargs)
        if names is None or index is None or not self._goes_by_slices(block, ()):
            return self._with_all(site, own, args, kwargs)
        with without_overrides():
            used = torch.unique(index.detach().to("cpu", torch.int64)).tolist()
        if self._trained.trains(block) and self._trained.comes_whole(block, len(used)):
            return self._with_all(site, own, args, kwargs)
        with without_overrides():
            asked = Asked(self._executor.slices, block, used, self._trained)
            stand_ins = [ByNumber.of(asked, place, slot) for place, slot in enumerate(block.slots)]
        try:
            with standing_in(self._executor.slices, module, names, stand_ins):
                return own(*args, **kwargs)
        finally:
            with without_overrides():
                asked.let_go()
            if asked.whole:
                self._trained.note_whole(block)

    def _with_adapters(
        self, call: AdaptedCall, block: Block, module: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        names, routing = self._names(block, module), routing_of(module, args, kwargs)
        if names is None or routing is None:
            raise StateError(f"experts {block.name!r} were replaced within a call of what adapts them")
        hidden, index, weights = routing
        numbers = call.where.to(self._device, index.dtype)
        return compute_adapted(self._executor.slices, block, module, names, call, lambda: own(hidden, numbers, weights))

    def _names(self, block: Block, module: nn.Module) -> list[str] | None:
        """The module's names for the block's parameters, in order; None where they are not all there."""
        if block.experts is None:
            return None
        names = {id(held): name for name, held in dict.items(module._parameters)}
        found = [names.get(id(slot.home)) for slot in block.slots]
        return None if None in found else [name for name in found if name is not None]

    def _goes_by_slices(self, block: Block, routing: Sequence[torch.Tensor]) -> bool:
        return (
            (block.presence is Presence.ABSENT or self._trained.trains(block))
            and all(type(one) in (torch.Tensor, nn.Parameter) for one in routing)
            and all(one.device == self._device for one in routing)
            and self._lending.computes
            and overrides_are_on()  # by which stand-ins notice how they are used
            and not in_transform()
        )


class _Routing(NamedTuple):
    """What a module is called with: tokens, and the experts that each wants."""

    hidden: torch.Tensor  # (tokens, features)
    weights: torch.Tensor  # (tokens, experts for each)
    where: torch.Tensor  # on the host, of that shape: which of those that are used
    dtype: torch.dtype  # of the experts' numbers


class _Pick:
    """One call."""

    def __init__(
        self,
        slices: Slices,
        block: Block,
        module: nn.Module,
        names: Sequence[str],
        device: torch.device,
        trained: Trained,
    ) -> None:
        self._slices = slices
        self._block = block
        self._module = module
        self._names = names
        self._device = device
        self._trained = trained
        self._trains = trained.trains(block)
        self.failed = False  # nor will others go by slices

    def compute(
        self,
        own: Callable[..., Any],
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        taking: Taking,
    ) -> Any:
        """What the module gives; None where it needs all experts."""
        with without_overrides():
            experts = self._block.experts
            used, where = torch.unique(index.detach().to("cpu", torch.int64), return_inverse=True)
            if experts is None or not 0 <= int(used[0]) <= int(used[-1]) < experts.count:
                return None
        if self._trains and self._trained.comes_whole(self._block, len(used)):
            return None
        with without_overrides():
            bank = self._slices.bank_of(self._block, used.tolist())
        routing = _Routing(hidden, weights, where, index.dtype)
        if taking is not Taking.ONE_BY_ONE and len(used) <= bank.slots:
            return self._at_once(own, bank, routing, used)
        if taking is Taking.GROUPED:
            return self._in_rounds(own, bank, routing, used)
        with without_overrides():
            loop = _Loop(self._slices, self._block, bank, used.tolist(), self._trained)
            stand_ins = [_OneByOne.of(loop, number, slot, len(used)) for number, slot in enumerate(self._block.slots)]
        try:
            with standing_in(self._slices, self._module, self._names, stand_ins, len(used)):
                return own(hidden, where.to(self._device, index.dtype), weights)
        except _NeedsAllError:
            self.failed = True
            return None

    def _at_once(self, own: Callable[..., Any], bank: Bank, routing: _Routing, used: torch.Tensor) -> Any:
        """They are counted by the slots that they are in: no result depends on which number an expert has."""
        with without_overrides():
            # Gradients of tokens are added up in the order in which these are grouped by expert.
            in_order = self._trains or (torch.is_grad_enabled() and taking_of(self._module) is Taking.GROUPED)
            # A gradient is as large as what it is of.
            count = 0 if self._block.experts is None else self._block.experts.count
            span = min(count, bank.slots) if self._trains else bank.slots
            if in_order:
                slots = self._slices.bring_in_order(self._block, bank, used.tolist(), span)
            else:
                slots = self._slices.bring(self._block, bank, used.tolist())
            for slot in slots:
                self._slices.arrive(bank, slot)
            stand_ins = self._slices.views(self._block, bank, 0, span)
            bank.called = self._block, tuple(slots)
        for place, own_slot in enumerate(self._block.slots):
            stand_ins[place] = self._trained.bank(self._block, own_slot, used.tolist(), slots, stand_ins[place])
        numbers = torch.tensor(slots, device="cpu")[routing.where].to(self._device, routing.dtype)
        with standing_in(self._slices, self._module, self._names, stand_ins, span):
            return own(routing.hidden, numbers, routing.weights)

    def _in_rounds(self, own: Callable[..., Any], bank: Bank, routing: _Routing, used: torch.Tensor) -> Any:
        """As many experts at a time as the bank has room for: each round for the tokens that it is about, which want
        one expert each there; then the sum for each token, as the module makes it.

        None where that would round in another way: what a round gives has the dtype of hidden states. And with
        gradients, which would be added up in another order.
        """
        dtypes = {routing.hidden.dtype, routing.weights.dtype, *(slot.layout.dtype for slot in self._block.slots)}
        if len(dtypes) > 1 or torch.is_grad_enabled():
            return None
        flat, routed = routing.where.reshape(-1), routing.where.shape[-1]
        found: torch.Tensor | None = None
        for first in range(0, len(used), bank.slots):
            here = ((flat >= first) & (flat < first + bank.slots)).nonzero().squeeze(1)
            pairs = here.to(self._device)
            part = _Routing(
                routing.hidden[pairs // routed],
                routing.weights.reshape(-1)[pairs][:, None],
                flat[here][:, None] - first,
                routing.dtype,
            )
            given = self._at_once(own, bank, part, used[first : first + bank.slots])
            if found is None:
                found = given.new_empty(len(flat), *given.shape[1:])
            found.index_copy_(0, pairs, given)
        return None if found is None else found.view(*routing.where.shape, -1).sum(dim=1).to(routing.hidden.dtype)


class _Loop:
    """Experts that a module takes one by one, in ascending order: more of them than there are slots come in turns.

    A turn is half of the slots, so that the next one comes while the module computes with one; `used`: all in order.
    """

    def __init__(self, slices: Slices, block: Block, bank: Bank, used: list[int], trained: Trained) -> None:
        self._slices = slices
        self._block = block
        self._bank = bank
        self._used = used
        self._trained = trained
        self._turn_experts = len(used) if len(used) <= bank.slots else max(1, bank.slots // 2)
        self._slots: dict[int, list[int]] = {}  # of each turn that is there
        self._turn = -1
        self._gathered: list[torch.Tensor] = []  # by place
        self._begin(0)

    def one(self, place: int, number: int) -> torch.Tensor:
        """The weights of one of those that are used, of the parameter at that place of the block; maybe trained."""
        slot = self._block.slots[place]
        return self._trained.one(self._block, slot, self._used[number], lambda: self._take(place, number))

    def several(self, place: int, numbers: torch.Tensor) -> torch.Tensor:
        """A copy of those of each of these."""
        slot = self._block.slots[place]
        return self._trained.several(self._block, slot, self._used, numbers, lambda: self._gather(place, numbers))

    def _take(self, place: int, number: int) -> torch.Tensor:
        turn, at = divmod(number, self._turn_experts)
        if turn == self._turn + 1:
            self._begin(turn)
        if turn != self._turn:
            raise _NeedsAllError
        slot = self._slots[turn][at]
        self._slices.arrive(self._bank, slot)
        return self._slices.view(self._block, self._bank, slot, place)

    def _gather(self, place: int, numbers: torch.Tensor) -> torch.Tensor:
        """Those of all parameters are made when the first is asked for: they have the same experts."""
        if not self._gathered:
            wanted = numbers.to("cpu", torch.int64)
            with torch.no_grad():
                for number in range(len(self._used)):
                    here = (wanted == number).nonzero().squeeze(1).to(numbers.device)
                    weights = [self._take(at, number) for at in range(len(self._block.slots))]
                    if not self._gathered:
                        self._gathered = [weight.new_empty(len(wanted), *weight.shape) for weight in weights]
                    for gathered, weight in zip(self._gathered, weights, strict=True):
                        gathered[here] = weight
                    del weights, weight
        found, self._gathered[place] = self._gathered[place], self._gathered[place][:0]
        if len(found) != len(numbers):
            raise _NeedsAllError
        return found

    def _begin(self, turn: int) -> None:
        """The experts of a turn are there, and those of the next one come, where they have room beside them."""
        last = self._slots.pop(self._turn, [])
        own = self._slots.get(turn, [])
        more = (turn + 1) * self._turn_experts < len(self._used)
        if last and (not own or more) and not self._slices.is_unseen(self._bank, own):
            raise _NeedsAllError  # the module keeps an expert of the last turn, whose slot others would come to
        self._turn = turn
        if not own:
            own = self._slots[turn] = self._bring(turn, ())
        if more and 2 * self._turn_experts <= self._bank.slots and turn + 1 not in self._slots:
            self._slots[turn + 1] = self._bring(turn + 1, own)

    def _bring(self, turn: int, keep: Sequence[int]) -> list[int]:
        first = turn * self._turn_experts
        self._bank.called = None
        return self._slices.bring(self._block, self._bank, self._used[first : first + self._turn_experts], keep=keep)


class _OneByOne(torch.Tensor):
    """A weight of which single experts are there, when they are asked for by their number."""

    loop: _Loop
    place: int

    @classmethod
    def of(cls, loop: _Loop, place: int, slot: Slot, count: int) -> "_OneByOne":
        """For the parameter of that slot, which is at that place of the block; of `count` experts that are used."""
        empty = slot.absent[:1].expand(count, *slot.layout.shape[1:])
        weight: _OneByOne = make_subclass(cls, empty, False)
        weight.loop, weight.place = loop, place
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One expert, or what is asked about the weight; for anything else all have to be there."""
        name = getattr(func, "__name__", "")
        with without_overrides():
            if name == "__getitem__" and _is_one(args[1]):
                return args[0].loop.one(args[0].place, int(args[1]))
            if name == "__getitem__" and _is_several(args[1]):
                return args[0].loop.several(args[0].place, args[1])
            if name in _ASKS or (name == "__get__" and getattr(func.__self__, "__name__", "") in _ASKS):
                return func(*args, **(kwargs or {}))
        raise _NeedsAllError


# About a tensor, but for its values.
_ASKS = frozenset(("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "size", "dim", "is_floating_point"))


def _is_one(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.dim() == 0 and index.dtype in (torch.int64, torch.int32)
    return isinstance(index, int) and not isinstance(index, bool)


def _is_several(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dim() == 1 and index.dtype in (torch.int64, torch.int32)
