"""How does a module compute with some of its experts? Its `forward` is ours: the experts that it uses come, and stand
in for all.

The host reads which experts are wanted, and so waits once for all that the device computes before the call. With PEFT's
`target_parameters`, a module around the experts folds low-rank factors into a whole weight in each call. Here it does
so for copies of only those experts that the call uses, numbered from zero. See docs/design/experts.md.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import nn

from headrace.errors import StateError
from headrace.memory.buffers import plain_tensors
from headrace.runtime.autograd import innermost_transform, overrides_are_on, without_overrides
from headrace.weights.model.experts import ExpertAccess, access_of, is_marked, named_index_of, routing_of
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.movement.banks import Bank
from headrace.weights.movement.block import Block, Presence
from headrace.weights.movement.slices import Slices
from headrace.weights.passes.call import Site
from headrace.weights.passes.expert_stand_ins import ExpertsOfCall, WeightOfExperts, standing_in
from headrace.weights.passes.lending import Lending
from headrace.weights.passes.row_gradients import RowGradients

_NEEDS_ALL = object()  # in the place of a module's output: the call needs all experts


@dataclass(eq=False)
class _Call:
    """A call of the `forward` of a module whose experts travel one by one."""

    block: Block
    module: nn.Module
    own: Callable[..., Any]  # the module's own forward, or that of what adapts the module's weights
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    used: list[int] | None = None  # the numbers of the experts that it uses, ascending, once somebody has read them

    @property
    def names(self) -> list[str]:
        """The module's names for the block's parameters, in order; none if the module has not all of them."""
        names = {id(held): name for name, held in dict.items(self.module._parameters)}
        found = [names.get(id(param.home)) for param in self.block.params if self.block.experts is not None]
        return [] if None in found else [name for name in found if name is not None]


class _Routing(NamedTuple):
    """The arguments of a call of transformers' experts: tokens, and the experts that each token wants."""

    hidden: torch.Tensor  # (tokens, features)
    weights: torch.Tensor  # (tokens, experts for each)
    where: torch.Tensor  # on the host, same shape: the position of each expert among those that are used
    dtype: torch.dtype  # of the numbers of experts, as the router gave them


class _AdaptedCall(NamedTuple):
    """A call of experts that have adapters."""

    wrappers: list[Any]  # outermost first: one for each adapted weight
    used: torch.Tensor  # the experts' numbers, ascending, on the host
    where: torch.Tensor  # the positions in `used` of each token's experts, on the host


class ExpertDispatch:
    """Runs calls of modules whose experts travel one by one. `call` is the engine's, for a visit to a whole block."""

    def __init__(self, lending: Lending, gradients: RowGradients, call: Callable[..., Any]) -> None:
        self._lending = lending
        self._device, self._executor = lending.passes.device, lending.passes.executor
        self._slices = self._executor.slices
        self._gradients = gradients
        self._call = call
        # Calls of adapted experts that are under way, by the module of experts and the thread.
        self._adapted: dict[tuple[nn.Module, int], _AdaptedCall] = {}

    def compute(
        self, site: Site, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a call of `module`. `own` is its own `forward`; `site` is for a call that needs all experts."""
        block = site.blocks[-1]
        call = _Call(block, module, own, args, kwargs)
        adapted = self._adapted.get((module, get_ident()))
        found: Any
        if adapted is not None:
            found = self._with_adapters(adapted, call)
            self._gradients.note_way(block, adapted.used.tolist(), found, whole=False)
            return found
        can_part = bool(call.names)
        found = _NEEDS_ALL
        if can_part and not self._gradients.is_known_whole(block):
            found = self._of_own_module(call) if is_marked(module) else self._of_transformers(call)
        elif can_part and not is_marked(module) and not self._gradients.trains(block):
            with without_overrides():
                self._executor.let_travel_whole(block)
        whole = found is _NEEDS_ALL
        if whole:
            found = self._call(site, module, own, args, kwargs)
        self._gradients.note_way(block, call.used, found, whole=whole)
        return found

    def _of_own_module(self, call: _Call) -> Any:
        """Runs a call of a user's own module, which names the argument that says which experts it uses."""
        index = named_index_of(call.module, call.own, call.args, call.kwargs)
        if index is None or not self._goes_by_slices(call.block, ()):
            return _NEEDS_ALL
        used, _ = _unique(index)
        return _NEEDS_ALL if self._comes_whole(call, used) else self._by_number(call)

    def _of_transformers(self, call: _Call) -> Any:
        """Runs a call of a module with transformers' interface, unless the instance was given another forward."""
        routing, access = routing_of(call.module, call.args, call.kwargs), access_of(call.module)
        is_of_class = getattr(call.own, "func", None) is type(call.module).forward
        if not is_of_class or routing is None or access is None or not self._goes_by_slices(call.block, routing):
            return _NEEDS_ALL
        hidden, index, weights = routing
        used, where = _unique(index)
        if not _are_numbers_of(call.block, used) or self._comes_whole(call, used):
            return _NEEDS_ALL
        if access is not ExpertAccess.ONE_BY_ONE:
            with without_overrides():
                bank = self._slices.bank_of(call.block, len(used))
            if len(used) <= bank.slots:
                return self._at_once(call, bank, _Routing(hidden, weights, where, index.dtype), used)
            if access is ExpertAccess.GROUPED:
                return self._in_rounds(call, bank, _Routing(hidden, weights, where, index.dtype), used)
            del bank  # the block may need its memory
        return self._by_number(call, gathers=access is ExpertAccess.GATHERED)

    def _by_number(self, call: _Call, *, gathers: bool = False) -> Any:
        """Runs the call with stand-ins from which the module takes experts by their usual numbers."""
        with without_overrides():
            asked = ExpertsOfCall(self._slices, call.block, call.used or (), self._gradients, gathers=gathers)
            stand_ins = [WeightOfExperts.of(asked, place, param) for place, param in enumerate(call.block.params)]
        try:
            with standing_in(self._slices, call.module, call.names, stand_ins):
                return call.own(*call.args, **call.kwargs)
        finally:
            with without_overrides():
                asked.let_go()
            if asked.whole:
                self._gradients.note_whole(call.block)

    def _at_once(self, call: _Call, bank: Bank, routing: _Routing, used: torch.Tensor) -> Any:
        """Runs the call with all experts that it uses in the bank at once. Experts go by the numbers of their slots. No
        output depends on these; gradients of tokens do if added up by expert: then slots are in order.
        """
        block, slices, trains = call.block, self._slices, self._gradients.trains(call.block)
        with without_overrides():
            # Gradients of tokens are added up in the order in which tokens are grouped by expert.
            in_order = trains or (torch.is_grad_enabled() and access_of(call.module) is ExpertAccess.GROUPED)
            # A stand-in is as large as the weight, or has no slot too many: autograd makes a gradient of its size. A
            # checkpoint may compute again with a bank of another size, if all experts fit into both or into neither.
            count = 0 if block.experts is None else block.experts.count
            span = bank.slots if not in_order else count if count <= bank.slots else len(used)
            if in_order:
                slots = slices.bring_in_order(block, bank, used.tolist(), span)
            else:
                slots = slices.bring(block, bank, used.tolist())
            for slot in slots:
                slices.arrive(bank, slot)
            views = slices.views(block, bank, 0, span)
            bank.in_call = block, tuple(slots)
        places = torch.tensor(slots, device="cpu")

        def trained(param: ManagedParam, view: torch.Tensor) -> torch.Tensor:
            # The places are saved for backward: a checkpoint may recompute with others, and saves those.
            alone = partial(self._gradients.alone, block)
            return self._gradients.computed(param, lambda: view, used, alone, _rows_at, places)

        stand_ins = list(map(trained, block.params, views))
        numbers = places[routing.where].to(self._device, routing.dtype)
        with standing_in(slices, call.module, call.names, stand_ins, span):
            return call.own(routing.hidden, numbers, routing.weights)

    def _in_rounds(self, call: _Call, bank: Bank, routing: _Routing, used: torch.Tensor) -> Any:
        """Runs the call in rounds, each with as many experts as the bank has room for. A round computes each pair of a
        token and an expert that it has; then the results of each token are added up, as the module does it.

        _NEEDS_ALL where rounds would round differently (their results have the dtype of hidden states), and with
        gradients, which would be added up in another order.
        """
        dtypes = {routing.hidden.dtype, routing.weights.dtype, *(param.layout.dtype for param in call.block.params)}
        if len(dtypes) > 1 or torch.is_grad_enabled():
            return _NEEDS_ALL
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
            given = self._at_once(call, bank, part, used[first : first + bank.slots])
            if found is None:
                found = given.new_empty(len(flat), *given.shape[1:])
            found.index_copy_(0, pairs, given)
        if found is None:
            return _NEEDS_ALL
        return found.view(*routing.where.shape, -1).sum(dim=1).to(routing.hidden.dtype)

    # adapters ---------------------------------------------------------------------------------------------------------
    def adapt(self, wrapper: Any, site: Site, module: nn.Module, own: Any, args: Any, kwargs: Any) -> Any:
        """Runs a call of `wrapper`, which adapts a weight of `module`, a module of experts whose `all_experts` is
        `site`. `own` is the wrapper's own `forward`, which needs all experts.
        """
        here = module, get_ident()
        if here in self._adapted:
            return wrapper.base_layer(*args, **kwargs)
        adapted = self._adapted_call(wrapper, _Call(site.blocks[-1], module, own, args, kwargs))
        if adapted is None:
            return own(*args, **kwargs)
        self._adapted[here] = adapted
        try:
            return wrapper.base_layer(*args, **kwargs)
        finally:
            del self._adapted[here]

    def _adapted_call(self, wrapper: Any, call: _Call) -> _AdaptedCall | None:
        block, module = call.block, call.module
        if is_marked(module) or "parametrizations" in module._modules:
            return None
        wrappers, routing = _wrappers_of(wrapper), routing_of(module, call.args, call.kwargs)
        if wrappers is None or routing is None or access_of(module) is None or not call.names:
            return None
        if self._gradients.trains(block) or not self._goes_by_slices(block, routing):
            return None
        used, where = _unique(routing[1])
        if not _are_numbers_of(block, used) or self._comes_whole(call, used):
            return None
        return _AdaptedCall(wrappers, used, where)

    def _with_adapters(self, adapted: _AdaptedCall, call: _Call) -> Any:
        """The output of the module where only the used experts, with adapters folded in, stand in the place of all."""
        slices, names, routing = self._slices, call.names, routing_of(call.module, call.args, call.kwargs)
        if not names or routing is None:
            raise StateError(f"experts {call.block.name!r} were replaced within a call of what adapts them")
        hidden, index, of_routing = routing
        weights = dict(zip(names, _copies(slices, call.block, adapted.used.tolist()), strict=True))
        numbers = adapted.used.to(self._device)
        with standing_in(slices, call.module, names, list(weights.values())):
            for wrapper in adapted.wrappers:
                weights[wrapper.parameter_name] = _folded(wrapper, weights[wrapper.parameter_name], numbers)
        with standing_in(slices, call.module, names, list(weights.values()), len(adapted.used)):
            weights.clear()
            return call.own(hidden, adapted.where.to(self._device, index.dtype), of_routing)

    # which way --------------------------------------------------------------------------------------------------------
    def _goes_by_slices(self, block: Block, routing: Iterable[torch.Tensor]) -> bool:
        """Whether a call may be computed with single experts, as far as is known before these are counted."""
        return (
            (block.presence is Presence.ABSENT or self._gradients.trains(block) or self._gradients.went_in_parts(block))
            and all(type(one) in (torch.Tensor, nn.Parameter) for one in routing)
            and all(one.device == self._device for one in routing)
            and self._lending.computes
            and overrides_are_on()  # stand-ins notice through them how they are used
            and innermost_transform() is None
        )

    def _comes_whole(self, call: _Call, used: torch.Tensor) -> bool:
        """Notes which experts the call uses. Returns whether it is better done with all."""
        call.used = used.tolist()
        return self._gradients.comes_whole(call.block, call.used)


def _unique(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of experts in `index`, ascending, and each element's position among them: both on the host."""
    with without_overrides(), plain_tensors():
        used, where = torch.unique(index.detach().to("cpu", torch.int64), return_inverse=True)
        return used, where


def _rows_at(gradient: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return gradient.index_select(0, places.to(gradient.device))


def _are_numbers_of(block: Block, used: torch.Tensor) -> bool:
    """Whether the block has experts of all these numbers, ascending and at least one."""
    return block.experts is not None and 0 <= int(used[0]) <= int(used[-1]) < block.experts.count


# adapters -----------------------------------------------------------------------------------------------------------
def adapts_experts(module: nn.Module) -> bool:
    """Whether the module is PEFT's wrapper around a module of which it adapts a weight."""
    kind = type(module)
    return kind.__name__ == "ParamWrapper" and kind.__module__ == "peft.tuners.lora.layer"


def _wrappers_of(outermost: Any) -> list[Any] | None:
    """All wrappers around the experts, if each folds one adapter in; None if one does something else."""
    found, module = [], outermost
    while adapts_experts(module):
        active = [name for name in module.active_adapters if name in module.lora_A]
        if module.disable_adapters or module.merged or len(active) != 1 or module.num_experts < 2:
            return None
        found.append(module)
        module = module.base_layer
    return found


def _folded(wrapper: Any, weight: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    (adapter,) = (name for name in wrapper.active_adapters if name in wrapper.lora_A)
    left, right, scaling = wrapper.get_delta_factors(adapter)
    with torch.autocast(device_type=weight.device.type, enabled=False):  # as PEFT has it
        return weight.baddbmm_(_selected(left, numbers), _selected(right, numbers), alpha=scaling)


def _selected(factors: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The factors of these experts, laid out as those of all are: some CPUs round a product by its factors' layout."""
    order = sorted(range(factors.dim()), key=factors.stride, reverse=True)
    selected = factors.permute(order).index_select(order.index(0), numbers)
    return selected.permute([order.index(dim) for dim in range(factors.dim())])


def _copies(slices: Slices, block: Block, used: list[int]) -> Iterator[torch.Tensor]:
    """A copy of these experts for each of the block's weights. As many experts come at a time as there are slots."""
    bank = slices.bank_of(block, len(used))
    device = bank.buffer.device
    copies = [
        torch.empty((len(used), *param.layout.shape[1:]), dtype=param.layout.dtype, device=device)
        for param in block.params
    ]
    with torch.no_grad():
        for first in range(0, len(used), bank.slots):
            bank.in_call = None
            slots = slices.bring(block, bank, used[first : first + bank.slots])
            for number, slot in enumerate(slots, first):
                slices.arrive(bank, slot)
                for place, copy in enumerate(copies):
                    copy[number].copy_(slices.view(block, bank, slot, place))
    yield from copies
