"""How does code written for MindIE-SD's enable_offload run on headrace? With the import changed.

| MindIE-SD | here |
|---|---|
| `enable_offload(model, blocks, min_reserved_blocks_count=2)` returns None | the same |
| `model.to("npu")` afterwards puts the rest of the model on the device | the rest is `resident`; `.to()` is harmless |
| the device is the NPU | the machine's accelerator, else the CPU |
| blocks 0 to R-1 stay, R = `min_reserved_blocks_count` | the same (`resident=`) |
| at most min(2R + 1, N) blocks are on the device: R is how far it prefetches, too | the same (`device_memory=`) |
| TypeError: `model` or a block is no Module, `blocks` no ModuleList, the count no int | the same |
| ValueError: no blocks, a count below 0 or not below `len(blocks)` | the same |
| inference only | training, too |
| one list of blocks for a model | several, one call for each |
| a block may not be skipped, called twice or share weights | it may |
| `model.blocks` and other attributes are set | no attribute is set |
| no way back | `disable_offload(model)` |
| nothing to ask | `handle_of(model)`: `report()`, `stats()`, `remove()` |
| beside DyEPLB, which moves experts: "adjust execution timing" | `with handle_of(model).copies_paused():`, or |
| | `handle_of(model).limit_copies("8GB")` |
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

import headrace
from headrace.compat.sizes import module_bytes, parameter_pattern, tensor_bytes


@dataclass
class _Enabled:
    """The block lists of one model with their counts of reserved blocks, and what offloads them."""

    lists: list[tuple[nn.ModuleList, int]] = field(default_factory=list)
    handle: headrace.Offloaded | None = None


_enabled: "WeakKeyDictionary[nn.Module, _Enabled]" = WeakKeyDictionary()


def enable_offload(model: nn.Module, blocks: nn.ModuleList, min_reserved_blocks_count: int = 2) -> None:
    """Blocks of `model` visit the device in turn; the first `min_reserved_blocks_count` and all else stay there.

    Raises TypeError and ValueError for arguments as listed above, and what `headrace.offload` raises. If it is
    called again for the same blocks, the new count applies; if for other blocks of the model, these travel as well. If
    such a call raises, what was enabled before stays as it was.
    """
    _check(model, blocks, min_reserved_blocks_count)
    enabled = _enabled.setdefault(model, _Enabled())
    before = enabled.lists
    enabled.lists = [pair for pair in before if pair[0] is not blocks] + [(blocks, min_reserved_blocks_count)]
    if enabled.handle is not None:
        enabled.handle.remove()
        enabled.handle = None
    try:
        enabled.handle = _offload(model, enabled.lists)
    except Exception:
        enabled.lists = before
        if before:
            enabled.handle = _offload(model, before)
        else:
            del _enabled[model]
        raise


def handle_of(model: nn.Module) -> headrace.Offloaded:
    """The handle that `headrace.offload` returned for `model`; a new one after each `enable_offload`.

    Raises ValueError when `enable_offload` was not called for it.
    """
    enabled = _enabled.get(model)
    if enabled is None or enabled.handle is None:
        raise ValueError(f"this {type(model).__name__} is not offloaded; call enable_offload first")
    return enabled.handle


def disable_offload(model: nn.Module) -> None:
    """`model` is an ordinary CPU model again. Raises ValueError when `enable_offload` was not called for it."""
    handle_of(model).remove()
    del _enabled[model]


def _offload(model: nn.Module, lists: list[tuple[nn.ModuleList, int]]) -> headrace.Offloaded:
    travelling = [block for blocks, reserved in lists for block in blocks[reserved:]]
    inside = {id(parameter) for block in travelling for parameter in block.parameters()}
    staying = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in inside}
    visiting = max(min(reserved + 1, len(blocks) - reserved) for blocks, reserved in lists)
    staying_bytes = tensor_bytes(staying.values()) + tensor_bytes(model.buffers())
    return headrace.offload(
        model,
        device_memory=staying_bytes + visiting * max(map(module_bytes, travelling)),
        blocks=travelling,
        resident=[parameter_pattern(name) for name in staying],
        prefetch=visiting - 1,
    )


def _check(model: nn.Module, blocks: nn.ModuleList, count: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if not isinstance(blocks, nn.ModuleList):
        raise TypeError(f"blocks is a {type(blocks).__name__}; give a torch.nn.ModuleList of the model")
    if len(blocks) == 0:
        raise ValueError("blocks is empty; give a torch.nn.ModuleList with at least one block")
    for index, block in enumerate(_elements(blocks)):
        if not isinstance(block, nn.Module):
            raise TypeError(f"blocks[{index}] is a {type(block).__name__}; give a torch.nn.Module")
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"min_reserved_blocks_count is a {type(count).__name__}; give an int")
    if not 0 <= count < len(blocks):
        raise ValueError(
            f"min_reserved_blocks_count is {count}; give 0 to {len(blocks) - 1}, fewer than the {len(blocks)} blocks"
        )


def _elements(blocks: nn.ModuleList) -> Iterator[object]:
    """What the list holds, whatever was put there: assigning to `_modules` is not checked by PyTorch."""
    yield from blocks._modules.values()
