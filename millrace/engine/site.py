"""Which blocks does a module need when it is called? A site ties one module to its blocks and to the engine."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from millrace.engine.block import Block

if TYPE_CHECKING:
    from millrace.engine.engine import Engine

__all__ = ["Site"]


class Site:
    """One managed module.

    `blocks` must be present while it computes. `main`: its call is the usual way to them (a layer); otherwise it is a
    module inside of such a one and does nothing unless it is called on its own, or it has no blocks. `encloses`:
    some site with main=True is inside it.
    """

    def __init__(self, engine: "Engine", name: str, blocks: tuple[Block, ...], *, main: bool, encloses: bool) -> None:
        self.engine = engine
        self.name = name
        self.blocks = blocks
        self.main = main
        self.encloses = encloses
        self.device = engine.device
        self.companion: object = None  # what lives as long as the module

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's call."""
        return self.engine.call(self, forward, args, kwargs)
