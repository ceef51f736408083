"""How is each model class of diffusers built small, with random weights, and what does it take?

Every class that diffusers exports. Its arguments are those of `__init__`: small numbers for the names that the classes
share, one layer of each kind for a list of them, and what `diffusers_configs` says for a single class; the rest
keeps its default. Inputs follow from the names that `forward` has, from the configuration, and from
`diffusers_inputs`.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.zoo.diffusers_configs import CONFIGS, WORDS
from tests.zoo.diffusers_inputs import BATCH, INPUTS

TRIED = "Every model class of diffusers"
NOTE = (
    "Every model class that diffusers exports. Where its arguments and inputs do not follow from names,"
    " `tests/zoo/diffusers_configs.py` and `diffusers_inputs.py` have them. Parameters that begin as zeros get"
    " noise. Recomputation is left out where a class claims to have it and it cannot be turned on. Multi ControlNets"
    " and adapters are lists of models, of which each is tried by itself."
)
SIDE, FRAMES = 8, 3
# Plain runs of these raise when recomputation is on, in diffusers 0.42.1: the arguments or the shapes do not fit.
CANNOT_RECOMPUTE = {"AutoencoderKLMagvit", "HunyuanImageTransformer2DModel", "UVit2DModel"}

# Arguments for the width of what a text encoder gives, the decisive one first.
TEXT = (
    "joint_attention_dim",
    "text_embed_dim",
    "text_dim",
    "caption_channels",
    "context_in_dim",
    "cap_feat_dim",
    "in_text_dim",
    "cross_attention_input_dim",
    "cond_token_dim",
    "dit_text_dim",
    "encoder_hidden_states_channels",
    "encoder_hid_dim",
    "text_hidden_dim",
    "llm_features_dim",
    "cross_attention_dim",
)
# Without "3D" in their names, and with frames all the same.
VIDEO = {
    "AutoencoderKLAllegro",
    "AutoencoderKLCogVideoX",
    "AutoencoderKLCosmos",
    "AutoencoderKLHunyuanImageRefiner",
    "AutoencoderKLHunyuanVideo",
    "AutoencoderKLHunyuanVideo15",
    "AutoencoderKLKVAEVideo",
    "AutoencoderKLLTX2Video",
    "AutoencoderKLLTXVideo",
    "AutoencoderKLMagvit",
    "AutoencoderKLMiniMaxH3",
    "AutoencoderKLMochi",
    "AutoencoderKLQwenImage",
    "AutoencoderKLQwenImage21",
    "AutoencoderKLWan",
    "AutoencoderVidTok",
    "I2VGenXLUNet",
    "Kandinsky6SRVAE",
    "UNetMotionModel",
    "SparseControlNetModel",
}

# Names that `__init__` gives to the same few numbers.
_SIZES = {
    3: "num_layers num_single_layers n_layers num_hidden_layers depth num_visual_blocks nlayers dit_depth"
    " transformer_num_layers num_mmdit_layers num_single_dit_layers",
    1: "num_refiner_layers n_refiner_layers num_text_blocks layers_per_block num_res_blocks layers_per_down_block"
    " layers_per_up_block num_enc_blocks num_dec_blocks num_mid_layers num_layerwise_text_blocks"
    " num_refiner_text_blocks perceiver_num_layers encoder_layers_per_block decoder_layers_per_block",
    4: "num_attention_heads num_heads n_heads nheads num_key_value_heads n_kv_heads num_kv_heads"
    " num_cross_attention_heads decoder_num_attention_heads attn_num_heads num_experts num_routed_experts dit_heads"
    " motion_num_attention_heads audio_num_attention_heads text_num_attention_heads text_num_key_value_heads"
    " num_key_value_attention_heads",
    16: "attention_head_dim head_dim cross_attention_head_dim linear_head_dim audio_attention_head_dim"
    " decoder_attention_head_dim base_dim ch base_channels channels rotary_dim dim_heads d_kv"
    " decoder_base_dim",
    32: "joint_attention_dim text_dim text_embed_dim text_embed_2_dim caption_channels cross_attention_dim in_text_dim"
    " in_text_dim2 pooled_projection_dim context_in_dim cap_feat_dim time_embed_dim freq_dim time_dim text_in_dim"
    " text_hidden_dim encoder_hid_dim cross_attention_input_dim condition_dim image_embed_dim cross_attention_dim_t5"
    " text_encoder_dim time_step_dim adaln_lora_dim llm_features_dim dit_text_dim cond_token_dim global_cond_dim"
    " timestep_embed_dim adaln_dim text_emb_dim clip_text_pooled_in_channels conditioning_dim"
    " crossattn_proj_in_channels encoder_hidden_states_channels audio_cross_attention_dim timestep_guidance_channels"
    " timestep_channels approximator_num_channels embedding_dim cross_attention_dim image_proj_dim pair_repr_dim"
    " dim_cond fourier_embedding_dim timestep_features_dim global_states_input_dim time_proj_dim text_input_dim",
    64: "hidden_size model_dim dim caption_projection_dim approximator_hidden_dim dit_dim embed_dim token_dim d_model"
    " encoder_hidden_size decoder_hidden_size time_embed_hidden_dim model_channels",
    128: "ffn_dim ff_dim intermediate_size ffn_hidden_size text_intermediate_size ff_inner_dim d_ff vocab_size"
    " decoder_intermediate_size moe_intermediate_dim codebook_size",
    8: "norm_num_groups groups motion_norm_num_groups ctrl_max_norm_num_groups max_norm_num_groups"
    " encoder_norm_num_groups decoder_norm_num_groups",
    SIDE: "sample_size sample_height sample_width",
}
SMALL: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()}
# Rotary frequencies are split among as many axes as the default has; they add up to a head.
_AXES = {2: (8, 8), 3: (4, 4, 8), 4: (4, 4, 4, 4)}
_AXES_NAMES = ("axes_dims_rope", "rope_axes_dim", "axes_dims", "axes_dim_rope", "rope_dim_list", "axes_dim", "rope_dim")
# Given where `forward` has a default for it, too.
_ASKED = ("encoder_hidden_states", "timestep", "pooled_projections", "guidance", "img_ids", "txt_ids")


def models() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Each model class, by name."""
    import diffusers

    for name in sorted(dir(diffusers)):
        exported = getattr(diffusers, name, None)
        if (
            inspect.isclass(exported)
            and issubclass(exported, diffusers.ModelMixin)
            and exported is not diffusers.ModelMixin
        ):
            yield name, maker(exported)


def can_recompute(model: Any) -> bool:
    """Whether recomputation can be turned on: some classes claim to have it, and no module of theirs does."""
    return (
        getattr(model, "_supports_gradient_checkpointing", False)
        and type(model).__name__ not in CANNOT_RECOMPUTE
        and any(hasattr(module, "gradient_checkpointing") for module in model.modules())
    )


def small_config(model_class: Any) -> dict[str, Any]:
    """The arguments to build it small."""
    config: dict[str, Any] = {}
    for name, parameter in inspect.signature(model_class.__init__).parameters.items():
        default = parameter.default
        if name in _AXES_NAMES and isinstance(default, list | tuple):
            config[name] = _AXES[len(default)]
        elif name == "axes_lens":
            config[name] = (64,) * len(default)
        elif "channels" in name and isinstance(default, list | tuple):
            config[name] = (32,) * len(default)
        elif "layers_per_block" in name and isinstance(default, list | tuple):
            config[name] = (1,) * len(default)
        elif name in SMALL and not isinstance(default, list | tuple) and default is not None:
            config[name] = SMALL[name]
    if "caption_channels" in config and "cross_attention_dim" in config:  # which is its own width there
        config["cross_attention_dim"] = 64
    return config | CONFIGS.get(model_class.__name__, {})


def maker(model_class: Any) -> Callable[[], nn.Module]:
    """What builds it, each time with the same weights."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = model_class(**small_config(model_class))
        if sum(parameter.numel() for parameter in model.parameters()) > 20_000_000:
            raise MemoryError("not small")
        for name, parameter in model.named_parameters():
            # Zeros in front of an output would hide what is wrong behind them; Lumina's token is uninitialised memory.
            if name.endswith("pad_token") or not parameter.detach().any():
                nn.init.normal_(parameter, std=0.02)
        return model

    return make


def inputs_of(model: Any) -> Iterator[dict[str, Any]]:
    """What its forward needs."""
    torch.manual_seed(1)
    own = INPUTS.get(type(model).__name__, lambda config: {})(model.config)
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(model).forward).parameters.items():
        if name in own:
            if own[name] is not None:
                found[name] = own[name]
        elif parameter.default is inspect.Parameter.empty or name in _ASKED:
            value = _usual(name, model)
            if value is not None:
                found[name] = value
    yield found


def _usual(name: str, model: Any) -> Any:
    config = model.config
    channels = config.get("in_channels") or config.get("in_visual_dim") or 4
    if name in ("hidden_states", "sample", "controlnet_cond", "x", "z"):
        if {"img_ids", "img_shapes"} & set(inspect.signature(type(model).forward).parameters):
            return torch.randn(BATCH, 16, channels)
        side = 16 if name == "sample" else SIDE
        side = 32 if "Autoencoder" in type(model).__name__ or isinstance(config.get("latent_channels"), int) else side
        frames = [FRAMES] if type(model).__name__ in VIDEO or "3D" in type(model).__name__ else []
        return torch.randn(BATCH, channels, *frames, side, side)
    if name == "encoder_hidden_states":
        width = next((config[text] for text in TEXT if config.get(text)), 32)
        return torch.randn(BATCH, WORDS, width)
    if name in ("encoder_attention_mask", "encoder_mask", "encoder_hidden_states_mask"):
        return torch.ones(BATCH, WORDS)
    if name in ("timestep", "timesteps", "timestep_r", "t"):
        return torch.tensor([0.5, 0.1])
    if name == "img_shapes":
        return [[(1, 4, 4)]] * BATCH
    if name == "pooled_projections":
        return torch.randn(BATCH, config.get("pooled_projection_dim") or config.get("in_text_dim2") or 32)
    if name == "guidance" and config.get("guidance_embeds"):
        return torch.tensor([3.5, 1.0])
    if name in ("img_ids", "txt_ids"):
        axes = next(config[axes] for axes in _AXES_NAMES if config.get(axes))
        ids = torch.zeros(16 if name == "img_ids" else WORDS, len(axes))
        ids[:, -1] = torch.arange(len(ids))
        return ids
    return None
