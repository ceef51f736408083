"""What becomes of torch.compile around an offloaded model? It compiles the blocks, one by one; the rest runs as it is.

Weights move between the calls of blocks, where the compiler could not go on. So a call that the compiler comes to is
made without it, and each block is compiled as its own `compile()` would do, with the arguments of torch.compile.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from headrace.runtime.module_calls import compile_calls
from headrace.weights.passes.engine import Engine

_told: weakref.WeakSet[Engine] = weakref.WeakSet()  # one note for each model


def compile_blocks(engine: Engine, layers: Sequence[nn.Module], compiler: Callable[[Any], Any]) -> None:
    """Has `compiler` compile the layers of a model, in the place of the model."""
    if _records_graphs(compiler):
        _note(
            engine,
            "an offloaded model runs without torch.compile, whose mode (or option triton.cudagraphs) records CUDA"
            " graphs: weights would have to stay where they are. Leave the mode out, and its blocks are compiled",
        )
        return
    if not layers:
        _note(
            engine,
            "an offloaded model runs without torch.compile, which would compile its blocks one by one: none of them is"
            " a module with modules inside. Compile the model without offload(), or name larger blocks (blocks=[...])",
        )
    for layer in layers:
        compile_calls(layer, compiler)
    _note(
        engine,
        f"torch.compile around an offloaded model compiles its blocks ({len(layers)}) one by one; what is around them"
        " runs as it is, because weights move in between",
    )


def note_not_compiled(engine: Engine) -> None:
    """Warns that a model is called in a function that torch.compile compiles, and is not compiled itself."""
    _note(
        engine,
        "an offloaded model runs without torch.compile, which was given a function around it, or the model before"
        " offload(): weights move between its blocks. To compile these: for layer in model.layers: layer.compile()."
        " (With a static cache transformers' generate() compiles by itself; disable_compile=True keeps it from that.)",
    )


def _records_graphs(compiler: Callable[[Any], Any]) -> bool:
    """Whether what it compiles is recorded as CUDA graphs."""
    config = compiler(_nothing).get_compiler_config()
    return bool(config) and bool(config.get("triton.cudagraphs"))


def _nothing() -> None:
    """Stands for a function to compile."""


def _note(engine: Engine, text: str) -> None:
    if engine not in _told:
        _told.add(engine)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
