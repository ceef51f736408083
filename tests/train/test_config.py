"""Which settings are refused before anything is read, and what does a budget come to?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import TrainInputError
from headrace.train.config import TrainConfig


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("text", (), "no text is given"),
        ("steps", 0, "--steps is 0; give 1 or more"),
        ("layers", 0, "--layers is 0"),
        ("hidden_size", 100, "--hidden-size is 100; give a multiple of 64"),
        ("batch_size", -1, "--batch-size is -1"),
        ("accumulate", 0, "--accumulate is 0"),
        ("sequence_length", 1, "--sequence-length is 1; give 2 or more"),
        ("epochs", 0.0, "--epochs is 0.0"),
        ("learning_rate", float("nan"), "--learning-rate is nan"),
        ("max_grad_norm", -1.0, "--max-grad-norm is -1.0; give 0 or more"),
        ("seed", -1, "--seed is -1; give 0 to 4294967295"),
        ("weight_decay", -0.1, "--weight-decay is -0.1"),
        ("compare_plain", -1, "--compare-plain is -1"),
        ("dtype", "int8", "--dtype is 'int8'; give one of float32, bfloat16"),
        ("device_memory", "8 parsecs", "--device-memory='8 parsecs' is not a size"),
        ("device_memory", "-1GiB", "--device-memory=-1GiB is negative; give a size of 0 bytes or more"),
        ("device_memory", "24", "--device-memory='24' is 24 bytes; did you mean \"24GB\"?"),
        ("host_memory", -1, "--host-memory=-1 is negative"),
        ("host_memory", "", "--host-memory='' is not a size"),
    ],
)
def test_a_value_that_no_run_could_use_is_named(
    settings: Callable[..., TrainConfig], setting: str, value: Any, says: str
):
    with pytest.raises(TrainInputError) as raised:
        settings(**{setting: value})
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_weights_that_stay_in_their_files_keep_their_dtype(settings: Callable[..., TrainConfig]):
    with pytest.raises(TrainInputError, match="--disk reads the weights in model in place"):
        settings(disk=Path("spill"), model=Path("model"), dtype="bfloat16")


@pytest.mark.parametrize(
    ("given", "expected_bytes"), [("25%", 250), (" 12.5 % ", 125), ("2KiB", 2048), (77, 77), (None, None)]
)
def test_a_budget_is_bytes_or_a_share_of_the_weights(
    settings: Callable[..., TrainConfig], given: str | int | None, expected_bytes: int | None
):
    assert settings(device_memory=given).budget_bytes("device_memory", weight_bytes=1000) == expected_bytes


@pytest.mark.parametrize("device", ["abacus", "cuda:9999", ""])
def test_a_device_that_cannot_be_used_is_named(settings: Callable[..., TrainConfig], device: str):
    with pytest.raises(TrainInputError, match=f"--device='{device}' is not .*(give one such as|available: )"):
        settings(device=device).compute_device()
