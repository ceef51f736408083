"""Which models are offloaded now? All are let go of at exit, and forgotten in a process that was forked."""

import contextlib
import threading
import weakref
from typing import Protocol

from torch import nn

from headrace.runtime.system import after_fork
from headrace.weights.meter import Checkpointed
from headrace.weights.movement.block import Block

__all__ = ["ModelHandle", "handles", "handles_of"]


class ModelHandle(Protocol):
    """The handle on an offloaded model, as far as code below `offload()` needs it."""

    def manages(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is one of this model's."""

    def settled_blocks(self, what: str) -> list[Block]:
        """All blocks, with nothing under way. Raises StateError when `what` is called within a pass."""

    def refresh(self) -> None:
        """Device copies are made anew."""

    def note_checkpoint(self, saving: Checkpointed) -> None:
        """The stats count it."""

    def let_go(self) -> None:
        """Makes the model an ordinary one again; all of it, whatever fails. Raises what did."""

    def forked(self) -> None:
        """This process was forked."""


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
    """Whatever is in flight at exit ends before the devices and the interpreter do; passes of other threads or not."""
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
