"""How does a recipe run, a function that returns the settings of a model, an optimizer and a run? Step by step.

| Megatron-Bridge | here |
|---|---|
| a recipe returns a `ConfigContainer`; `cfg.model.provide()` builds the model | the same |
| `run_recipe.py --recipe NAME key=value ...` | `headrace run-recipe --recipe NAME key=value ...`; `MODULE:NAME` and |
| | `FILE.py:NAME` are one's own |
| random tokens where no data is named | the same |
| one process for each device of a cluster | one process and one device |
| compare losses with a run without offloading by hand | `--compare` |
"""

import dataclasses
import difflib
import importlib
import runpy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from headrace.compat.megatron_config import ConfigContainer, OptimizerConfig, TrainingConfig, apply
from headrace.compat.transformer_engine import CPUOffloadConfig
from headrace.runtime.device import is_accelerator, resolve_device

__all__ = ["Iteration", "MoEModelConfig", "find_recipe", "qwen3_30b_a3b_pretrain_config", "run_recipe"]


@dataclasses.dataclass(kw_only=True)
class MoEModelConfig(CPUOffloadConfig):
    """A Qwen3 mixture of experts in Megatron's words, with random weights. Needs transformers. Raises as its base."""

    hidden_size: int
    moe_ffn_hidden_size: int
    num_moe_experts: int
    moe_router_topk: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    seq_length: int = 4096
    params_dtype: torch.dtype = torch.bfloat16
    seed: int = 1234

    def transformers_config(self) -> Any:
        """The same in transformers' words, as `headrace.plan` takes it, too."""
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            num_hidden_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.moe_ffn_hidden_size,
            moe_intermediate_size=self.moe_ffn_hidden_size,
            num_experts=self.num_moe_experts,
            num_experts_per_tok=self.moe_router_topk,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_query_groups,
            head_dim=self.kv_channels,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.seq_length,
            tie_word_embeddings=False,
            use_cache=False,
            dtype=self.params_dtype,
        )

    def provide(self) -> nn.Module:
        """The model, on the CPU."""
        from transformers import Qwen3MoeForCausalLM

        torch.manual_seed(self.seed)
        model = Qwen3MoeForCausalLM(self.transformers_config()).to(self.params_dtype)
        if self.recompute_granularity is not None:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        return model  # type: ignore[no-any-return]


def qwen3_30b_a3b_pretrain_config() -> ConfigContainer:
    """Qwen3-30B-A3B (Qwen team, 2025): 48 layers of 128 experts, 30.5 billion parameters."""
    return ConfigContainer(
        model=MoEModelConfig(
            num_layers=48,
            hidden_size=2048,
            moe_ffn_hidden_size=768,
            num_moe_experts=128,
            moe_router_topk=8,
            num_attention_heads=32,
            num_query_groups=4,
            kv_channels=128,
            vocab_size=151_936,
        ),
        optimizer=OptimizerConfig(lr=3e-4, weight_decay=0.1, adam_beta2=0.95, use_distributed_optimizer=True),
        train=TrainingConfig(train_iters=20, global_batch_size=8, micro_batch_size=1),
    )


_RECIPES: dict[str, Callable[[], ConfigContainer]] = {"qwen3_30b_a3b_pretrain_config": qwen3_30b_a3b_pretrain_config}


def find_recipe(name: str) -> Callable[[], ConfigContainer]:
    """The recipe of a name: one of this file, "MODULE:NAME" or "FILE.py:NAME". Raises ValueError for any other."""
    place, _, function = name.rpartition(":")
    if not place:
        there: dict[str, Any] = dict(_RECIPES)
    elif place.endswith(".py"):
        try:
            there = runpy.run_path(place)
        except OSError as error:
            raise ValueError(f"recipe {name!r}: {place} cannot be read: {error.strerror}") from error
    else:
        try:
            there = vars(importlib.import_module(place))
        except ModuleNotFoundError as error:
            raise ValueError(f"recipe {name!r}: there is no module {place!r}; give FILE.py:NAME for a file") from error
    found = there.get(function)
    if not callable(found):
        near = difflib.get_close_matches(function, [each for each, value in there.items() if callable(value)], n=1)
        hint = f"did you mean {near[0]}?" if near else f"here is {', '.join(_RECIPES)}"
        raise ValueError(f"there is no recipe {name!r}; {hint} (your own are MODULE:NAME or FILE.py:NAME)")
    return found  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Iteration:
    """One step: its mean loss, how long it took, and the most bytes that the device held so far (None on the CPU)."""

    number: int
    loss: float
    seconds: float
    device_peak_bytes: int | None


def run_recipe(config: ConfigContainer) -> Iterator[Iteration]:
    """Trains as the settings say, on random tokens or on what `config.model.batch(index, samples)` gives.

    The model computes on the accelerator, or on the CPU where there is none. Raises ValueError for settings that
    cannot work, before the first step.
    """
    config.validate()
    kind = type(config.model).__name__
    if getattr(config.model, "provide", None) is None:
        raise ValueError(f"{kind} has no provide(), which returns the model to train; define it")
    missing = [name for name in ("seed", "vocab_size", "seq_length") if not hasattr(config.model, name)]
    if missing and getattr(config.model, "batch", None) is None:
        raise ValueError(
            f"{kind} has no batch(index, samples), which returns the arguments of one call of the model; define it, or"
            f" {' and '.join(missing)} for random tokens"
        )
    return _steps(config)


def _steps(config: Any) -> Iterator[Iteration]:
    device, model = resolve_device(None), config.model.provide()
    if not (config.model.cpu_offloading and config.model.cpu_offloading_weights):
        model.to(device)
    handle = apply(config.model, model)
    optimizer, batch = config.optimizer.optimizer_for(model), getattr(config.model, "batch", None)
    micro_batches = config.train.global_batch_size // config.train.micro_batch_size
    try:
        for number in range(config.train.train_iters):
            begun, losses = time.perf_counter(), []
            for index in range(number * micro_batches, (number + 1) * micro_batches):
                samples = config.train.micro_batch_size
                given = _tokens(config.model, index, samples) if batch is None else batch(index, samples)
                loss = model(**{name: value.to(device) for name, value in given.items()}).loss / micro_batches
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            total = float(torch.stack(losses).sum())
            yield Iteration(
                number=number + 1,
                loss=total,
                seconds=time.perf_counter() - begun,
                device_peak_bytes=torch.accelerator.max_memory_allocated(device) if is_accelerator(device) else None,
            )
    finally:
        if handle is not None:
            handle.remove()


def _tokens(model: Any, index: int, samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(model.seed + 1 + index)
    tokens = torch.randint(model.vocab_size, (samples, model.seq_length), generator=generator)  # (samples, tokens)
    return {"input_ids": tokens, "labels": tokens}
