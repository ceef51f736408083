"""Which models are measured? Llamas, mixtures of experts and stacks of video-DiT blocks, of real sizes.

Their random weights are made in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# layers, width, inner width, heads, heads of keys and values, vocabulary
LLAMAS = {
    "tiny": (8, 64, 176, 4, 2, 256),
    "1.5b": (16, 2048, 8192, 32, 8, 128256),
    "3b": (28, 3072, 8192, 24, 8, 128256),
    "8b": (32, 4096, 14336, 32, 8, 128256),
    "14b": (48, 5120, 13824, 40, 8, 152064),
    "32b": (64, 5120, 27648, 40, 8, 152064),
}
# the same of mixtures, whose inner width is an expert's; then experts, and those of a token
MOES = {"tiny": (4, 64, 32, 4, 2, 256, 16, 2), "15b": (24, 2048, 768, 32, 4, 151936, 128, 8)}
# layers, width, inner width, heads
DITS = {"tiny": (8, 64, 128, 4), "1.3b": (30, 1536, 8960, 12), "14b": (40, 5120, 13824, 40)}
TEXT_TOKENS, CHANNELS = 512, 64
TEMPLATE_ELEMENTS = 1_048_573  # a prime: no two rows of a matrix begin at the same place


def config_of(kind: str, size: str) -> Any:
    from transformers import LlamaConfig, Qwen3MoeConfig  # here, as it takes seconds, and only the children need it

    layers, width, inner, heads, key_heads, vocabulary, *routed = MOES[size] if kind == "moe" else LLAMAS[size]
    own: dict[str, Any] = {"intermediate_size": inner}
    if routed:
        own = {"moe_intermediate_size": inner, "num_experts": routed[0], "num_experts_per_tok": routed[1]}
        own["head_dim"] = width // heads
    return (Qwen3MoeConfig if routed else LlamaConfig)(
        **own,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        max_position_embeddings=65536,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
        bos_token_id=None,
        eos_token_id=None,
    )


def language_model(kind: str, size: str, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Made on `device`, or on meta; its values are the same in every dtype and on every device."""
    from transformers import AutoModelForCausalLM

    config = config_of(kind, size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if str(device) == "meta":
        return model
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its buffers are computed, not loaded
    fill(model)
    return model


def dit(size: str, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> VideoDiT:
    """Made as `language_model` is."""
    with torch.device("meta"):
        model = VideoDiT(*DITS[size]).to(dtype)
    if str(device) != "meta":
        model.to_empty(device=device)
        fill(model)
    return model


@torch.no_grad()
def fill(module: nn.Module, parameters: Iterator[nn.Parameter] | None = None) -> None:
    """Matrices get one short run of random numbers over and over, as fast as memory is written; vectors get ones."""
    values = torch.randn(TEMPLATE_ELEMENTS, generator=torch.Generator().manual_seed(0)) * 0.02
    templates: dict[torch.device, Tensor] = {}
    for parameter in module.parameters() if parameters is None else parameters:
        if parameter.ndim < 2:
            parameter.fill_(1)
            continue
        device = parameter.device
        if device not in templates:
            templates[device] = values.to(torch.bfloat16).to(device)
        template, flat = templates[device], parameter.view(-1)
        whole = flat.numel() // TEMPLATE_ELEMENTS * TEMPLATE_ELEMENTS
        flat[:whole].view(-1, TEMPLATE_ELEMENTS).copy_(template)
        flat[whole:].copy_(template[: flat.numel() - whole])


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The repeated layers."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def nbytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


class Attention(nn.Module):
    """Of `x` to itself, or to `other`; queries and keys are normalised."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.query_norm, self.key_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """`x`: (rows, tokens, width); `other`: (rows, other tokens, width)."""
        other = x if other is None else other
        query, key, value = self.query_norm(self.query(x)), self.key_norm(self.key(other)), self.value(other)
        split = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (query, key, value))
        return self.out(F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2))


class DiTBlock(nn.Module):
    """Attention to itself and to the text, and an MLP, modulated by the time step."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(6, width))
        self.to_itself, self.to_text = Attention(width, heads), Attention(width, heads)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width))

    def forward(self, x: Tensor, text: Tensor, time: Tensor) -> Tensor:
        """`x`: (rows, tokens, width); `time`: (rows, 6, width)."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (self.modulation + time).unsqueeze(2).unbind(1)
        x = x + gate * self.to_itself(self.norm(x) * (1 + scale) + shift)
        x = x + self.to_text(self.norm(x), text)
        return x + mlp_gate * self.mlp(self.norm(x) * (1 + mlp_scale) + mlp_shift)


class VideoDiT(nn.Module):
    """What a video model runs at each step of denoising, without its embeddings of positions."""

    def __init__(self, layers: int, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(CHANNELS, width), nn.Linear(width, CHANNELS)
        self.time = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(DiTBlock(width, inner, heads) for _ in range(layers))

    def forward(self, latents: Tensor, text: Tensor, step: Tensor) -> Tensor:
        """`latents`: (rows, tokens, channels); `text`: (rows, text tokens, width); `step`: (rows,)."""
        x = self.enter(latents)
        angles = step[:, None] * torch.logspace(0, -4, x.shape[-1], device=x.device)
        time = self.time(torch.sin(angles * math.tau).to(x.dtype)).unflatten(-1, (6, -1))
        for block in self.blocks:
            x = block(x, text, time)
        return self.leave(x)
