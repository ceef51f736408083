"""Does a report show what the drive did: reads and writes on lanes of their own, and who waited for them?"""

import json
import warnings

import pytest
import torch

import headrace
from headrace.report import Report, RunRecord, Span
from tests.report.conftest import stack

BLOCK = 256 * 256 * 4 + 256 * 4


def test_reads_and_writes_are_lanes(disk_report: Report, tmp_path) -> None:
    record, stats = disk_report.record, disk_report.record.stats
    assert {"fetch", "spill"} <= set(record.lanes)
    assert record.moved_bytes("fetch") > 0
    # A read counts as fetched when its block has left the staging ring, or nobody wants it any more. The ring is a
    # quarter of host_memory, and one block more may be half out of it: when the step began, and now, with reads ahead.
    assert abs(record.moved_bytes("fetch") - stats.fetch_bytes) <= 2**20 // 4 + BLOCK
    assert 0 < record.moved_bytes("spill") <= stats.spill_bytes
    assert all(span.begin_seconds >= 0 and span.seconds > 0 for span in record.spans if span.lane in ("fetch", "spill"))
    assert {sample.disk_bytes for sample in record.samples} == {stats.disk_bytes}
    lines = str(disk_report)
    assert "on disk" in lines
    for lane in ("fetch", "spill"):
        assert f"{lane:<10} busy" in lines
        assert 0 < record.achieved_rate(lane) < float("inf")
    disk_report.to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    traced = sum(event["args"]["bytes"] for event in events if event["name"] == "fetch")
    assert traced == record.moved_bytes("fetch")
    disk_report.to_png(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000


@pytest.mark.emu("threads", throttle=True, h2d_bytes_per_second=1e8)
def test_blocks_are_read_before_they_are_copied(compute_device: torch.device, tmp_path) -> None:
    """One clock for the drive and for what compute waits for, whichever device computes."""
    model = stack().requires_grad_(False)
    budgets = {"device_memory": "900KiB", "host_memory": "1MiB", "disk": tmp_path / "disk"}
    with (
        warnings.catch_warnings(action="ignore"),
        headrace.offload(model, device=compute_device, blocks=[model.layers], **budgets) as handle,
        torch.no_grad(),
    ):
        model(torch.randn(64, 256))  # the first pass: each block is read when it is asked for
        spans = handle.report().record.spans
    ends = {
        lane: {span.what: span.begin_seconds + span.seconds for span in spans if span.lane == lane}
        for lane in ("fetch", "onload")
    }
    assert ends["fetch"]
    assert all(ends["fetch"][block] <= ends["onload"][block] + 1e-3 for block in ends["fetch"])


def record(*spans: Span, **changes) -> RunRecord:
    return RunRecord(device="cpu", stats=None, spans=spans, samples=(), planned=None, rates={}, **changes)


@pytest.mark.parametrize(("read_until", "lane"), [(0.9, "fetch"), (0.45, "onload"), (0.0, "onload")])
def test_the_drive_is_blamed_where_it_was_reading_for_most_of_the_wait(read_until: float, lane: str) -> None:
    run = record(
        Span("compute", "stall", 0.0, 1.0, what="layers.1 forward"),
        Span("compute", "layers.1 forward", 1.0, 0.5),
        Span("onload", "onload", 0.1, 0.9, 100, "layers.1"),
        Span("fetch", "fetch", 0.0, read_until, 100, "layers.1"),
        Span("fetch", "fetch", 0.0, 1.0, 100, "layers.2"),
    )
    (stall,) = run.stalls()
    assert (stall.lane, stall.what) == (lane, "layers.1")
    assert run.stall_seconds(lane) == 1.0
    assert run.stall_seconds("fetch" if lane == "onload" else "onload") == 0


def test_requests_side_by_side_count_once() -> None:
    run = record(
        Span("fetch", "fetch", 0.0, 1.0, 100, "a"),
        Span("fetch", "fetch", 0.5, 1.0, 200, "a"),
        Span("fetch", "fetch", 0.75, 0.25, 300, "b"),
        Span("fetch", "fetch", 3.0, 0.5, 400, "b"),
    )
    assert run.busy_seconds("fetch") == 2.0
    assert run.achieved_rate("fetch") == 500
    assert run.busy_seconds("spill") == run.achieved_rate("spill") == 0
