"""Does a plan count what transformers' models really save for backward? Against real tensors on the CPU."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from headrace.planning.cost import LLAMAS, BlockKind, ModelShape, Training, layers_of
from headrace.runtime.autograd import tree_flatten
from headrace.shapes import shape_of

LAYERS, BATCH, LENGTH = 3, 2, 96
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "intermediate_size": 160,
    "max_position_embeddings": 128,
    **ENDS,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
OLD = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 128, "vocab_size": 101, **ENDS}
# Without dropout, for which accelerators have kernels of their own.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 32},
    "gemma": GROUPED | {"head_dim": 16},
    "gemma2": GROUPED | {"head_dim": 16, "sliding_window": 32},
    "gpt2": OLD | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": SMALL,
    "phi": SMALL,
    "opt": SMALL | {"ffn_dim": 160, "word_embed_proj_dim": 64, "dropout": 0.0},
    "bloom": {"hidden_size": 64, "n_layer": LAYERS, "n_head": 4, "vocab_size": 101, **ENDS},
    "bert": SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": LAYERS, "num_heads": 4, "vocab_size": 101}
    | {"dropout_rate": 0.0, "decoder_start_token_id": 0, **ENDS},
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": GROUPED | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
}
WITHOUT_SDPA = ("bloom", "gemma2")
CASES = [(kind, way) for kind in CONFIGS for way in ("sdpa", "eager") if way == "eager" or kind not in WITHOUT_SDPA]


def model_of(kind: str, way: str, layers: int = LAYERS, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    described = CONFIGS[kind] | {name: layers for name in ("num_hidden_layers", "n_layer") if name in CONFIGS[kind]}
    if kind == "t5":
        described |= {"num_layers": layers, "num_decoder_layers": layers}
    config = transformers.AutoConfig.for_model(kind, **described)
    makers: dict[str, Any] = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
    maker = makers.get(kind, transformers.AutoModelForCausalLM)
    model: nn.Module = maker.from_config(config, dtype=dtype, attn_implementation=way)
    return model.train()


def really_saved(model: Any, *, recomputed: bool = False) -> int:
    """Bytes of the distinct storages that a forward with its loss saves, without those of parameters.

    Recomputation also keeps what layers are given.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def given(_layer: nn.Module, args: Any, kwargs: Any) -> None:
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, torch.Tensor):
                pack(value)

    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for name in layers_of(model):
            model.get_submodule(name).register_forward_pre_hook(given, with_kwargs=True)
    tokens = torch.randint(3, 100, (BATCH, LENGTH))
    settings: dict[str, Any] = {} if model.config.model_type == "bert" else {"use_cache": False}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens, **settings)
    return sum(storage.nbytes() for address, storage in saved.items() if address not in own)


def planned(shape: ModelShape) -> tuple[float, float, float]:
    """Bytes of one layer (of each stack), of all, and of all when layers are recomputed: what is kept for backward."""
    tokens = BATCH * LENGTH
    layers = [block for block in shape.blocks if block.kind is BlockKind.LAYER]
    one = sum(layer.saved_bytes for layer in layers[LAYERS - 1 :: LAYERS])
    saved = sum(block.saved_bytes for block in shape.blocks)
    kept = sum(block.saved_bytes if block.kind is BlockKind.HEAD else block.input_bytes for block in shape.blocks)
    return tokens * one, tokens * saved, tokens * kept


@pytest.mark.core(kind=["llama", "qwen3", "t5", "qwen3_moe"])
@pytest.mark.parametrize(("kind", "way"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_saved_bytes_are_those_of_transformers(kind: str, way: str) -> None:
    """In a layer, in the whole model, and in the model when layers are recomputed: within 3%."""
    model = model_of(kind, way)
    one, saved, kept = planned(shape_of(model, sequence_length=LENGTH))
    whole = really_saved(model)
    assert saved == pytest.approx(whole, rel=0.03)
    assert one == pytest.approx(really_saved(model_of(kind, way, LAYERS + 1)) - whole, rel=0.03)
    assert kept == pytest.approx(really_saved(model, recomputed=True), rel=0.03)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe"])
def test_a_config_is_counted_as_its_model_is(kind: str) -> None:
    model = model_of(kind, "sdpa")
    shape = shape_of(dict(model.config.to_dict()), sequence_length=LENGTH)
    assert shape.blocks == shape_of(model, sequence_length=LENGTH).blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("work", [Training.FULL, Training.ADAPTER])
@pytest.mark.parametrize("kind", LLAMAS)
def test_llamas_are_known_without_transformers(kind: str, work: Training, dtype: torch.dtype) -> None:
    """Within 1% in what they save and compute, and exactly in all else."""
    model = model_of(kind, "sdpa", dtype=dtype)
    told = shape_of(dict(model.config.to_dict()) | {"dtype": str(dtype)}, work)
    seen = shape_of(model, work)
    for by_hand, counted in zip(told.blocks, seen.blocks, strict=True):
        for name, value in vars(by_hand).items():
            about = name in ("active_parameters", "context_flops", "saved_bytes", "input_bytes", "logit_bytes")
            expected = getattr(counted, name)
            assert value == (pytest.approx(expected, rel=0.01) if about else expected), (by_hand.name, name)
