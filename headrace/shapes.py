"""What shape does a model have that a user gives as a module, a config or a path?"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.planning.cost import (
    LLAMAS,
    BlockKind,
    BlockShape,
    ModelShape,
    Training,
    adapted_of,
    check_config,
    layers_of,
    read_config,
    shape_of_config,
    shape_of_module,
    stored_bits,
    wide_bits,
)

if TYPE_CHECKING:
    import torch  # not imported here: `headrace plan` does without for Llamas

    from headrace.dry_run import DryRun, Seen


def shape_of(
    model: Any,
    work: Training = Training.FULL,
    adapter_rank: int | None = None,
    weight_bits: float | None = None,
    sequence_length: int = 2048,
) -> ModelShape:
    """The shape of a module, a config, its dictionary or path, with adapters and bits as given.

    What a token saves and computes depends on `sequence_length`. Raises ValueError for what cannot be counted.
    """
    adapts = work is Training.ADAPTER
    if isinstance(model, ModelShape):
        shape = model
        adapts = adapts and (adapter_rank is not None or shape.trainable == shape.parameters)
    elif hasattr(model, "named_parameters"):
        trains_all = all(parameter.requires_grad for parameter in model.parameters())
        adapts = adapts and (adapter_rank is not None or trains_all)
        shape = _shape_of_module(model, sequence_length, adapts)
    else:
        shape = _shape_of_config(read_config(model), sequence_length, adapts)
        if isinstance(model, str | Path):
            shape = dataclasses.replace(shape, name=Path(model).stem)
    if weight_bits is not None:
        shape = shape.with_bits(weight_bits)
    if work is Training.NONE:
        return shape.frozen()
    return shape.with_adapters(16 if adapter_rank is None else adapter_rank) if adapts else shape


def _shape_of_config(config: Mapping[str, Any], sequence_length: int, adapts: bool) -> ModelShape:
    """From the config's numbers alone for Llamas and if no type is given; else from a model on meta."""
    check_config(config)
    kind = config.get("model_type", "")
    if kind in ("", *LLAMAS):
        return shape_of_config(config, adapts=adapts)
    shape = _counted(json.dumps(config, sort_keys=True, default=str), sequence_length, adapts)
    bits = stored_bits(config, 0.0)
    shape = shape.with_bits(bits) if bits else shape
    return dataclasses.replace(shape, name=str(config.get("_name_or_path") or kind))


@functools.lru_cache(maxsize=64)
def _counted(config: str, sequence_length: int, adapts: bool) -> ModelShape:
    return _shape_of_module(_on_meta(json.loads(config)), sequence_length, adapts)


def _shape_of_module(model: "torch.nn.Module", sequence_length: int, adapts: bool) -> ModelShape:
    """Counts parameters, and sees in a dry run what the model saves and computes, if it is a text model.

    With adapters (`adapts`) it saves their inputs, and not what only gradients of frozen weights would need.
    """
    names = layers_of(model)
    if getattr(model, "main_input_name", None) != "input_ids" or not names:
        return shape_of_module(model)
    from headrace.dry_run import BATCH, dry_run

    try:
        run = dry_run(model, names, sequence_length, adapted_of(model) if adapts else None)
    except Exception:  # from the model's own code, which may read values; its parameters are counted all the same
        return shape_of_module(model)
    counted = shape_of_module(model, first=run.first)
    tokens = BATCH * sequence_length
    seen = run.layers | {"embedding": run.before, "head": run.after}
    own: dict[BlockKind, dict[str, Any]] = {
        BlockKind.LAYER: {"name": "layer"},
        BlockKind.EMBEDDING: {"row_parameters": 0 if run.tied else _row_parameters(model, run)},
        BlockKind.HEAD: {"logit_bytes": run.logits * (run.logit_bytes + 4 * (run.logit_bytes < 4)) / tokens},
    }
    found = [_with(block, seen[block.name], tokens, sequence_length) for block in counted.blocks]
    blocks = tuple(dataclasses.replace(block, **own[block.kind]) for block in found)
    return dataclasses.replace(counted, blocks=blocks, tied=run.tied)


def _with(block: BlockShape, seen: "Seen", tokens: int, sequence_length: int) -> BlockShape:
    """The block with what was seen of it, for each token."""
    return dataclasses.replace(
        block,
        active_parameters=round((seen.flops - seen.attention_flops) / 2 / tokens),
        context_flops=seen.attention_flops / tokens / sequence_length,
        saved_bytes=seen.saved_bytes / tokens,
        input_bytes=seen.input_bytes / tokens,
        cache_elements=round(seen.cached_elements / tokens),
        cache_window=seen.cache_window,
    )


def _row_parameters(model: "torch.nn.Module", run: "DryRun") -> int:
    """The parameters of a row, if all those before the layers are one table that is looked up."""
    own = [model.get_submodule(name) for name in run.first]
    own = [module for module in own if any(True for _ in module.parameters(recurse=False))]
    return getattr(own[0], "embedding_dim", 0) if len(own) == 1 else 0


def _on_meta(config: Mapping[str, Any]) -> "torch.nn.Module":
    """The model of a config, without memory for it. Raises ValueError when transformers cannot make it."""
    kind = config["model_type"]
    try:
        import torch
        import transformers  # here: they take seconds to import
        from transformers.initialization import no_init_weights
    except ModuleNotFoundError as error:
        raise ValueError(
            f"without transformers, only {', '.join(LLAMAS)} can be planned from a config, not {kind!r};"
            " pip install 'transformers>=5', or plan from the model itself, made on meta"
        ) from error
    dtype = torch.float32 if wide_bits(config) == 32 else torch.bfloat16
    settings = {key: value for key, value in config.items() if key != "quantization_config"}
    reasons = []
    for maker in (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModel,
    ):
        try:
            described = transformers.AutoConfig.for_model(**settings)
            with torch.device("meta"), no_init_weights():
                made: Any = maker.from_config(described, dtype=dtype)
            made.tie_weights()
            module: torch.nn.Module = made
            return module
        except Exception as error:
            reasons.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
    raise ValueError(
        f"transformers cannot make a model of type {kind!r} ({reasons[0]}); plan from the model itself, made on meta"
    )
