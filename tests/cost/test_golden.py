"""Did a plan change? Ten models on three machines, and mixtures of experts on two, as text.

`pytest tests/cost --update-golden` writes them anew.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import headrace
from tests.cost.conftest import LLAMA_8B, LLAMA_70B, QWEN3_30B_A3B, plain

GOLDEN = Path(__file__).parents[1] / "golden"
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
    "8xh200": {"devices": 8, "zero_stage": 3},
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
CASES = [*itertools.product(MODELS, MACHINES), *itertools.product(ONE_BY_ONE, ("4090", "h100"))]


@pytest.mark.parametrize(("model", "machine"), CASES)
def test_the_plan_is_the_golden_one(model: str, machine: str, request: pytest.FixtureRequest) -> None:
    config, settings = (MODELS | ONE_BY_ONE)[model]
    text = headrace.plan(config, hardware=machine, **settings, **MACHINES[machine]).to_text()
    path = GOLDEN / f"{model}-on-{machine}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text()
