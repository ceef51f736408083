"""Is each ordering bug of a streaming loop named, and does the right loop stay silent whatever the schedule?"""

from types import ModuleType

import pytest
import torch

from .streaming_loop import Bug, StreamingLoop, expected_weights

SCHEDULES = 1000
# What names each bug: the kind of race, the later operation, the earlier one.
NAMED_BY = {
    Bug.LANE_DOES_NOT_WAIT_FOR_ALLOCATION: ("write-after-write", "copy H2D on stream 1", "alloc on stream 0"),
    Bug.EVENT_RECORDED_BEFORE_ALLOCATION: ("write-after-write", "copy H2D on stream 1", "alloc on stream 0"),
    Bug.COMPUTE_DOES_NOT_WAIT_FOR_ARRIVAL: ("read-after-write", "aten::mm on stream 0", "copy H2D on stream 1"),
    Bug.COMPUTE_WAITS_FOR_WRONG_EVENT: ("read-after-write", "aten::mm on stream 0", "copy H2D on stream 1"),
    Bug.SLOT_REUSED_BEFORE_LAST_USE: ("write-after-read", "copy H2D on stream 1", "aten::mm on stream 0"),
    Bug.COPY_OUT_DOES_NOT_WAIT_FOR_PRODUCER: ("read-after-write", "copy D2H on stream 2", "aten::mm on stream 0"),
    Bug.CURRENT_STREAM_READ_INSIDE_WITH: ("read-after-write", "copy D2H on stream 2", "aten::mm on stream 0"),
    Bug.HOST_READS_BEFORE_COPY_OUT_IS_DONE: ("read-after-write", "aten::add_ on the host", "copy D2H on stream 2"),
    Bug.STAGING_REUSED_BEFORE_HOST_HAS_READ: ("read-after-write", "aten::add_ on the host", "copy D2H on stream 2"),
    Bug.HOST_WRITES_SOURCE_IN_FLIGHT: ("write-after-read", "aten::mul_ on the host", "copy H2D on stream 1"),
    Bug.STAGING_REFILLED_IN_FLIGHT: ("write-after-read", "aten::copy_ on the host", "copy H2D on stream 1"),
    Bug.GRADIENT_FREED_BEFORE_COPY_OUT_IS_DONE: ("write-after-read", "free on stream 0", "copy D2H on stream 2"),
    Bug.GRADIENT_ZEROED_BEFORE_COPY_OUT_IS_DONE: (
        "write-after-read",
        "aten::zero_ on stream 0",
        "copy D2H on stream 2",
    ),
    Bug.SLOT_EVICTED_WHILE_ARRIVING: ("write-after-write", "free on stream 0", "copy H2D on stream 1"),
    Bug.SLOT_FREED_BY_ANOTHER_LANE: ("write-after-read", "free on stream 1", "aten::mm on stream 0"),
    Bug.TWO_LANES_FILL_ONE_BUFFER: ("write-after-write", "copy D2H on stream 3", "copy D2H on stream 2"),
}


@pytest.mark.emu("threads", "lazy", "random:0", guard_pinned=False)
@pytest.mark.parametrize("allocator", ["caching", "exact"])
@pytest.mark.parametrize("bug", Bug, ids=lambda bug: bug.name.lower())
def test_bug_is_named(emu_device: ModuleType, bug: Bug, allocator: str) -> None:
    emu_device.configure(allocator=allocator)
    with emu_device.watch_host():
        StreamingLoop(bug).run()
    kind, later, earlier = NAMED_BY[bug]
    reports = emu_device.take_reports()
    assert any(report.startswith(f"RACE {kind}: {later} is not ordered after {earlier}") for report in reports), reports


@pytest.mark.emu("random:0")
def test_reports_do_not_depend_on_the_schedule(emu_device: ModuleType) -> None:
    def reports(**schedule: object) -> list[str]:
        emu_device.reset(allocator="exact", **schedule)
        with emu_device.watch_host():
            StreamingLoop(Bug.SLOT_REUSED_BEFORE_LAST_USE).run()
        return [report.partition(", ")[0] for report in emu_device.take_reports()]  # without addresses

    first = reports(scheduler="random", seed=1)
    assert first
    assert first == reports(scheduler="random", seed=2) == reports(scheduler="lazy") == reports(scheduler="threads")


@pytest.mark.emu("random:0")
def test_right_loop_is_silent_in_every_schedule(emu_device: ModuleType) -> None:
    expected = expected_weights()
    with emu_device.watch_host():
        for seed in range(SCHEDULES):
            emu_device.reset(scheduler="random", seed=seed)
            loop = StreamingLoop()
            loop.run()
            assert emu_device.take_reports() == [], seed
            assert all(map(torch.equal, loop.weights, expected)), seed


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("tokens", [0, 1])  # with a token, it reads what has yet to arrive
def test_a_layer_without_tokens_reads_no_weight(emu_device: ModuleType, tokens: int) -> None:
    weight = torch.randn(8, 8).pin_memory()
    bias, lane = torch.zeros(8, device="emu"), torch.Stream("emu")
    arriving = torch.empty(8, 8, device="emu")
    lane.wait_stream(torch.accelerator.current_stream())
    with lane:
        arriving.copy_(weight, non_blocking=True)
    found = torch.nn.functional.linear(torch.empty(tokens, 8, device="emu"), arriving, bias)
    assert found.shape == (tokens, 8)
    reports = emu_device.take_reports()
    assert len(reports) == tokens
    assert all(report.startswith("RACE read-after-write: aten::addmm on stream 0") for report in reports)
    torch.accelerator.synchronize()
