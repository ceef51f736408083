"""Which blocks does a transformers config describe? Read from its numbers alone; no model is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.planning.cost.shape import BlockKind, BlockShape, ModelShape

__all__ = ["experts_of_config", "is_counted", "read_config", "shape_of_config", "stored_bits"]

_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocabulary": ("vocab_size",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "active_experts": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k"),
    "expert_intermediate": ("moe_intermediate_size", "expert_dim"),
}
_LEARNED_POSITIONS = {"gpt2": 0, "opt": 2, "gpt_bigcode": 0}  # extra rows of the table, beyond max_position_embeddings
_BIASED = {"gpt2", "gpt_neox", "opt", "bloom", "phi", "gpt_bigcode"}  # every linear layer and norm has a bias
_UNGATED = _BIASED | {"gpt_neo", "gptj", "falcon", "codegen", "bert", "mpt"}
_QKV_BIASED = {"qwen2", "qwen2_moe"}
_HEAD_NORMS = {"qwen3", "qwen3_moe"}  # a norm over each query's and key's head
_WIDE_NORMS = {"olmo2"}  # a norm over all queries and all keys
_TIED = {"gpt2", "opt", "bloom", "gemma", "gemma2", "gpt_bigcode"}  # tied unless the config says otherwise

# Types for which the numbers below give as many parameters as transformers' own models have. They are planned without
# transformers, which is optional, takes seconds to import, and may take seconds more to make a large model on meta.
_TYPES = """
bitnet bloom codegen cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 deepseek_v32 diffllama emu3 ernie4_5
exaone4 falcon flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj
granite granitemoe granitemoeshared helium hyperclovax internlm3 llama minicpm3 minimax_m2 ministral3 mistral mixtral
mpt olmo olmo2 olmo3 olmoe opt phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm
vaultgemma youtu
"""
_COUNTED = {"", *_TYPES.split()}  # "": numbers alone


def is_counted(config: Mapping[str, Any]) -> bool:
    """Whether `shape_of_config` knows this type of model. It takes others for a model like Llama."""
    return str(config.get("model_type", "")) in _COUNTED


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


def shape_of_config(config: Mapping[str, Any], *, name: str = "") -> ModelShape:
    """The blocks of a decoder that `config` describes, all trainable, in 16 bits unless it says float32.

    Dense and grouped-query attention, multi-head latent attention (DeepSeek), gated and plain MLPs, mixtures of
    experts with shared ones and leading dense layers. Raises ValueError naming the number that is missing.
    """
    config = config.get("text_config") or config
    if not isinstance(config, Mapping):
        raise ValueError(f"the config's text_config is {config!r}; it must be a JSON object")
    numbers = _Numbers(config)
    hidden, vocabulary = numbers.need("hidden_size"), numbers.need("vocabulary")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    wide = 32.0 if dtype == "float32" else 16.0
    bits = stored_bits(config, wide)
    embedding = vocabulary * hidden
    tied = bool(config.get("tie_word_embeddings", numbers.kind in _TIED))
    positions = 0
    if numbers.kind in _LEARNED_POSITIONS:
        rows = numbers.find("max_position_embeddings") or numbers.find("n_positions") or 0
        positions = (rows + _LEARNED_POSITIONS[numbers.kind]) * hidden
    if numbers.kind == "bloom":
        positions = 2 * hidden  # no learned positions, but the embedding has a norm
    blocks = [
        BlockShape(
            name="embedding",
            kind=BlockKind.EMBEDDING,
            parameters=embedding + positions,
            active_parameters=0,
            trainable=embedding + positions,
            weight_bits=wide,
            row_parameters=0 if tied or positions else hidden,
        )
    ]
    blocks += [_layer(numbers, index, bits) for index in range(numbers.need("layers"))]
    norm = hidden * (2 if numbers.kind in _BIASED else 1)
    head = 0 if tied else embedding
    blocks.append(
        BlockShape(
            name="head",
            kind=BlockKind.HEAD,
            parameters=head + norm,
            active_parameters=embedding + norm,
            trainable=head + norm,
            weight_bits=wide,
            # In elements of 16 bits: logits as computed and in float32 for the loss, and their gradient.
            saved_elements=5.0 * vocabulary + 2 * hidden,
            input_elements=hidden,
        )
    )
    title = name or str(config.get("_name_or_path") or numbers.kind or "model")
    return ModelShape(name=title, blocks=tuple(blocks), tied=tied)


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


Matrix = tuple[int, int]  # inputs and outputs of a linear layer


@dataclass(frozen=True)
class _Attention:
    """`extra`: parameters besides its matrices; elements `saved` and `cached`; operations per token and position."""

    matrices: list[Matrix]
    extra: int
    saved: int
    context_flops: float
    cached: int


def _layer(numbers: _Numbers, index: int, bits: float) -> BlockShape:
    hidden, kind = numbers.need("hidden_size"), numbers.kind
    attention = _latent_attention(numbers) if numbers.find("kv_lora_rank") else _attention(numbers)
    experts = numbers.find("experts") or 0
    dense_first = numbers.find("first_k_dense_replace") or 0
    every = numbers.find("decoder_sparse_step") or 1
    if experts <= 1 or index < dense_first or (index + 1) % every:
        experts = 0
    norms = 2 * hidden * (2 if kind in _BIASED else 1)
    always = _count(attention.matrices) + attention.extra + norms
    plain = numbers.find("intermediate") or 4 * hidden
    wide = (experts and numbers.find("expert_intermediate")) or plain
    mlp = [(hidden, wide)] * (2 if _gated(numbers) else 1) + [(wide, hidden)]
    adapted, routed = attention.matrices, 0
    if experts:  # with experts, adapters go on attention alone
        routed = numbers.find("active_experts") or 1
        one = 3 * hidden * wide + (hidden + 2 * wide if kind == "gpt_oss" else 0)
        shared = numbers.find("shared_expert_intermediate_size") or (numbers.find("n_shared_experts") or 0) * wide
        # The router, and the gate of shared experts, or biases.
        always += hidden * experts + {"qwen2_moe": hidden, "gpt_oss": experts}.get(kind, 0) + 3 * hidden * shared
        active_width = routed * wide + shared
    else:
        one, active_width = 0, wide
        always += _count(mlp) + (_outputs(mlp) if kind in _BIASED else 0)
        adapted = adapted + mlp
    total = always + experts * one
    mlp_saved = (4 if _gated(numbers) else 2) * active_width
    return BlockShape(
        name=f"layer {index}",
        parameters=total,
        active_parameters=always + routed * one,
        trainable=total,
        weight_bits=bits,
        context_flops=attention.context_flops,
        saved_elements=4.0 * hidden + attention.saved + mlp_saved,  # norms' inputs and outputs; from queries to outputs
        input_elements=hidden,
        adapter_sizes=sum(inputs + outputs for inputs, outputs in adapted),
        last_parameters=0 if experts else hidden * wide,
        expert_parameters=experts * one,
        experts_per_token=routed or 1,
        experts=experts,
        cache_elements=attention.cached,
    )


def _attention(numbers: _Numbers) -> _Attention:
    """Dense attention, or attention with grouped queries."""
    hidden, heads, kind = numbers.need("hidden_size"), numbers.need("heads"), numbers.kind
    size = numbers.find("head_dim") or hidden // heads
    groups = 1 if numbers.config.get("multi_query") else numbers.find("num_key_value_heads") or heads
    queries, keys = heads * size, groups * size
    matrices = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    extra = {"gpt_oss": heads}.get(kind, 0)  # sinks
    if kind in _BIASED or numbers.config.get("attention_bias", kind == "gpt_oss"):
        extra += _outputs(matrices)
    elif kind in _QKV_BIASED:
        extra += _outputs(matrices[:3])
    if kind in _HEAD_NORMS:
        extra += 2 * size
    elif kind in _WIDE_NORMS:
        extra += queries + keys
    return _Attention(matrices, extra, 2 * queries + 2 * keys, 4.0 * queries, 2 * keys)


def _latent_attention(numbers: _Numbers) -> _Attention:
    hidden, heads = numbers.need("hidden_size"), numbers.need("heads")
    latent, low = numbers.need("kv_lora_rank"), numbers.find("q_lora_rank") or 0
    rope = numbers.find("qk_rope_head_dim") or 0
    plain = numbers.find("qk_nope_head_dim") or 0
    value = numbers.find("v_head_dim") or plain
    queries = heads * (plain + rope)
    matrices = [(hidden, low), (low, queries)] if low else [(hidden, queries)]
    matrices += [(hidden, latent + rope), (latent, heads * (plain + value)), (heads * value, hidden)]
    flops, cached = 2.0 * (queries + heads * value), queries + heads * value
    return _Attention(matrices, latent + low, 2 * queries + heads * (plain + 2 * value), flops, cached)


def _count(matrices: list[Matrix]) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices)


def _outputs(matrices: list[Matrix]) -> int:
    """The outputs of all matrices: as many as they have biases, if they have any."""
    return sum(outputs for _, outputs in matrices)


def _gated(numbers: _Numbers) -> bool:
    return numbers.kind not in _UNGATED


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
