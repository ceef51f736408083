"""Which models are offloaded now, and by what handles? All are let go of at exit, and forgotten in a forked process."""

import contextlib
import threading
import weakref
from typing import Any, Protocol, Self

from torch import nn

from headrace.runtime.system import after_fork
from headrace.weights.meter import Checkpointed
from headrace.weights.movement.block import Block


class Handle:
    """What `offload()` and `offload_activations()` return. As a context manager it calls `remove()` at the end."""

    def remove(self) -> None:
        """Ends the offloading: the model is a plain one again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a handle belongs to one model, and is neither copied nor pickled; copy.deepcopy(model) gives a plain"
            " model, to be given to headrace.offload()"
        )


class ModelHandle(Protocol):
    """The handle on an offloaded model, as far as code below `offload()` needs it."""

    def manages(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is one of this model's."""

    def settled_blocks(self, what: str) -> list[Block]:
        """All blocks, with nothing under way. Raises StateError when `what` is called within a pass."""

    def refresh(self) -> None:
        """Renews device copies."""

    def known(self) -> dict[str, Any]:
        """What was learned of the order and the times of the model's passes, as plain values."""

    def restore(self, known: Any) -> bool:
        """Takes over what `known` gave. Returns whether it is of this model, cut into the same blocks."""

    def note_checkpoint(self, saving: Checkpointed) -> None:
        """The stats count it."""

    def let_go(self) -> None:
        """Does what `remove()` does in any state, and all of it, even if some of it fails. Raises what failed."""

    def forked(self) -> None:
        """Called in a process that was forked: its parent has the threads, and the files."""


handles: "weakref.WeakSet[ModelHandle]" = weakref.WeakSet()


def handles_of(model: nn.Module) -> list[ModelHandle]:
    """The handles on an offloaded model, or on those that are parts of `model`."""
    found = {}
    for parameter in model.parameters():
        for handle in list(handles):
            if handle.manages(parameter):
                found[id(handle)] = handle
    return list(found.values())


def _let_all_go() -> None:
    """Whatever is in flight at exit ends before the devices and the interpreter do, also where another
    thread is within a pass."""
    with contextlib.ExitStack() as steps:
        for handle in list(handles):
            steps.callback(handle.let_go)


def _forked() -> None:
    """A child has none of the threads that its parent's models rely on, and leaves their files alone."""
    for handle in list(handles):
        handle.forked()
    handles.clear()


after_fork(_forked)
threading._register_atexit(_let_all_go)  # type: ignore[attr-defined]  # atexit's turn comes after executors have ended
