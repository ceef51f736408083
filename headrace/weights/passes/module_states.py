"""What do modules note while they compute? Attributes and buffers, which micro-batches that take turns would share."""

from collections.abc import Iterable
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.runtime.tensors import tensors_in
from headrace.weights.model.home import Leaf

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# Attributes that are compared elsewhere, or are ours.
_NOT_COMPARED = frozenset(("_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"))
# Hooks of which a second one makes no difference. transformers puts another one on with each call of
# activation_checkpointing_enable().
_IDEMPOTENT = frozenset(("PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads",))
_MOST_BUFFER_BYTES = 1 << 20  # larger ones are tables or packed weights, which no forward writes
_MISSING = object()


class ModuleStates:
    """Modules' attributes and buffers as they were when this was made. To be made between passes."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = list(modules)
        self._attributes = [_attributes_of(module) for _, module in self._modules]
        self._compared: list[tuple[dict[str, Any], dict[str, list[Any]]]] = []
        self._buffers = [
            (module._buffers, name, buffer, buffer.detach().clone())
            for _, module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.nbytes <= _MOST_BUFFER_BYTES
        ]
        self._turn = 0
        self._used_in: list[set[int]] = [set() for _ in self._buffers]  # turns in which each was used or replaced
        self._here: list[torch.Tensor | None] = []  # what modules compute with in the place of each
        self._numbers: dict[int, int] = {}  # the positions of these, by id

    def changed_attribute(self) -> str | None:
        """The name of an attribute that is, or holds, something else now than when this was first asked; None: none.

        What came before is not compared: a first call may set something up for good (hooks of transformers).
        """
        if not self._compared:
            attributes = [_attributes_of(module) for _, module in self._modules]
            self._compared = [(each, _within(each)) for each in attributes]
        for (name, module), (before, within) in zip(self._modules, self._compared, strict=True):
            key = _changed_key(module, before, within)
            if key is not None:
                return f"{name}.{key}" if name else key
        return None

    def look_at_buffers(self, turn: int) -> None:
        """A micro-batch goes on, or has stopped, in this turn: notes buffers that were replaced since the last look."""
        before, self._turn = self._here, turn
        self._here = [container.get(name) for container, name, _, _ in self._buffers]
        self._numbers = {id(held): number for number, held in enumerate(self._here) if held is not None}
        for used_in, held, was in zip(self._used_in, self._here, before or self._here, strict=True):
            if held is not was:
                used_in.add(turn)

    def note_use(self, value: Any) -> None:
        """Notes that a torch function uses the buffers in `value`."""
        for tensor in tensors_in(value):
            number = self._numbers.get(id(tensor))
            if number is not None:
                self._used_in[number].add(self._turn)

    def buffers_changed(self) -> bool:
        """Whether a buffer holds something else than when this was made."""
        return any(map(self._has_changed, range(len(self._buffers))))

    def shared_buffer(self) -> str | None:
        """The name of a buffer that was written, and used in several turns, with others in between; None: none.

        Not to be asked during a pass.
        """
        numbers = (number for number, turns in enumerate(self._used_in) if len(turns) > 1)
        return next((self._buffers[number][1] for number in numbers if self._has_changed(number)), None)

    def _has_changed(self, number: int) -> bool:
        container, name, buffer, before = self._buffers[number]
        return container.get(name) is not buffer or not torch.equal(buffer, before)

    def restore(self) -> None:
        """Sets attributes and buffers back to what they were, but not what lists and dicts hold."""
        for (_, module), before in zip(self._modules, self._attributes, strict=True):
            for key in _attributes_of(module).keys() - before.keys():
                del module.__dict__[key]
            module.__dict__.update(before)
        with torch.no_grad():
            for container, name, buffer, values in self._buffers:
                container[name] = buffer
                buffer.copy_(values)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in module.__dict__.items() if _is_compared(key, value)}


def _is_compared(key: str, value: Any) -> bool:
    return key not in _NOT_COMPARED and not issubclass(type(value), Leaf)


def _changed_key(module: nn.Module, before: dict[str, Any], within: dict[str, list[Any]]) -> str | None:
    """An attribute that is not as before, or holds something else than `within`; None: none."""
    if not before.keys() <= module.__dict__.keys():
        return min(before.keys() - module.__dict__.keys())
    for key, value in module.__dict__.items():
        was, held = before.get(key, _MISSING), within.get(key)
        if held is not None and type(was) is type(value):
            same = not (held or value) or _same_within(held, _holds(key, value))  # nearly all are empty
        else:
            same = _same(was, value) or (was is _MISSING and not _is_compared(key, value))
        if not same:
            return key
    return None


def _within(attributes: dict[str, Any]) -> dict[str, list[Any]]:
    """What each attribute that is a list, dict or set holds."""
    return {key: _holds(key, value) for key, value in attributes.items() if isinstance(value, dict | list | set)}


def _holds(name: str, container: Any) -> list[Any]:
    """What a container holds. Of hooks it leaves the keys out, which are numbers that are given anew each time."""
    if not isinstance(container, dict):
        return list(container)
    if not name.endswith("_hooks"):
        return [*container, *container.values()]
    known = {getattr(hook, "__qualname__", "") for hook in container.values()} & _IDEMPOTENT
    return [*known, *(hook for hook in container.values() if getattr(hook, "__qualname__", "") not in known)]


def _same(before: Any, now: Any, depth: int = 3) -> bool:
    """Whether two values compute the same, as functions do that come of the same `def` and enclose the same."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, FunctionType | partial) and depth:  # a function may enclose itself
        return _same_within(_parts(before), _parts(now), depth - 1)
    return isinstance(before, RemovableHandle) or (isinstance(before, _SIMPLE) and bool(before == now))


def _same_within(before: list[Any], now: list[Any], depth: int = 3) -> bool:
    return len(before) == len(now) and all(_same(*both, depth) for both in zip(before, now, strict=True))


def _parts(function: "FunctionType | partial[Any]") -> list[Any]:
    """All that decides what a function computes."""
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords, *function.keywords.values()]
    named = function.__kwdefaults__ or {}
    return [
        function.__code__,
        *(_content(cell) for cell in function.__closure__ or ()),
        *(function.__defaults__ or ()),
        *named,
        *named.values(),
    ]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING
