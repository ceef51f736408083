"""Which models and machines do the tests of costs share?"""

from typing import Any

import pytest

from headrace.planning import search
from headrace.planning.cost import Hardware

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


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Visits are planned with fewer trials, alike for whatever is compared."""
    monkeypatch.setattr(search, "TRIALS", 100)
    monkeypatch.setattr(search, "TRIALS", 100)


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
