"""How do calls of a model and its layers announce themselves? Their classes become subclasses that tell a watcher.

A subclass made at run time, as in engine/managed.py and for the same reasons: an exception cannot skip the end of a
call, and PyTorch's fast paths, which refuse modules with hooks, stay on. It goes in front of a managed class.
"""

import copyreg
import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from millrace.errors import StateError

__all__ = ["Watcher", "make_watched", "unwatch", "watcher_of"]


class Watcher(Protocol):
    """Whoever wants to know of calls."""

    def calling(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """A call of the module, from its beginning to its end."""


_watchers: "weakref.WeakKeyDictionary[nn.Module, Watcher]" = weakref.WeakKeyDictionary()
# By the user's class: for the modules whose calls are outermost, and for the others.
_classes: "dict[bool, weakref.WeakKeyDictionary[type, weakref.ref[type]]]" = {
    outermost: weakref.WeakKeyDictionary() for outermost in (True, False)
}


class Watched:
    """What a watched module does differently. Mixed in front of its own class."""

    _is_outermost = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if self._is_outermost:
                torch.compiler.disable(_refuse_compilation_of_all)(self)  # here: that loads the compiler
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # inside a compiled layer
        module: nn.Module = self  # type: ignore[assignment]
        watcher = _watchers.get(module)
        if watcher is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with watcher.calling(module, args, kwargs):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        watched = type(self)
        self.__class__ = _class_below(watched)
        try:  # as its own class would be copied or pickled
            reduced = self.__reduce_ex__(protocol)
            if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle wants the object's own class there
                return copyreg._reconstructor, (type(self), object, None), *reduced[2:]  # type: ignore[attr-defined]
            return reduced
        finally:
            self.__class__ = watched


def _refuse_compilation_of_all(module: Any) -> None:
    if module in _watchers:
        raise StateError(
            "torch.compile around a model whose activations are offloaded would compile the offloading away; compile"
            " first and give the compiled model, or compile its layers: for layer in model.layers: layer.compile()"
        )


def make_watched(module: nn.Module, watcher: Watcher, *, outermost: bool) -> None:
    """Puts the watched class on a module, in place. `outermost`: compilation may not enclose its calls."""
    own = type(module)
    classes = _classes[outermost]
    known = classes.get(own)
    watched = None if known is None else known()
    if watched is None:
        names = {
            "__module__": own.__module__,
            "__qualname__": own.__qualname__,
            "__doc__": own.__doc__,
            "_is_outermost": outermost,
        }
        watched = type(own.__name__, (Watched, own), names)
        classes[own] = weakref.ref(watched)
    module.__class__ = watched
    _watchers[module] = watcher


def unwatch(module: nn.Module) -> None:
    """The inverse of `make_watched`."""
    if isinstance(module, Watched):
        module.__class__ = _class_below(type(module))
    _watchers.pop(module, None)


def watcher_of(module: nn.Module) -> Watcher | None:
    """Who watches the module; None for most."""
    return _watchers.get(module)


def _class_below(watched: type) -> type:
    return watched.__mro__[watched.__mro__.index(Watched) + 1]
