"""Which blocks does a module need when it is called? A site ties one module to its blocks and to the engine."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from millrace.engine.block import Block

if TYPE_CHECKING:
    from millrace.engine.engine import Engine

__all__ = ["Site"]


class Site:
    """One managed module.

    `blocks` must be present while it computes. `main`: its call is the usual way to them (a layer); otherwise it is a
    module inside of such a one and does nothing unless it is called on its own, or it is an enclosing module without
    blocks, which only counts as the outermost call.
    """

    def __init__(self, engine: "Engine", name: str, blocks: tuple[Block, ...], *, main: bool) -> None:
        self.engine = engine
        self.name = name
        self.blocks = blocks
        self.main = main
        self.device = engine.device
        self.companion: object = None  # what lives as long as the module

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's call."""
        return self.engine.call(self, forward, args, kwargs)

    def keep_buffer(self, module: nn.Module, name: str) -> None:
        """A buffer of the module belongs on the compute device."""
        buffer = module._buffers[name]
        if buffer is not None and buffer.device != self.device:
            with torch.inference_mode(False):
                module._buffers[name] = buffer.to(self.device)
