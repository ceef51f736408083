"""Do report and timeline show the numbers they are given, beside their limits and in the units they name?"""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.report import Span, Stats, write_trace

FIGURES: dict[str, Any] = {
    "device_peak_bytes": 3 << 29,
    "device_budget_bytes": 2 << 30,
    "device_gradient_peak_bytes": 300 << 20,
    "host_bytes": 5 << 30,
    "host_peak_bytes": 6 << 30,
    "disk_bytes": 0,
    "onload_bytes": 1000 << 30,
    "offload_bytes": 7 << 30,
    "fetch_bytes": 0,
    "spill_bytes": 0,
    "onloads": 40,
    "demand_onloads": 3,
    "stall_seconds": 0.5,
    "compute_seconds": 1.5,
    "steps": 12,
    "skipped_steps": 0,
    "not_finite_steps": 0,
}


def rows(**changes: Any) -> dict[str, str]:
    text = Stats(**FIGURES | changes).to_text()
    return {line[: line.index("  ")]: line.split("  ", 1)[1].strip() for line in text.splitlines()}


def test_each_number_stands_beside_its_limit_or_share() -> None:
    assert rows() == {
        "device weights, peak": "1.5 GiB of 2 GiB",
        "device gradients, peak": "300 MiB",
        "host memory, peak": "6 GiB",
        "onloaded": "1000 GiB in 40 loads, 3 on demand",
        "offloaded": "7 GiB",
        "compute": "1.500 s",
        "stall": "0.500 s (25.0%)",
        "optimizer steps": "12",
    }


def test_skipped_steps_are_told_when_there_are_any() -> None:
    assert rows(skipped_steps=2)["optimizer steps"] == "12, 2 skipped: gradients were not finite"
    assert rows(not_finite_steps=3)["optimizer steps"] == "12, 3 took gradients that were not finite"


def test_values_are_aligned() -> None:
    lines = Stats(**FIGURES).to_text().splitlines()
    assert len({len(line) - len(line[line.index("  ") :].lstrip()) for line in lines}) == 1


def test_nothing_measured_is_no_stall() -> None:
    nothing = Stats(**FIGURES | {"stall_seconds": 0.0, "compute_seconds": 0.0})
    assert nothing.stall_share == 0
    assert rows(stall_seconds=0.0, compute_seconds=0.0)["stall"] == "0.000 s (0.0%)"


def test_stats_are_frozen_and_complete() -> None:
    with pytest.raises(AttributeError):
        Stats(**FIGURES).steps = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="steps"):
        Stats(**{name: value for name, value in FIGURES.items() if name != "steps"})


def test_the_timeline_is_a_chrome_trace_in_microseconds(tmp_path: Path) -> None:
    spans = [
        Span("compute", "layers.0 forward", 0.0, 0.25),
        Span("onload", "onload", 0.125, 0.5, 4096, "layers.1"),
        Span("offload", "offload", 0.75, 0.25, 100, "layers.0.weight"),
    ]
    write_trace(tmp_path / "trace.json", spans)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    shown = [
        Span(
            lanes[event["tid"]],
            event["name"],
            event["ts"] / 1e6,
            event["dur"] / 1e6,
            event["args"].get("bytes", 0),
            event["args"].get("of", ""),
        )
        for event in events
        if event["ph"] == "X"
    ]
    assert shown == spans


def test_a_timeline_without_spans_still_names_its_lanes(tmp_path: Path) -> None:
    write_trace(str(tmp_path / "trace.json"), [])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events} == {"headrace", "compute", "onload", "offload"}
