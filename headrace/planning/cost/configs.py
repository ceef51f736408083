"""What do the numbers of a transformers config say? All blocks of a Llama; of others, what cannot be counted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.planning.cost.shape import BlockKind, BlockShape, ModelShape

_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "groups": ("num_key_value_heads",),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "active_experts": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k"),
    "expert_intermediate": ("moe_intermediate_size", "expert_dim"),
    "head_dim": ("head_dim",),
}
LLAMAS = ("llama", "mistral", "qwen2", "qwen3")  # what `shape_of_config` knows


def check_config(config: Mapping[str, Any]) -> None:
    """Raises ValueError for numbers that no model can have, or that a Llama lacks, before a model is made."""
    numbers = _Numbers(config)
    if numbers.kind in LLAMAS:
        for name in ("hidden_size", "layers", "heads", "intermediate", "vocabulary"):
            numbers.need(name)
    text = config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise ValueError(f"the config's text_config is {text!r}; it must be a JSON object")
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for name in _NAMES:
            _Numbers(part).find(name)


def experts_of_config(config: Mapping[str, Any]) -> tuple[int, int]:
    """How many experts a layer has, and how many of them a token goes to; 1 and 1 without experts."""
    numbers = _Numbers(config.get("text_config") or config)
    experts = numbers.find("experts") or 0
    return (experts, min(experts, numbers.find("active_experts") or 1)) if experts > 1 else (1, 1)


def read_config(source: str | Path | Mapping[str, Any] | Any) -> Mapping[str, Any]:
    """The config as a mapping. `source`: a mapping, a config object, a JSON file, or the directory that holds it.

    Raises ValueError when there is no such file or it holds no JSON object.
    """
    if isinstance(source, Mapping):
        return source
    if isinstance(source, str | Path):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            loaded = json.loads(path.read_text())
        except OSError as error:
            raise ValueError(
                f"no config at {str(source)!r} ({error.strerror}); give a config.json, a directory that holds one,"
                " a transformers config or a model"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} holds no JSON ({error}); give a transformers config.json") from error
        if not isinstance(loaded, dict):
            raise ValueError(f"{path} holds a {type(loaded).__name__}; a transformers config is a JSON object")
        return loaded
    if hasattr(source, "to_dict"):
        return dict(source.to_dict())
    raise TypeError(
        f"{type(source).__name__} is no model that can be planned; give a module, a transformers config, a mapping or"
        " a path to config.json"
    )


def shape_of_config(config: Mapping[str, Any], *, adapts: bool = False) -> ModelShape:
    """The blocks of a Llama, or of a model like it, all trainable, in 16 bits unless the config says float32.

    They are as `headrace.shapes` sees them in transformers' model, which takes seconds to import: norms compute in 32
    bits and keep their input, and flash attention keeps one number in 32 bits for each head. `adapts`: what is saved is
    for adapters alone. Raises ValueError naming the number that is missing.
    """
    numbers = _Numbers(config)
    hidden, vocabulary = numbers.need("hidden_size"), numbers.need("vocabulary")
    wide = wide_bits(config)
    tied = bool(config.get("tie_word_embeddings", False))
    table, nbytes = vocabulary * hidden, wide / 8
    head = hidden + (0 if tied else table)
    layer, size = _layer(numbers, wide, adapts), numbers.find("head_dim") or hidden // numbers.need("heads")
    embedding = BlockShape(
        name="embedding",
        kind=BlockKind.EMBEDDING,
        parameters=table,
        active_parameters=0,
        trainable=table,
        weight_bits=wide,
        saved_bytes=8.0 * (not adapts) + nbytes * size,  # a token's number, and rotations, which two sequences share
        input_bytes=8.0 * (not adapts) + 4.0 + nbytes * size,  # and positions
        row_parameters=0 if tied else hidden,
    )
    last = BlockShape(
        name="head",
        kind=BlockKind.HEAD,
        parameters=head,
        active_parameters=hidden + table,
        trainable=head,
        weight_bits=wide,
        saved_bytes=4.0 * (hidden + 1 + vocabulary) + (8 if adapts else 2 * nbytes * hidden),
        logit_bytes=vocabulary * (nbytes + 4.0 * (nbytes < 4)),
    )
    layers = [replace(layer, cache_window=window) for window in _windows(numbers, numbers.need("layers"))]
    title = str(config.get("_name_or_path") or numbers.kind or "model")
    return ModelShape(name=title, blocks=(embedding, *layers, last), tied=tied)


def _layer(numbers: _Numbers, bits: float, adapts: bool) -> BlockShape:
    hidden, heads, wide = numbers.need("hidden_size"), numbers.need("heads"), numbers.need("intermediate")
    size = numbers.find("head_dim") or hidden // heads
    groups = numbers.find("groups") or heads
    queries, keys = heads * size, groups * size
    matrices = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    matrices += [(hidden, wide), (hidden, wide), (wide, hidden)]
    nbytes, others = bits / 8, 2 * hidden
    own = 0 if adapts else nbytes  # what a norm has computed is kept for the gradient of its weight
    saved = 2 * (4 + nbytes + own) * hidden + 8 + nbytes * (2 * queries + 2 * keys + 4 * wide) + 4 * heads
    if numbers.kind == "qwen2" or numbers.config.get("attention_bias"):
        others += queries + 2 * keys + (0 if numbers.kind == "qwen2" else hidden)
    if numbers.kind == "qwen3":  # a norm over each query's and key's head, of which attention keeps the result
        others += 2 * size
        saved += (4 + own) * (queries + keys) + 4 * (heads + groups)
    total = others + sum(inputs * outputs for inputs, outputs in matrices)
    return BlockShape(
        name="layer",
        parameters=total,
        active_parameters=total,
        trainable=total,
        weight_bits=stored_bits(numbers.config, bits),
        context_flops=4.0 * queries,
        saved_bytes=saved,
        input_bytes=nbytes * hidden,
        adapter_sizes=sum(map(sum, matrices)),
        last_parameters=hidden * wide,
        cache_elements=2 * keys,
    )


def _windows(numbers: _Numbers, layers: int) -> list[int]:
    """Of how many tokens each layer keeps keys and values; 0: of all."""
    config, window = numbers.config, numbers.find("sliding_window") or 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return [window * (kind == "sliding_attention") for kind in kinds]
    if not numbers.kind.startswith("qwen"):
        return [window] * layers
    first = (numbers.find("max_window_layers") or 0) if config.get("use_sliding_window") else layers
    return [window * (index >= first) for index in range(layers)]


_MOST_LAYERS = 10_000
_LARGEST = 10**12  # the limit for any other number in a config


class _Numbers:
    """The config's numbers under one name each."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.kind = str(config.get("model_type", ""))

    def find(self, name: str) -> int | None:
        for alias in _NAMES.get(name, (name,)):
            value = self.config.get(alias)
            if isinstance(value, int | float) and not isinstance(value, bool):
                most = _MOST_LAYERS if name == "layers" else _LARGEST
                if not (0 <= value <= most and value == int(value)):
                    raise ValueError(f"the config's {alias} is {value}; it must be a whole number from 0 to {most:,}")
                return int(value)
            if isinstance(value, str):
                raise ValueError(f"the config's {alias} is {value!r}; it must be a number")
        return None

    def need(self, name: str) -> int:
        value = self.find(name)
        if value is None or value < 1:
            raise ValueError(
                f"the config of {self.kind or 'this model'} has no {' or '.join(_NAMES.get(name, (name,)))};"
                " add it, or plan from the model itself"
            )
        return value


def wide_bits(config: Mapping[str, Any]) -> float:
    """Bits of a weight as it computes: 32 if the config says so, else 16."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return 32.0 if dtype == "float32" else 16.0


def stored_bits(config: Mapping[str, Any], default: float) -> float:
    """Bits of a stored weight, according to the config's quantisation."""
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return default
    if quantised.get("load_in_4bit"):
        return 4.5  # NF4: a 32-bit scale for each 64 weights
    if quantised.get("load_in_8bit") or quantised.get("quant_method") == "fp8":
        return 8.0
    if isinstance(quantised.get("bits"), int):
        return float(quantised["bits"]) + 0.25  # a 16-bit scale and zero for each 128
    return default
