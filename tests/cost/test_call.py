"""Does a plan end with calls that do what it says, and say which devices stand idle?"""

import re

import pytest
import torch
from torch import nn

import headrace
import headrace.optim
from tests.cost.conftest import LLAMA_8B

SMALL = LLAMA_8B | {"num_hidden_layers": 4, "vocab_size": 32_000}


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize(
    ("method", "calls"),
    [
        (
            "weights=host,state=host,activations=recomputed",
            ["gradient_checkpointing_enable()", 'offload(model, device_memory="3.00GB")', "AdamW(model.parameters())"],
        ),
        (
            "weights=disk,state=disk,activations=offloaded",
            [
                'offload(model, device_memory="3.00GB", disk="/a/local/drive/weights", activations=True)',
                'AdamW(model.parameters(), tier="disk", disk="/a/local/drive/state")',
            ],
        ),
        ("weights=device,state=host,activations=kept", ["AdamW(model.parameters(), device_fraction=0)"]),
        ("weights=device,state=device,activations=kept", []),
    ],
)
def test_the_plan_ends_with_its_calls(method: str, calls: list[str], tmp_path) -> None:
    plan = headrace.plan(SMALL, hardware="h100", method=method)
    last = [line for line in plan.to_text().splitlines() if line.startswith("call ")]
    assert plan.to_text().rstrip().splitlines()[-len(last) :] == last or not calls
    shown = [re.sub(r'device_memory="[\d.]+GB"', 'device_memory="3.00GB"', line) for line in last]
    assert len(shown) == len(calls)
    assert all(line.endswith(call) for line, call in zip(shown, calls, strict=True))
    names = {"model": Checkpointed(), "headrace": headrace, "torch": torch}
    for line in last:
        exec(line.removeprefix("call").strip().replace("/a/local/drive", str(tmp_path)), names)
    if "handle" in names:
        names["handle"].remove()


class Checkpointed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def gradient_checkpointing_enable(self) -> None:
        """As a model of transformers."""


@pytest.mark.usefixtures("short_search")
def test_devices_that_stand_idle_come_first() -> None:
    first, second, *_ = headrace.plan(SMALL, hardware="8xh100").to_text().splitlines()
    assert first == "idle      7 of 8 devices; to use them all: --devices 8, devices=8"
    assert second.startswith("model ")
    assert headrace.plan(SMALL, hardware="8xh100", devices=8).to_text().startswith("model ")


@pytest.mark.usefixtures("short_search")
def test_logits_are_apart() -> None:
    text = headrace.plan(SMALL, hardware="h100", batch_size=4).to_text()
    assert re.search(r"\nactivations +[\d.]+ [GM]B.*\n  logits of them +[\d.]+ [GM]B", text)
