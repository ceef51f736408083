"""Does the report say which kinds of activations left, stayed and were recomputed, and why?"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import headrace
from headrace.planning import ActivationProblem, Saved, plan_activations
from headrace.report import ActivationStats, plan_rows
from tests.activations.models import SAVED_BYTES, Stack, rows, step

LAYERS = 6
NAMES = [f"layers.{index}" for index in range(LAYERS)]


def planned(
    *, copy_seconds: float = 0.9, alone: bool = True, used: int = LAYERS, names: Sequence[str] = NAMES, **settings: Any
) -> list[str]:
    saved = tuple(
        Saved(
            nbytes=2**20,
            offload_seconds=copy_seconds,
            onload_seconds=copy_seconds,
            alone_at=index if alone else None,
            name=name,
            shape="float32 512x512",
        )
        for index, name in enumerate(names)
    )
    problem = ActivationProblem(
        saved=saved,
        forward_seconds=(1.0,) * len(names),
        uses=tuple(reversed(range(used))),
        backward_seconds=(2.0,) * used,
        freed_at=tuple(range(used)),
        **settings,
    )
    return [f"{name}: {text}" for name, text in plan_rows(plan_activations(problem))]


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ({}, {"leave, as copies hide", "stay, as compute would wait"}),
        ({"all_leave": True}, {"leave, as all_leave says"}),
        (
            {"budget_bytes": 3 * 2**20},
            {"leave, as device_memory has no room for all", "stay, as device_memory has room"},
        ),
        ({"alone": False}, {"stay, as something else holds them"}),
        ({"used": 3, "all_leave": True}, {"leave, as all_leave says", "stay, as backward has not used them"}),
        ({"offload_bytes": 2**21}, {"leave, as copies hide", "stay, as no more bytes may leave"}),
    ],
)
def test_reasons(settings: dict[str, Any], reasons: set[str]) -> None:
    """Layers are one kind, and each tensor is in one of its rows."""
    _, *kinds = planned(**settings)
    assert {text.split(": ")[2] for text in kinds} == reasons
    assert all(text.startswith("saved in layers.*: ") for text in kinds)
    assert sum(int(text.split(": ")[1].split()[0]) for text in kinds) == LAYERS


def test_times_and_bytes() -> None:
    first, kind, rest = planned(all_leave=True, copy_seconds=2.0, recomputed=("layers.0", "layers.1"))
    assert first.startswith(
        "plan for activations: 6 MiB of 6 MiB leave; copies take 12 s of a forward of 6 s, and 12 s of"
    )
    assert kind == "saved in layers.*: 6 of float32 512x512, 6 MiB: leave, as all_leave says"
    assert rest == "the rest of layers.*: recomputed in backward, in 6 s, by its checkpoints"


def test_odd_names_keep_it_short() -> None:
    """Layers whose names have no numbers are kinds of their own; all bytes are in some row."""
    names = [chr(ord("a") + index) for index in range(20)]
    _, *kinds = planned(all_leave=True, names=names, recomputed=tuple(names))
    assert len(kinds) == 2 * (8 + 1)
    assert kinds[8] == "saved elsewhere: 12 more kinds, 12 MiB"
    assert kinds[-1] == "the rest of others: 12 more kinds of modules are recomputed"
    assert ActivationStats.advice(2**20, names).endswith(" in a, b, c, d, e, f, g, h and 12 more")


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_a_run_says_so(checkpointing: str, compute_device: torch.device) -> None:
    """With checkpoints, the model keeps the inputs of its layers."""
    model = Stack(LAYERS, checkpointing=checkpointing).to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, all_leave=True) as handle:
        for _ in range(3):
            step(model, rows(compute_device))
        text, plan = str(handle.report()), handle.plan
    assert plan is not None
    assert plan.host_bytes >= (LAYERS - 1) * SAVED_BYTES
    keeps = "layers.*" if checkpointing == "none" else "the model itself"
    assert f"saved in {keeps} " in text
    assert f"{len(plan.offloaded)} of float32 64x128" in text
    assert ("the rest of layers.*" in text) == (checkpointing != "none")
