"""What if a load fails in the middle? The model raises an error when it is used, until a later load is complete."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from headrace.errors import StateError


class _Torn:
    """A hook that raises before the forward of each module."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __call__(self, *_: Any) -> None:
        raise StateError(self.why)


@contextlib.contextmanager
def is_written(model: nn.Module, path: Path) -> Iterator[None]:
    """Surrounds the load of `model`, and what belongs to it, from `path`. An error in it leaves the model torn."""
    torn = None
    try:
        yield
    except BaseException as error:
        torn = _Torn(
            f"headrace.load of {path} failed midway ({type(error).__name__}): weights and optimizer may be partly"
            " those from before; load a checkpoint with headrace.load, this one or another, before you go on"
        )
        raise
    finally:
        for module in model.modules():
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Torn)]:
                del hooks[key]
            if torn is not None:
                module.register_forward_pre_hook(torn, prepend=True)


def check_whole(model: nn.Module) -> None:
    """Raises StateError if a load left the model torn."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _Torn):
                hook()
