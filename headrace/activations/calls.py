"""When does a forward begin and end? With the outermost call of the model, or with a block of code around calls.

`Calls` takes part in the calls of the model and of its layers. It serves one thread at a time: meanwhile, calls on
other threads, and calls of a part of the model alone, run as they do without headrace.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from headrace.activations.passes import Passes
from headrace.activations.plan_cache import entry_of
from headrace.activations.saving import Forward, may_save, pop_left_over
from headrace.activations.selection import Selection
from headrace.errors import StateError
from headrace.runtime.autograd import NO_TASK, backward_task, in_backward
from headrace.runtime.fibers import calling_thread
from headrace.runtime.module_calls import Participant, participant_of, refuse_export, take_part, withdraw


class Calls(Participant):
    """The calls of one model and of its modules `watched`. `check` raises if the model cannot be offloaded now."""

    outer = True

    def __init__(
        self,
        model: nn.Module,
        watched: Iterable[nn.Module],
        passes: Passes,
        selection: Selection,
        check: Callable[[], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._passes = passes
        self._selection = selection
        watched = {model, *watched}
        # Weak, like every reference to a module here: this object lives as long as the modules do.
        self._names = weakref.WeakKeyDictionary({m: name for name, m in model.named_modules() if m in watched})
        self._check = check
        self._block: object | None = None  # the forward block or outermost call that is under way
        self._thread: int | None = None  # the thread that runs it
        self._task = NO_TASK  # the backward around it, by autograd's number: calls in a nested backward do not count
        self._forward: Forward | None = None  # the forward that it has begun
        for module in watched:
            take_part(module, self)

    def end(self) -> None:
        """Stops taking part in the model's calls."""
        model = self._model()
        for module in () if model is None else model.modules():
            if participant_of(module, Calls) is self:
                withdraw(module, self)

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs `forward` of a watched module, as a part of a forward or a recomputation."""
        with self.calling(module, args, kwargs):
            return forward(*args, **kwargs)

    def stops_compiler(self, module: nn.Module) -> bool:
        """The compiler may trace through a layer, but not through the model."""
        if module is self._model():
            refuse_export()
            torch.compiler.disable(_refuse_compilation_of_all)()  # not at import: `disable` loads the compiler
        return False

    @contextlib.contextmanager
    def calling(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Surrounds the call of a watched module, in a forward or a recomputation."""
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
                self._passes.recomputed(self._names.get(module, ""))
        else:
            yield

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Surrounds a forward that lasts from the model's first call inside of the block to the end of the block."""
        if self._is_ours():
            raise StateError("forward() is entered inside of another one, or of a call of the model; leave that first")
        mine = object()
        completed = False
        try:
            with self._passes.stash.lock:
                if self._block is None:
                    self._block, self._thread, self._task = mine, calling_thread(), backward_task()
            if self._block is mine:
                pop_left_over(self._passes.stash)
            yield
            completed = True
        finally:
            if self._block is mine:
                # No call comes before these assignments: Ctrl-C takes effect at calls, and would leave the block open.
                forward, self._forward = self._forward, None
                self._block = self._thread = None
                _end(forward, completed=completed)

    @contextlib.contextmanager
    def together(self, inputs: Any) -> Iterator[None]:
        """Surrounds a forward of several calls of the model, which take turns; `inputs`: those of all calls."""
        with self.block():
            model = self._model()
            if model is not None:
                self._begin(model, (inputs,), {})
            yield

    def _is_ours(self) -> bool:
        return self._thread == calling_thread()

    @contextlib.contextmanager
    def _inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        outermost = module is self._model() and backward_task() == self._task and torch.is_grad_enabled()
        if outermost and (self._forward is None or self._forward.trace.is_over):
            self._begin(module, args, kwargs)
        forward = self._forward if outermost else None
        if forward is not None:
            forward.trace.calls += 1
        self._selection.enter(module, self._names.get(module, ""))
        try:
            yield
        finally:
            self._selection.leave(module)
            if forward is not None:
                forward.trace.calls -= 1

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ended, self._forward = self._forward, None
        _end(ended, completed=True)  # the previous forward of this block, whose backward has begun
        if may_save():
            self._check()
            self._forward = self._passes.begin(entry_of(args, kwargs, module.training), self._selection)
            self._forward.push()


def refuse_watched(model: nn.Module, then: str) -> None:
    """Raises StateError for a model whose activations are offloaded already. `then`: what to do after `remove()`."""
    for name, module in model.named_modules():
        if participant_of(module, Calls) is not None:
            where = f"module {name!r}" if name else "the model"
            raise StateError(f"the activations of {where} are offloaded already; call remove() on that handle{then}")


def _refuse_compilation_of_all() -> None:
    raise StateError(
        "torch.compile around a model whose activations are offloaded would compile the offloading away; compile"
        " first and give the compiled model, or compile its layers: for layer in model.layers: layer.compile()"
    )


def _end(forward: Forward | None, *, completed: bool) -> None:
    if forward is not None:
        forward.pop()
        forward.end(completed=completed)
