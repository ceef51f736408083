"""How does code written for MindIE-SD's enable_offload run on headrace? With the import changed.

What differs is in docs/coming_from/mindie_sd.md.
"""

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

import headrace
from headrace.compat.visiting import offload_some

BlockLists = list[tuple[nn.ModuleList, int]]


# Of each model: its block lists, each with its number of reserved blocks, and the handle that offloads them.
_enabled: "WeakKeyDictionary[nn.Module, tuple[BlockLists, headrace.Offloaded]]" = WeakKeyDictionary()


def enable_offload(model: nn.Module, blocks: nn.ModuleList, min_reserved_blocks_count: int = 2) -> None:
    """Makes `blocks` of `model` visit the device in turn; the first `min_reserved_blocks_count` and the rest stay.

    `blocks[:min_reserved_blocks_count]` stay; of the others, up to that many are loaded ahead. The device is this
    machine's accelerator, or the CPU if there is none. If you call it again for the same blocks, the new count applies;
    if you call it for other blocks of the model, these travel as well. If such a call raises, what was enabled before
    stays as it was.

    Raises TypeError when `model` or a block is not a Module, `blocks` is not a ModuleList, or the count is not an int.
    Raises ValueError for no blocks and for a count below 0 or not below `len(blocks)`, and what `headrace.offload`
    raises.
    """
    _check(model, blocks, min_reserved_blocks_count)
    lists, handle = _enabled.pop(model, ([], None))
    if handle is not None:
        handle.remove()
    others = [pair for pair in lists if pair[0] is not blocks]
    try:
        _offload(model, [*others, (blocks, min_reserved_blocks_count)])
    except Exception:
        if handle is not None:
            _offload(model, lists)
        raise


def handle_of(model: nn.Module) -> headrace.Offloaded:
    """The handle that `headrace.offload` returned for `model`; a new one after each `enable_offload`.

    Raises ValueError if `enable_offload` was not called for it.
    """
    if model not in _enabled:
        raise ValueError(f"this {type(model).__name__} is not offloaded; call enable_offload first")
    return _enabled[model][1]


def disable_offload(model: nn.Module) -> None:
    """Makes `model` an ordinary CPU model again. Raises ValueError if `enable_offload` was not called for it."""
    handle_of(model).remove()
    del _enabled[model]


def _offload(model: nn.Module, lists: BlockLists) -> None:
    """Offloads the lists. Of one with R reserved blocks, at most 2 R + 1 are on the device, as in the original."""
    travelling = [block for blocks, reserved in lists for block in blocks[reserved:]]
    visiting = max(min(reserved + 1, len(blocks) - reserved) for blocks, reserved in lists)
    _enabled[model] = lists, offload_some(model, travelling, visiting, prefetch=visiting - 1)


def _check(model: nn.Module, blocks: nn.ModuleList, count: int) -> None:
    _check_is(nn.Module, model, "model")
    _check_is(nn.ModuleList, blocks, "blocks")
    if len(blocks) == 0:
        raise ValueError("blocks is empty; give a torch.nn.ModuleList with at least one block")
    for index, block in enumerate(blocks._modules.values()):
        _check_is(nn.Module, block, f"blocks[{index}]")
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"min_reserved_blocks_count is a {type(count).__name__}; give an int")
    if not 0 <= count < len(blocks):
        raise ValueError(
            f"min_reserved_blocks_count is {count}; give 0 to {len(blocks) - 1}, fewer than the {len(blocks)} blocks"
        )


def _check_is(kind: type, given: Any, name: str) -> None:
    if not isinstance(given, kind):
        raise TypeError(f"{name} is a {type(given).__name__}; give a torch.nn.{kind.__name__}")
