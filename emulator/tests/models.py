"""Which whole models must run on the emulator? Tiny ones, with random weights, of the families that people stream."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn

VOCABULARY, WIDTH, INNER, HEADS, TOKENS = 64, 32, 48, 4, 12

Builder = Callable[[], nn.Module]


def causal(name: str, **more: Any) -> Builder:
    """A model of transformers in Llama's vocabulary of settings."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    config = getattr(transformers, f"{name}Config")
    return lambda: getattr(transformers, f"{name}ForCausalLM")(config(**settings | more))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=32, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=INNER, num_layers=2, num_heads=HEADS, dropout_rate=0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2,
            num_attention_heads=HEADS, max_position_embeddings=32, hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
    )  # fmt: skip


def whisper() -> nn.Module:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS, encoder_ffn_dim=INNER, decoder_ffn_dim=INNER, num_mel_bins=8,
            max_source_positions=16, max_target_positions=32, dropout=0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1,
        )
    )  # fmt: skip


def mamba() -> nn.Module:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=8, num_hidden_layers=2)
    )


def unet() -> nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=16,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


def flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def sd3() -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64, out_channels=4,
        pos_embed_max_size=16,
    )  # fmt: skip


def text() -> dict[str, Tensor]:
    tokens = torch.arange(2 * TOKENS).view(2, TOKENS)
    return {"input_ids": tokens * 5 % VOCABULARY, "labels": tokens * 7 % VOCABULARY}


def speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 32), "labels": text()["labels"]}


def noisy_image() -> dict[str, Tensor]:
    return {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, 5, 16),
    }


def flux_image() -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(6, 3),
        "timestep": torch.tensor([0.5]),
    }


def sd3_image() -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 64),
        "timestep": torch.tensor([3, 7]),
    }


MODELS: dict[str, tuple[Builder, Callable[[], dict[str, Tensor]]]] = {
    "llama": (causal("Llama"), text),
    "qwen3": (causal("Qwen3", head_dim=8), text),
    "mixtral": (causal("Mixtral", num_local_experts=4, output_router_logits=True), text),
    "gpt2": (gpt2, text),
    "t5": (t5, text),
    "bert": (bert, text),
    "whisper": (whisper, speech),
    "mamba": (mamba, text),
    "unet": (unet, noisy_image),
    "flux": (flux, flux_image),
    "sd3": (sd3, sd3_image),
}


def build_model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in float32 on the CPU, and inputs for one step of it."""
    build, inputs = MODELS[name]
    return build(), inputs()
