"""How is each architecture of transformers built small, with random weights, and what does it take?

Of every kind of configuration the first model class with a head, or else the bare one, from small numbers for the names
that configurations share; of a few kinds a class and arguments of our own.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

TRIED = "Every kind of configuration of transformers"
NOTE = (
    "Built with arguments of our own, because of what is special in them: DBRX (`dbrx`), Emu3 (`emu3`, and"
    " `emu3_text_model` alone), Gemma 4 with experts (`gemma4`) and with keys and values shared among layers"
    " (`gemma4_text`), and DiffusionGemma (`diffusion_gemma`), whose encoder and decoder share all weights of their"
    " layers. HRM (`hrm_text`), whose layers run several times in a forward, and models with hyper-connections"
    " (`deepseek_v4`, `hy_v4`, `qwen4_exp_text`) build as the others do. All of them get text only."
)

# Names that configurations give to the same few numbers.
_SIZES = {
    32: "hidden_size d_model n_embd embed_dim dim emb_dim hidden_dim embedding_size model_dim n_embed image_size"
    " decoder_hidden_size projection_dim",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size dim_feedforward"
    " max_position_embeddings n_positions max_source_positions max_target_positions max_sequence_length d_inner"
    " inner_dim decoder_intermediate_size shared_expert_intermediate_size lstm_dim",
    3: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers depth"
    " num_decoder_layers decoder_num_hidden_layers",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads heads"
    " num_local_experts num_experts n_routed_experts decoder_num_attention_heads",
    2: "num_key_value_heads num_experts_per_tok top_k n_group topk_group n_head_kv multi_query_group_num"
    " num_selected_experts moe_topk moe_top_k",
    8: "head_dim d_kv attention_head_size qk_nope_head_dim qk_rope_head_dim v_head_dim",
    16: "qk_head_dim moe_intermediate_size q_lora_rank kv_lora_rank expert_intermediate_size",
    128: "vocab_size",
    1: "n_shared_experts first_k_dense_replace num_shared_experts",
}
SMALL = {name: int(size) for size, names in _SIZES.items() for name in names.split()}

_TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EMU3 = _TEXT | {"num_hidden_layers": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GEMMA = _TEXT | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
}
_GEMMA4 = _GEMMA | {
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
}
_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 64,
}
# A class, and arguments of its configuration, whose parts disagree once they are made smaller one by one.
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "dbrx": (
        "DbrxForCausalLM",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "vocab_size": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "diffusion_gemma": (
        "DiffusionGemmaForBlockDiffusion",
        {"text_config": _GEMMA | _EXPERTS, "vision_config": _VISION, "canvas_length": 12, "image_token_id": 120},
    ),
    "emu3": (
        "Emu3ForConditionalGeneration",
        {
            "text_config": _EMU3,
            "vq_config": {
                "codebook_size": 64,
                "base_channels": 32,
                "hidden_size": 32,
                "channel_multiplier": (1, 2),
                "num_res_blocks": 1,
            },
            "vocabulary_map": {"<image>": 100} | {f"<|visual token {number:06d}|>": number for number in range(64)},
        },
    ),
    "emu3_text_model": ("Emu3ForCausalLM", _EMU3),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": _GEMMA4 | _EXPERTS | {"enable_moe_block": True},
            "vision_config": _VISION,
            "image_token_id": 120,
            "video_token_id": 121,
            "audio_token_id": 122,
        },
    ),
    "gemma4_text": ("Gemma4ForCausalLM", _GEMMA4),
}


def shrink(config: Any, depth: int = 0) -> None:
    """Small numbers in a configuration, and in those inside of it."""
    for name in list(vars(config)) + list(getattr(type(config), "attribute_map", {})):
        value = getattr(config, name, None)
        if name in SMALL and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, SMALL[name])
        elif depth < 3 and hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value, depth + 1)
    if getattr(config, "kv_lora_rank", None):  # all heads have keys of their own, of a common part
        config.num_key_value_heads = config.num_attention_heads
    layers = next((SMALL[n] for n in ("num_hidden_layers",) if getattr(config, n, None) is not None), None)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if layers and isinstance(kinds, list | tuple) and len(kinds) > layers:
            setattr(config, name, list(kinds[:layers]))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value >= SMALL["vocab_size"]:
            setattr(config, name, 1)


def models() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """The first of its model classes with a head, or else the bare one, of every kind of configuration."""
    import transformers
    from transformers.models.auto import modeling_auto

    mappings = [
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        modeling_auto.MODEL_MAPPING,
    ]
    for name, config_class in sorted(transformers.CONFIG_MAPPING.items()):
        if name in OWN:
            class_name, arguments = OWN[name]
            yield name, _maker(partial(config_class, **arguments), getattr(transformers, class_name), small=True)
            continue
        for mapping in mappings:
            if config_class in mapping:
                with contextlib.suppress(ValueError):  # a name that this release has no class for
                    found = mapping[config_class]
                    yield name, _maker(config_class, found[0] if isinstance(found, tuple) else found)
                    break


def _maker(config_class: Any, model_class: Any, *, small: bool = False) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = config_class()
        if not small:
            shrink(config)
        config.use_cache = False
        for name in list(vars(config)):
            if "drop" in name and isinstance(getattr(config, name), float):
                setattr(config, name, 0.0)
        torch.manual_seed(0)
        model: nn.Module = model_class._from_config(config)
        if sum(parameter.numel() for parameter in model.parameters()) > 20_000_000:
            raise MemoryError("not small")
        return model

    return make


def inputs_of(model: Any) -> Iterator[dict[str, Tensor]]:
    """What it may take, the likeliest first."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 100, (2, 12), generator=generator)
    image = torch.randn(2, 3, 32, 32, generator=generator)
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_ids":
        if getattr(model.config, "is_encoder_decoder", False) or hasattr(model.config, "canvas_length"):
            yield {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
        yield {"input_ids": ids}
        yield {"input_ids": ids, "pixel_values": image}
    if main == "pixel_values":
        yield {"pixel_values": image}
        yield {"pixel_values": image, "input_ids": ids}
    if main == "input_values":
        yield {"input_values": torch.randn(2, 4000, generator=generator)}
    if main == "input_features":
        bins = getattr(model.config, "num_mel_bins", 80)
        features = torch.randn(2, bins, 128, generator=generator)
        yield {"input_features": features, "decoder_input_ids": ids}
        yield {"input_features": features}
        yield {"input_features": features.transpose(1, 2)}
