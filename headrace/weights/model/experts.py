"""Which weights may travel expert by expert? Those of modules that pick experts by their numbers, and do nothing else.

See docs/design/experts.md. The first dimension of such weights is that of experts. The modules are either behind the
experts interface of transformers, where `experts(hidden_states, top_k_index, top_k_weights)` says which experts a call
wants, or the user's own, for which the user named the argument that says it (`headrace.experts`).
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from headrace.memory.arena import KERNEL_ALIGNMENT_BYTES, aligned
from headrace.runtime.tensors import is_integer
from headrace.weights.model.inventory import Inventory
from headrace.weights.model.layout import travel_dtype
from headrace.weights.model.managed_param import Layout

_LISTS = "experts"  # names of lists of experts end with this
_ARGUMENT = "_headrace_experts_argument"  # attribute of a marked module; copies of the module have it, too
_LEAST_SLOTS = 2  # for a marked module: one expert comes while another computes

# The attributes that transformers' `use_experts_implementation` gives each instance.
_MARKS = ("num_experts", "config", "has_gate", "has_bias", "is_transposed", "is_concatenated", "_is_expert_parallel")
_INTERFACE = "transformers.integrations.moe"  # the module that has this function
# The names that configs have for the number of experts that a token is sent to.
_ROUTED = ("num_experts_per_tok", "moe_topk", "top_k_experts")


class ExpertAccess(Enum):
    """How a call takes experts out of its weights."""

    ONE_BY_ONE = auto()  # in a loop over the experts that it uses, in ascending order
    GATHERED = auto()  # copies the expert once for each pair of token and expert
    GROUPED = auto()  # by one kernel, for all tokens of an expert together


_ACCESS = {
    None: ExpertAccess.ONE_BY_ONE,
    "eager": ExpertAccess.ONE_BY_ONE,
    "batched_mm": ExpertAccess.GATHERED,
    "grouped_mm": ExpertAccess.GROUPED,
}


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Weights that can travel expert by expert: the number of experts, bytes of one, and how many a token needs."""

    count: int
    slice_bytes: int
    routed: int


@dataclass(frozen=True, kw_only=True)
class SlicePart:
    """One parameter's part of an expert's slice."""

    offset: int  # bytes from the start of the slice
    nbytes: int
    layout: Layout  # the whole parameter's, in its block

    def view(self, memory: torch.Tensor, slot_bytes: int, first: int, count: int) -> torch.Tensor:
        """This part of the slices in slots `first` to `first + count` of `memory`, which is uint8: shape (count, ...).

        The view has a version counter of its own, which writes to other slots do not raise.
        """
        strides = (slot_bytes // self.layout.dtype.itemsize, *self.layout.stride[1:])
        return self._view(memory, slot_bytes, first, (count, *self.layout.shape[1:]), strides)

    def view_of_one(self, memory: torch.Tensor, slot_bytes: int, slot: int) -> torch.Tensor:
        """This part of the slice in one slot. It is no view of another tensor, so it alone refers to the memory."""
        return self._view(memory, slot_bytes, slot, self.layout.shape[1:], self.layout.stride[1:])

    def _view(self, memory: torch.Tensor, slot_bytes: int, slot: int, shape: Any, strides: Any) -> torch.Tensor:
        view = torch.empty(0, dtype=self.layout.dtype, device=memory.device)
        begin = (slot * slot_bytes + self.offset) // self.layout.dtype.itemsize
        return view.set_(memory.untyped_storage(), begin, shape, strides)


def slice_parts(layouts: Sequence[Layout]) -> tuple[list[SlicePart], int]:
    """The parts of one expert's slice, in the order of the parameters, and the bytes of the whole slice."""
    parts, end = [], 0
    for layout in layouts:
        nbytes = layout.nbytes // layout.shape[0]
        parts.append(SlicePart(offset=end, nbytes=nbytes, layout=layout))
        end += _part_bytes(nbytes)
    return parts, end


def _part_bytes(nbytes: int) -> int:
    """What a part takes in a slice. Small ones take as much as others, or matrices behind them, and in the next slot,
    would not lie as kernels ask for.
    """
    return aligned(max(nbytes, KERNEL_ALIGNMENT_BYTES))


def experts_of(module: nn.Module, inventory: Inventory) -> Experts | None:
    """The experts of the module, if its weights can travel expert by expert; else None."""
    keys = inventory.owned.get(module, ())
    marked = is_marked(module)
    if not keys or not (marked or picks_experts(module)) or list(keys) != inventory.below(module):
        return None
    count: Any = inventory.members[keys[0]].parameter.shape[0] if marked else module.__dict__["num_experts"]
    slice_bytes = 0
    for key in keys:
        parameter = inventory.members[key].parameter
        enough_dims = parameter.dim() >= (1 if marked else 2)
        if not (enough_dims and parameter.shape[0] == count and inventory.can_be_cut(key)):
            return None
        slice_bytes += _part_bytes(parameter[0].numel() * travel_dtype(parameter, inventory.param_dtype).itemsize)
    return Experts(count=count, slice_bytes=slice_bytes, routed=min(count, _LEAST_SLOTS if marked else _routed(module)))


def mark_experts(module: nn.Module, argument: str | None) -> None:
    """Marks a user's module whose weights have experts as first dimension; `argument` says which ones a call uses.

    With None the module is a list of modules that are experts.
    """
    module.__dict__[_ARGUMENT] = argument


def is_marked(module: nn.Module) -> bool:
    """Whether `mark_experts` was called for the module."""
    return _ARGUMENT in module.__dict__


def lists_experts(module: nn.Module, name: str, *, by_name: bool) -> bool:
    """Whether the module is a list or dict of experts: modules of which one call of the layer calls only some.

    A list counts if it is marked, or, with `by_name`, if its name says so.
    """
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    own_name = name.rpartition(".")[2]
    called_so = own_name.endswith(_LISTS) and not own_name.startswith("shared")
    children = list(module.children())
    kinds = {(type(child), isinstance(child, nn.ModuleList | nn.ModuleDict)) for child in children}
    return (
        ((by_name and called_so) or is_marked(module)) and len(children) > 1 and len(kinds) == 1 and not kinds.pop()[1]
    )


def named_index_of(module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that says which experts a call of a marked module uses; None if it is no tensor of integers."""
    try:
        found = inspect.signature(own).bind(*args, **kwargs).arguments.get(module.__dict__[_ARGUMENT])
    except TypeError:  # the call itself will raise it
        return None
    return found if isinstance(found, torch.Tensor) and is_integer(found) else None


def picks_experts(module: nn.Module) -> bool:
    """Whether its forward is transformers' own, which picks an implementation, and nothing else uses expert numbers."""
    return (
        all(mark in module.__dict__ for mark in _MARKS)
        and "forward" not in module.__dict__
        and getattr(type(module).forward, "__globals__", {}).get("__name__") == _INTERFACE
        and len(_names(type(module).forward)) >= 3
        and not module._buffers
    )


@functools.cache
def _names(forward: Callable[..., Any]) -> list[str]:
    """The names of a method's arguments, without `self`."""
    return list(inspect.signature(forward).parameters)[1:]


def _routed(module: Any) -> int:
    """How many experts one token is sent to: as the config says, else a quarter of them."""
    values = (getattr(module.config, name, None) for name in _ROUTED)
    return next((value for value in values if isinstance(value, int)), max(1, module.num_experts // 4))


def access_of(module: Any) -> ExpertAccess | None:
    """How a call of the module takes experts at present; None if its implementation is unknown."""
    if module._is_expert_parallel:
        return None
    return _ACCESS.get(module.config._experts_implementation)


def takes_single_experts(module: nn.Module) -> bool:
    """Whether calls of the module work with some experts at a time, even if a backward follows."""
    return is_marked(module) or access_of(module) in (ExpertAccess.ONE_BY_ONE, ExpertAccess.GATHERED)


def routing_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The hidden states, expert numbers and expert weights of a call; None if its arguments are anything else."""
    given = [*args, *(kwargs[name] for name in _names(type(module).forward)[len(args) :] if name in kwargs)]
    if len(given) != 3 or len(given) != len(args) + len(kwargs):
        return None
    hidden, index, weights = given
    tensors = all(isinstance(one, torch.Tensor) for one in given)
    whole = tensors and not index.dtype.is_floating_point and index.dim() == 2 and hidden.dim() == 2
    return (hidden, index, weights) if whole and hidden.shape[0] == index.shape[0] and index.numel() else None
