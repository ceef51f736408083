"""What do modules note while they compute? Attributes and buffers: those that take turns would see each other's."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["ModuleStates"]

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# What is compared elsewhere, is ours, or is a list of handles that transformers keeps of hooks.
_NOT_COMPARED = frozenset(
    ("_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs", "_require_grads_hooks")
)
_MOST_BUFFER_BYTES = 1 << 20  # larger ones are tables or packed weights, which no forward writes
_MISSING = object()


class ModuleStates:
    """What modules have noted, and their buffers, as they were when this was made. Not during a pass."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = list(modules)
        self._attributes = [_attributes_of(module) for _, module in self._modules]
        self._compared: list[tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = []
        self._buffers = [
            (module._buffers, name, buffer, buffer.detach().clone())
            for _, module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.nbytes <= _MOST_BUFFER_BYTES
        ]

    def changed_attribute(self) -> str | None:
        """The name of an attribute that is another one now than when this was asked first, or holds others; None: none.

        Not than before: a first call may set something up for good (hooks of transformers).
        """
        if not self._compared:
            attributes = [_attributes_of(module) for _, module in self._modules]
            self._compared = [(each, _within(each)) for each in attributes]
        for (name, module), (before, within) in zip(self._modules, self._compared, strict=True):
            now = _attributes_of(module)
            for key in now if len(now) >= len(before) else before:
                if not _same(before.get(key, _MISSING), now.get(key, _MISSING)):
                    return f"{name}.{key}" if name else key
            if any(held != _holds(now[key]) for key, held in within.items()):
                return name or type(module).__name__
        return None

    def buffers_changed(self) -> bool:
        """Whether a buffer holds something else than before."""
        return any(
            container.get(name) is not buffer or not torch.equal(buffer, before)
            for container, name, buffer, before in self._buffers
        )

    def restore(self) -> None:
        """As it was; what lists and dicts hold excepted."""
        for (_, module), before in zip(self._modules, self._attributes, strict=True):
            for key in _attributes_of(module).keys() - before.keys():
                del module.__dict__[key]
            module.__dict__.update(before)
        with torch.no_grad():
            for container, name, buffer, values in self._buffers:
                container[name] = buffer
                buffer.copy_(values)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in module.__dict__.items() if key not in _NOT_COMPARED}


def _within(attributes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What lists, dicts and sets hold."""
    return {key: _holds(value) for key, value in attributes.items() if isinstance(value, dict | list | set)}


def _holds(container: Any) -> tuple[int, ...]:
    return tuple(map(id, container.values() if isinstance(container, dict) else container))


def _same(before: Any, now: Any) -> bool:
    return before is now or (isinstance(before, _SIMPLE) and type(before) is type(now) and before == now)
