"""Which shape has what a user calls a model: a module, a config, a path?"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.planning.cost import (
    ModelShape,
    Training,
    is_counted,
    is_module,
    read_config,
    shape_of_config,
    shape_of_module,
    stored_bits,
)

if TYPE_CHECKING:
    import torch  # not imported here: `headrace plan` does without for most models

__all__ = ["shape_of"]


def shape_of(model: Any, work: Training, adapter_rank: int | None, weight_bits: float | None) -> ModelShape:
    """The shape of a module, a config, its dictionary or path, with adapters and bits as given.

    Raises ValueError for what cannot be counted.
    """
    if isinstance(model, ModelShape):
        shape = model
    elif is_module(model):
        shape = shape_of_module(model)
    else:
        shape = _shape_of_config(read_config(model), Path(model).stem if isinstance(model, str | Path) else "")
    if weight_bits is not None:
        shape = shape.with_bits(weight_bits)
    if work is Training.NONE:
        return shape.frozen()
    if work is Training.ADAPTER and (adapter_rank is not None or shape.trainable == shape.parameters):
        return shape.with_adapters(16 if adapter_rank is None else adapter_rank)
    return shape


def _shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """By the config's numbers where the type of model is known, else counted from transformers' model on meta."""
    if is_counted(config):
        return shape_of_config(config, name=name)
    shape = shape_of_module(_on_meta(config))
    bits = stored_bits(config, 0.0)
    shape = shape.with_bits(bits) if bits else shape
    return dataclasses.replace(shape, name=name or str(config.get("_name_or_path") or config["model_type"]))


def _on_meta(config: Mapping[str, Any]) -> "torch.nn.Module":
    """The model of a config, without memory for it. Raises ValueError when transformers cannot make it."""
    kind = config["model_type"]
    try:
        import torch
        import transformers  # here: they take seconds to import, and most configs do not need them
    except ModuleNotFoundError as error:
        raise ValueError(
            f"how many parameters a model of type {kind!r} has is not known from its config; pip install"
            " 'transformers>=5', or plan from the model itself, made on meta"
        ) from error
    reasons = []
    named = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    dtype = torch.float32 if named == "float32" else torch.bfloat16
    for maker in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        try:
            described = transformers.AutoConfig.for_model(**config)
            with torch.device("meta"):
                module: torch.nn.Module = maker.from_config(described, dtype=dtype)
                return module
        except Exception as error:
            reasons.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
    raise ValueError(
        f"how many parameters a model of type {kind!r} has is not known from its config, and transformers cannot make"
        f" it ({reasons[0]}); plan from the model itself, made on meta"
    )
