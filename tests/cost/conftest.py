"""Which models and machines do the tests of costs share?"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.planning import search
from headrace.planning.cost import Hardware, RunPlan, forecast

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}


def plain(layers: int, hidden: int, vocabulary: int = 50272, heads: int = 128) -> dict[str, Any]:
    """A decoder as in the exercises: 12 H^2 parameters in a layer."""
    return {
        "model_type": "opt",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }


SMALL_LLAMA = LLAMA_8B | {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama-1b": (SMALL_LLAMA | {"head_dim": 64, "tie_word_embeddings": True}, {"batch_size": 4}),
    "llama-8b": (LLAMA_8B, {"batch_size": 4}),
    "llama-8b-lora": (LLAMA_8B, {"batch_size": 4, "training": "adapter"}),
    "llama-8b-inference": (LLAMA_8B, {"training": "inference"}),
    "llama-70b": (LLAMA_70B, {"batch_size": 2, "overlap": "forward"}),
    "llama-70b-qlora": (LLAMA_70B, {"training": "adapter", "weight_bits": 4.5}),
    "llama-70b-inference": (LLAMA_70B, {"training": "inference", "batch_size": 8}),
    "qwen3-30b-a3b": (QWEN3_30B_A3B, {"batch_size": 2, "micro_batches": 4}),
    "opt-175b": (plain(layers=96, hidden=12_288, heads=96), {"batch_size": 1}),
    "plain-500b": (plain(layers=120, hidden=18_634, heads=121), {"batch_size": 1, "overlap": "backward"}),
}
MACHINES: dict[str, dict[str, Any]] = {
    "4090": {},
    "h100": {},
    "8xh200": {"devices": 8, "zero_stage": 2},
}
INFERENCE = {"training": "inference"}
MIXTURES: dict[str, dict[str, Any]] = {  # by file of configs/, and what for
    "gpt-oss-120b": INFERENCE,
    "qwen3-30b-a3b": INFERENCE | {"batch_size": 4, "expert_hit_rate": 0.85},
    "qwen3-235b-a22b": INFERENCE,
    "deepseek-v3": INFERENCE,
    "mixtral-8x7b": INFERENCE,
}
ONE_BY_ONE = {
    f"{name}-{how}": (json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text()), settings)
    for name, inference in MIXTURES.items()
    for how, settings in (("inference", inference), ("lora", {"training": "adapter", "batch_size": 4}))
}


def every_case() -> list[tuple[str, str]]:
    """Ten models on three machines, and mixtures of experts on two."""
    return [*itertools.product(MODELS, MACHINES), *itertools.product(ONE_BY_ONE, ("4090", "h100"))]


def planned_case(model: str, machine: str) -> RunPlan:
    config, settings = (MODELS | ONE_BY_ONE)[model]
    return headrace.plan(config, hardware=machine, **settings, **MACHINES[machine])


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Visits are planned with fewer trials, alike for whatever is compared."""
    monkeypatch.setattr(search, "TRIALS", 100)
    forecast.planned.cache_clear()


@pytest.fixture
def exercise_node() -> Hardware:
    """The exercises' node: 8 devices of 80 GB, 2 TB of host memory, 20 TB of disk at 28 GB/s, links of 25 GB/s."""
    return Hardware(
        name="exercise",
        devices=8,
        device_memory_bytes=80 * 10**9,
        device_bytes_per_second=3.35e12,
        flops_per_second=400e12,
        onload_bytes_per_second=25e9,
        offload_bytes_per_second=25e9,
        host_memory_bytes=2 * 10**12,
        dram_bytes_per_second=200e9,
        disk_bytes=20 * 10**12,
        disk_read_bytes_per_second=28e9,
        disk_write_bytes_per_second=20e9,
        disk_endurance_bytes=36_500 * 10**12,
        collective_bytes_per_second=300e9,
    )
