"""How do experts compute that have adapters on their weights? With copies of those that are used, adapters folded in.

With PEFT's `target_parameters`, a module around the experts folds low-rank factors into a whole weight in each call.
Here it does so for only those experts that the call uses, numbered from zero. See docs/design/experts.md.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from headrace.weights.movement.block import Block
from headrace.weights.movement.slices import Slices
from headrace.weights.passes.expert_stand_ins import standing_in

__all__ = ["AdaptedCall", "adapts_experts", "compute_adapted", "wrappers_of"]


def adapts_experts(module: nn.Module) -> bool:
    """Whether the module is PEFT's wrapper around a module of which it adapts a weight."""
    kind = type(module)
    return kind.__name__ == "ParamWrapper" and kind.__module__ == "peft.tuners.lora.layer"


class AdaptedCall(NamedTuple):
    """A call of experts that have adapters."""

    wrappers: list[Any]  # outermost first: one for each adapted weight
    used: torch.Tensor  # the experts' numbers, ascending, on the host
    where: torch.Tensor  # the positions in `used` of each token's experts, on the host


def wrappers_of(outermost: Any) -> list[Any] | None:
    """All wrappers around the experts, if each folds one adapter in; None if one does something else."""
    found, module = [], outermost
    while adapts_experts(module):
        active = [name for name in module.active_adapters if name in module.lora_A]
        if module.disable_adapters or module.merged or len(active) != 1 or module.num_experts < 2:
            return None
        found.append(module)
        module = module.base_layer
    return found


def compute_adapted(
    slices: Slices, block: Block, module: Any, names: list[str], call: AdaptedCall, own: Callable[[], Any]
) -> Any:
    """The output of `own` where only the used experts, with adapters folded in, stand in the place of all."""
    weights = dict(zip(names, _copies(slices, block, call.used.tolist()), strict=True))
    numbers = call.used.to(next(iter(weights.values())).device)
    with standing_in(slices, module, names, list(weights.values())):
        for wrapper in call.wrappers:
            weights[wrapper.parameter_name] = _folded(wrapper, weights[wrapper.parameter_name], numbers)
    with standing_in(slices, module, names, list(weights.values()), len(call.used)):
        weights.clear()
        return own()


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
