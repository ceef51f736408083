"""Are models counted as they are? Against the parameters of transformers' own models, which are made on meta."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import headrace
from headrace.planning.cost import (
    MACHINES,
    Activations,
    BlockKind,
    Case,
    Method,
    Place,
    Spread,
    Work,
    read_config,
    shape_of_config,
    shape_of_module,
)
from headrace.planning.cost.tiers import activation_bytes
from headrace.shapes import shape_of
from tests.cost.conftest import LLAMA_8B, LLAMA_70B, plain

ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "intermediate_size": 96,
    **ENDS,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
CONFIGS = {
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 32},
    "phi3": GROUPED,
    "gemma": GROUPED | {"head_dim": 16},
    "olmo2": GROUPED,
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 50, "vocab_size": 101, **ENDS},
    "opt": SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 40},
    "gpt_neox": SMALL,
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 101, **ENDS},
    "mixtral": GROUPED | {"num_local_experts": 4},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 48},
    "deepseek_v3": SMALL
    | {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
    },
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_counts_equal_transformers(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    real = sum(parameter.numel() for parameter in model.parameters())
    described = shape_of(config)
    counted = shape_of(model)
    assert described.parameters == real
    assert counted.parameters == real
    assert counted.trainable == real
    assert counted.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert described.layers == counted.layers == 3


@pytest.mark.parametrize(
    ("kind", "settings", "windows"),
    [
        ("mistral", {"sliding_window": 16}, [16, 16, 16]),
        ("mistral", {"sliding_window": None}, [0, 0, 0]),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, [0, 0, 0]),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, [0, 0, 16]),
        ("gemma3_text", {"sliding_window": 16, "sliding_window_pattern": 2, "head_dim": 16}, [16, 0, 16]),
        ("gpt_oss", {"sliding_window": 16, "num_local_experts": 4, "head_dim": 16}, [16, 0, 16]),
    ],
)
def test_windows_of_keys_and_values(kind: str, settings: dict[str, Any], windows: list[int]) -> None:
    """As transformers' own cache has them: from the file, from the config, and from the model."""
    raw = {"model_type": kind} | GROUPED | settings
    config = transformers.AutoConfig.for_model(**raw)
    assert [getattr(layer, "sliding_window", 0) for layer in transformers.DynamicCache(config=config).layers] == windows
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    for described in (raw, config, model):
        assert [block.cache_window for block in shape_of(described, sequence_length=32).blocks[1:-1]] == windows


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_adapters_go_on_the_linear_layers_that_transformers_has(kind: str) -> None:
    """Of attention, and of MLPs without experts; one of rank 1 has a parameter for each input and output."""
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    for block, layer in zip(shape_of(config).blocks[1:-1], model.model.layers, strict=True):
        parts = [layer.self_attn] if hasattr(layer.mlp, "experts") else [layer.self_attn, layer.mlp]
        linears = [m for part in parts for m in part.modules() if isinstance(m, torch.nn.Linear)]
        assert block.adapter_sizes == sum(linear.in_features + linear.out_features for linear in linears)


# An encoder and decoder, states instead of attention, convolutions among the layers, experts in some, another kind of
# experts, pictures beside text, no text at all.
@pytest.mark.extended
@pytest.mark.parametrize("kind", ["t5", "mamba", "lfm2", "jamba", "doge", "llama4", "siglip_vision_model"])
def test_models_of_all_kinds_are_counted(kind: str) -> None:
    config = transformers.CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        try:
            model = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:
            model = transformers.AutoModel.from_config(config)
    plan = headrace.plan(config, hardware="8xh200", sequence_length=128)  # a loop in Python over the tokens in some
    assert plan.model.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert plan.model.active_parameters <= plan.model.parameters
    assert plan.model.name == kind


def test_a_type_that_nobody_knows_is_refused() -> None:
    config = {"model_type": "nobody", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 9}
    with pytest.raises(ValueError, match="transformers cannot make a model of type 'nobody'"):
        headrace.plan(config)


def test_mixtures_compute_with_few_experts() -> None:
    shape = shape_of({"model_type": "qwen3_moe"} | EXPERTS)
    dense = shape_of({"model_type": "qwen3"} | GROUPED | {"head_dim": 16})
    layer = shape.blocks[1]
    attention, norms = dense.blocks[1].parameters - 3 * 64 * 96, 2 * 64 + 2 * 16
    assert layer.parameters == attention + 8 * 3 * 64 * 32 + 64 * 8
    assert layer.active_parameters == attention - norms + 2 * 3 * 64 * 32 + 64 * 8


@pytest.mark.parametrize(("config", "billions"), [(LLAMA_8B, 8.030), (LLAMA_70B, 70.554)])
def test_known_sizes(config: dict[str, Any], billions: float) -> None:
    shape = shape_of_config(config)
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=1e-3)
    assert shape.forward_flops(1000, 0) == pytest.approx(2 * 1000 * shape.parameters, rel=0.14)


def test_quantised_and_adapted() -> None:
    shape = shape_of_config(LLAMA_8B | {"quantization_config": {"load_in_4bit": True}})
    assert shape.blocks[1].weight_bytes == pytest.approx(shape.blocks[1].parameters * 4.5 / 8, abs=1)
    assert shape.blocks[0].weight_bits == 16
    adapted = shape.with_adapters(16)
    # Rank 16 on all linear layers of Llama 8B: 41.9M, as peft counts.
    assert adapted.trainable == 41_943_040
    assert shape.frozen().trainable == 0


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_lora_model_is_counted_as_it_is() -> None:
    peft = pytest.importorskip("peft")
    config = transformers.AutoConfig.for_model("llama", **GROUPED)
    model = transformers.AutoModelForCausalLM.from_config(config)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert shape_of_module(adapted).trainable == trained
    assert shape_of(config).with_adapters(4).trainable == trained


def test_module_without_a_config() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), *(nn.Linear(8, 8) for _ in range(3)), nn.LayerNorm(8))
    model[1].weight.requires_grad_(False)
    shape = shape_of_module(model)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.trainable == shape.parameters - 64
    assert len(shape.blocks) == 5
    assert shape.weight_bytes == 4 * shape.parameters


def test_activations_of_a_wide_layer() -> None:
    """Recomputing keeps 2 bytes per token and width. A layer of OPT keeps less than the 34 that are the usual count."""
    shape = shape_of(plain(layers=10, hidden=1024, heads=16, vocabulary=8))
    layer = shape.blocks[1]
    assert layer.kind is BlockKind.LAYER
    assert 24 < layer.saved_bytes / 1024 < 34
    assert layer.input_bytes / 1024 == 2
    work = Work(batch_size=1, sequence_length=100)
    roomy = [
        Method(weights=Place.DEVICE, state=Place.DEVICE, activations=way)
        for way in (Activations.KEPT, Activations.RECOMPUTED)
    ]
    kept, recomputed = (activation_bytes(Case(shape, work, Spread(), method, MACHINES["4090"]))[0] for method in roomy)
    assert recomputed < kept / 4


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no hidden_size or n_embd"):
        shape_of_config({"model_type": "llama"})
    with pytest.raises(ValueError, match=r"no config at 'nowhere.json'"):
        read_config("nowhere.json")
    with pytest.raises(TypeError, match="int is no model that can be planned"):
        read_config(3)
