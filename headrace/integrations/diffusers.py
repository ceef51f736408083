"""How do diffusers' models and pipelines run larger than the device? A model from its directory, all parts as one."""

import contextlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace.api import Offloaded, offload
from headrace.errors import CheckpointError
from headrace.memory.disk import Checkpoint
from headrace.memory.ledger import Ledger

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

__all__ = ["offload_pipeline", "open_component"]

# The models of each pipeline, offloaded as one, for as long as the pipeline lives. They do not refer to it.
_parts: "weakref.WeakKeyDictionary[Any, nn.ModuleDict]" = weakref.WeakKeyDictionary()


def offload_pipeline(pipeline: "DiffusionPipeline", **settings: Any) -> Offloaded:
    """Offloads all models of a diffusers pipeline under one budget. The model that is running gets all of it.

    `settings` are those of `headrace.offload`, for all models together. Names of modules begin with the name of their
    component, such as "unet.mid_block". The handle is like that of one model, and its `remove()` applies to all. LoRAs
    may be loaded, selected and deleted later; this takes effect at the next call.

    Raises what `headrace.offload` raises, ValueError for a pipeline without models, and TypeError for anything that is
    not a pipeline.
    """
    if not isinstance(getattr(pipeline, "components", None), dict):
        raise TypeError(f"pipeline is a {type(pipeline).__name__}; give a diffusers.DiffusionPipeline")
    models = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    if not models:
        raise ValueError(
            f"{type(pipeline).__name__} has no component that is a torch.nn.Module; nothing can be offloaded"
        )
    parts = nn.ModuleDict(models)
    parts.training = any(part.training for part in models.values())  # set directly, so that no model changes its mode
    handle = offload(parts, **settings)
    _parts[pipeline] = parts
    return handle


def open_component(directory: Path, config: dict[str, Any]) -> "tuple[ModelMixin, Checkpoint]":
    """The model that diffusers saved with this config, with parameters on meta, and the model's files."""
    import diffusers  # imported here because it is optional and takes seconds

    name = config["_class_name"]
    found: Any = getattr(diffusers, name, None)
    model_class: Any = found if isinstance(found, type) and issubclass(found, nn.Module) else None
    if model_class is None:
        raise CheckpointError(
            f"{directory / 'config.json'} names the class {name!r}, which this diffusers ({diffusers.__version__}) does"
            " not have; install a version that does"
        )
    with _parameters_on_meta():
        model = model_class.from_config(config)
    return model.eval(), Checkpoint(directory, Ledger())


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """A context in which new parameters have no bytes. Buffers have them, because some are in no file."""
    own = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        own(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )

    nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = own  # type: ignore[method-assign]
