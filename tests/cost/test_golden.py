"""Did a plan change? Twelve plans are kept as text; each shows something that the others do not.

`pytest tests/cost --update-golden` writes them anew; the twelfth is in `test_sharing.py`. That a plan agrees with
itself is asserted in `test_printed.py`, also for all other models and machines of `conftest.py`.
"""

from pathlib import Path

import pytest

from tests.cost.conftest import planned_case

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = [
    ("llama-8b", "4090"),  # full training in host memory; update behind backward
    ("llama-70b", "h100"),  # update beside the next forward; lanes share host memory
    ("llama-70b-qlora", "4090"),  # activations that leave
    ("llama-70b-inference", "h100"),  # as fast as compute alone; decoding of whole layers
    ("llama-70b", "4090"),  # nothing fits
    ("plain-500b", "h100"),  # update within backward, its state on disk
    ("qwen3-30b-a3b", "4090"),  # micro-batches that go together; weights and state on disk
    ("qwen3-30b-a3b", "8xh200"),  # ZeRO; more micro-batches than are simulated
    ("qwen3-30b-a3b-inference", "4090"),  # experts one by one: several sequences, a hit rate
    ("deepseek-v3-inference", "4090"),  # experts one by one, from disk
    ("qwen3-235b-a22b-lora", "4090"),  # adapters; activations on disk
]


@pytest.mark.parametrize(("model", "machine"), CASES)
def test_the_plan_is_the_golden_one(model: str, machine: str, request: pytest.FixtureRequest) -> None:
    text = planned_case(model, machine).to_text()
    path = GOLDEN / f"{model}-on-{machine}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text()
