"""When does a forward begin and end? With the outermost call of the model, or with a block of code around calls.

One thread at a time: calls of another one meanwhile go as without headrace, as do those of a part of the model alone.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from headrace.activations.book import entry_of
from headrace.activations.passes import Forward, Passes
from headrace.activations.saving import may_save, pop_left_over
from headrace.activations.selection import Selection
from headrace.errors import StateError
from headrace.runtime.autograd import NO_TASK, backward_task, in_backward
from headrace.runtime.fibers import own_thread

__all__ = ["Calls"]


class Calls:
    """The calls of one model. `check` raises where the model cannot be offloaded now."""

    def __init__(
        self,
        model: nn.Module,
        passes: Passes,
        selection: Selection,
        names: Mapping[nn.Module, str],
        check: Callable[[], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._passes = passes
        self._selection = selection
        self._names = names
        self._check = check
        self._block: object | None = None  # or outermost call, that is under way
        self._thread: int | None = None  # whose it is
        self._task = NO_TASK  # the backward in which it is, by autograd's number: calls in one within it are no part
        self._forward: Forward | None = None  # that it has begun

    @contextlib.contextmanager
    def calling(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """A watched module is called, in a forward or a recomputation."""
        if self._is_ours():
            with self._inside(module, args, kwargs):
                yield
        elif module is self._model() and torch.is_grad_enabled() and (may_save() or not in_backward()):
            with self.block(), self.calling(module, args, kwargs) if self._is_ours() else contextlib.nullcontext():
                yield
        elif in_backward():
            try:
                yield
            finally:
                self._passes.recomputed()
        else:
            yield

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """A forward from the model's first call inside to the end."""
        if self._is_ours():
            raise StateError("forward() is entered inside of another one, or of a call of the model; leave that first")
        mine = object()
        completed = False
        try:
            with self._passes.stash.lock:
                if self._block is None:
                    self._block, self._thread, self._task = mine, own_thread(), backward_task()
            if self._block is mine:
                pop_left_over(self._passes.stash)
            yield
            completed = True
        finally:
            if self._block is mine:
                # Nothing is called before these are set: Ctrl-C strikes at calls, and the block would go on for good.
                forward, self._forward = self._forward, None
                self._block = self._thread = None
                _end(forward, completed=completed)

    @contextlib.contextmanager
    def together(self, inputs: Any) -> Iterator[None]:
        """A forward that consists of several calls of the model, with all these inputs, which take turns."""
        with self.block():
            model = self._model()
            if model is not None:
                self._begin(model, (inputs,), {})
            yield

    def _is_ours(self) -> bool:
        return self._thread == own_thread()

    @contextlib.contextmanager
    def _inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        outermost = module is self._model() and backward_task() == self._task and torch.is_grad_enabled()
        if outermost and (self._forward is None or self._forward.is_over):
            self._begin(module, args, kwargs)
        forward = self._forward if outermost else None
        if forward is not None:
            forward.enter()
        self._selection.enter(module, self._names.get(module, ""))
        try:
            yield
        finally:
            self._selection.leave(module)
            if forward is not None:
                forward.leave()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ended, self._forward = self._forward, None
        _end(ended, completed=True)  # its backward has begun in the same block
        if may_save():
            self._check()
            self._forward = self._passes.begin(entry_of(args, kwargs, module.training), self._selection)
            self._forward.push()


def _end(forward: Forward | None, *, completed: bool) -> None:
    if forward is not None:
        forward.pop()
        forward.end(completed=completed)
