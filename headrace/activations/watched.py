"""How do calls of a model and its layers announce themselves? By a participant in them that tells a watcher."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from headrace.errors import StateError
from headrace.runtime.module_calls import Method, participant_of, take_part, withdraw

__all__ = ["Watcher", "make_watched", "refuse_watched", "unwatch", "watcher_of"]


class Watcher(Protocol):
    """Whoever wants to know of calls."""

    def calling(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """A call of the module, from its beginning to its end."""


class _Watched:
    """One watched module."""

    outer = True
    methods: Mapping[str, Method] = {}

    def __init__(self, watcher: Watcher, *, outermost: bool) -> None:
        self.watcher = watcher
        self._outermost = outermost

    def leaves_out(self) -> bool:
        """Never."""
        return False

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The module is called."""
        with self.watcher.calling(module, args, kwargs):
            return forward(*args, **kwargs)

    def compiling(self, module: nn.Module) -> bool:
        """A layer may be compiled through; the model may not."""
        if self._outermost:
            torch.compiler.disable(_refuse_compilation_of_all)()  # here: that loads the compiler
        return False

    def compile(self, module: nn.Module, compiler: Callable[[Any], Any]) -> bool:
        """As it would be."""
        return False

    def stopped(self, module: nn.Module) -> None:
        """As it would be."""

    def plain(self, module: nn.Module) -> AbstractContextManager[None]:
        """A watched module is as it would be."""
        return contextlib.nullcontext()


def _refuse_compilation_of_all() -> None:
    raise StateError(
        "torch.compile around a model whose activations are offloaded would compile the offloading away; compile"
        " first and give the compiled model, or compile its layers: for layer in model.layers: layer.compile()"
    )


def make_watched(module: nn.Module, watcher: Watcher, *, outermost: bool) -> None:
    """The watcher is told of the module's calls. `outermost`: compilation may not enclose them."""
    take_part(module, _Watched(watcher, outermost=outermost))


def unwatch(module: nn.Module) -> None:
    """The inverse of `make_watched`."""
    watched = participant_of(module, _Watched)
    if watched is not None:
        withdraw(module, watched)


def watcher_of(module: nn.Module) -> Watcher | None:
    """Who watches the module; None for most."""
    watched = participant_of(module, _Watched)
    return None if watched is None else watched.watcher


def refuse_watched(model: nn.Module) -> None:
    """Raises StateError for a model whose activations are offloaded already, and whose weights are about to be."""
    for name, module in model.named_modules():
        if watcher_of(module) is not None:
            where = f"module {name!r}" if name else "the model"
            raise StateError(
                f"the activations of {where} are offloaded already; call remove() on that handle, and pass"
                " activations=True here"
            )
