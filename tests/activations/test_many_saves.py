"""Does a save cost the host the same, however many there were before it? Counted in operations of the interpreter."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace

PACKAGE = str(Path(headrace.__file__).parent)
FEW, MANY = 48, 192
MOST_GROWTH = 1.15  # of the operations per save: some are logarithmic; to look at all items each time gives 1.3 to 8
ROW_BYTES = 1024 * 4


class Chain(nn.Module):
    """Saves the output of each tanh."""

    def __init__(self, saves: int) -> None:
        super().__init__()
        self.saves = saves
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for _ in range(self.saves):
            x = torch.tanh(x)
        return x


def step(model: nn.Module, rows: int) -> None:
    model(torch.ones(rows, 1024)).sum().backward()


def operations(run: Callable[[], None]) -> int:
    """How many operations of the interpreter this takes in the package."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "call":
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def operations_per_save(saves: int, settings: dict[str, Any], forwards: int, rows: Callable[[int], int]) -> float:
    """Of a forward with its backward, after some others."""
    model = Chain(saves)
    share = settings.pop("ceiling_share", None)
    if share is not None:
        settings["device_memory"] = int(share * saves * ROW_BYTES)
    with headrace.offload_activations(model, min_bytes=0, **settings) as handle:
        for index in range(forwards):
            step(model, rows(index))
        count = operations(lambda: step(model, rows(forwards)))
        stats = handle.stats()
        assert (stats.recorded_forwards, stats.similar_forwards > 0) == (1, rows(1) != rows(0) and forwards > 0)
        assert stats.offloads >= saves
    return count / saves


@pytest.mark.extended
@pytest.mark.parametrize(
    ("settings", "changing"),
    [
        ({"device_memory": "1GiB"}, False),
        ({"device_memory": "1GiB"}, True),
        ({"ceiling_share": 0.5}, True),
        ({"device_memory": 0, "fraction": 0.4}, True),
        ({"all_leave": True}, True),
    ],
    ids=["planned", "room", "ceiling", "fraction", "all_leave"],
)
def test_operations_per_save(settings: dict[str, Any], changing: bool) -> None:
    """As planned, and where the sizes change."""

    def rows(index: int) -> int:
        return 1 + index if changing else 1

    few, many = (operations_per_save(saves, dict(settings), 3, rows) for saves in (FEW, MANY))
    assert 0 < many <= MOST_GROWTH * few


def test_operations_per_save_that_is_recorded() -> None:
    """With the plan that is made at the end."""
    few, many = (operations_per_save(saves, {"device_memory": "1GiB"}, 0, lambda index: 1) for saves in (FEW, MANY))
    assert 0 < many <= MOST_GROWTH * few
