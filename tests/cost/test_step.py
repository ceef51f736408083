"""Does the model of the lanes keep its rules, and agree with the planner's own simulation where both can speak?"""

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.planning import Phase, Problem, Visit, make_plan
from headrace.planning.cost import Hardware, Overlap
from headrace.planning.cost.lanes import UPDATE_THREAD, CostLane, Task, run_lanes
from headrace.planning.cost.step import forecast_step
from headrace.planning.cost.traffic import BlockTraffic

FAST = Hardware(
    name="fast",
    device_memory_bytes=10**15,
    device_bytes_per_second=1e15,
    flops_per_second=1e15,
    onload_bytes_per_second=1e9,
    offload_bytes_per_second=1e9,
    host_memory_bytes=10**15,
    dram_bytes_per_second=1e18,
    disk_bytes=10**15,
    disk_read_bytes_per_second=5e8,
    disk_write_bytes_per_second=2.5e8,
)


def training(blocks: int, *, budget: int, load: float, changing: bool = False) -> Problem:
    forward = [Visit(blocks=(b,), compute_seconds=1.0) for b in range(blocks)]
    backward = [Visit(blocks=(b,), phase=Phase.BACKWARD, compute_seconds=2.0) for b in reversed(range(blocks))]
    return Problem(
        block_bytes=(10**9,) * blocks,
        load_seconds=(load,) * blocks,
        visits=tuple(forward + backward),
        budget_bytes=budget * 10**9,
        changing=frozenset(range(blocks)) if changing else frozenset(),
    )


@pytest.mark.parametrize(
    ("blocks", "budget", "load", "changing"),
    list(itertools.product((4, 9), (2, 4), (0.5, 0.9, 1.5, 4.0), (False, True))),
)
def test_loads_alone_agree_with_the_planner(blocks: int, budget: int, load: float, changing: bool) -> None:
    plan = make_plan(training(blocks, budget=budget, load=load, changing=changing))
    forecast = forecast_step(plan, [BlockTraffic()] * blocks, FAST)
    assert forecast.seconds == pytest.approx(plan.predicted.cycle_seconds)
    assert forecast.busy_seconds[CostLane.COMPUTE] == pytest.approx(plan.predicted.compute_seconds)
    assert forecast.moved_bytes[CostLane.ONLOAD] == plan.predicted.onload_bytes


def test_update_serial_and_overlapped() -> None:
    """Four blocks, 12 s of compute, updates of 1 s each: serial adds 4 s; beside the next forward less."""
    plan = make_plan(training(4, budget=4, load=0.1, changing=True))
    hardware = FAST.changed(dram_bytes_per_second=28e9)
    traffic = [BlockTraffic(gradient_bytes=10**8, update_bytes=28e9)] * 4
    seconds = [forecast_step(plan, traffic, hardware, overlap).seconds for overlap in Overlap]
    none, forward, backward = seconds
    assert none == pytest.approx(12 + 4 + 0.2, abs=0.1)
    assert forward == pytest.approx(12 + 1 + 0.2, abs=0.15)
    assert 12 <= backward < forward


def test_state_on_disk_is_the_slower_direction() -> None:
    plan = make_plan(training(6, budget=6, load=0.01, changing=True))
    traffic = [BlockTraffic(gradient_bytes=1, update_bytes=1.0, state_bytes=5 * 10**9)] * 6
    forecast = forecast_step(plan, traffic, FAST)
    assert forecast.moved_bytes[CostLane.FETCH] == forecast.moved_bytes[CostLane.SPILL] == 30 * 10**9
    assert forecast.busy_seconds[CostLane.SPILL] == pytest.approx(120)
    assert forecast.seconds == pytest.approx(120)  # writes go on beside the next step, and are the slowest


def test_activations_leave_and_come_back_in_every_micro_batch() -> None:
    """Copies of 1.5 s behind forwards of 1 s: two layers may be on the device, so the third waits for the first."""
    forward = [Visit(blocks=(b,), compute_seconds=1.0) for b in range(4)]
    backward = [Visit(blocks=(b,), phase=Phase.BACKWARD, compute_seconds=2.0) for b in reversed(range(4))]
    problem = Problem(
        block_bytes=(1,) * 4,
        load_seconds=(0.0,) * 4,
        visits=(*forward, *backward) * 2,
        budget_bytes=4,
        residents=frozenset(range(4)),
    )
    traffic = [BlockTraffic(activation_bytes=1_500_000_000)] * 3 + [BlockTraffic()]
    forecast = forecast_step(make_plan(problem), traffic, FAST)
    assert forecast.moved_bytes[CostLane.OFFLOAD] == forecast.moved_bytes[CostLane.ONLOAD] == 2 * 3 * 1_500_000_000
    # Out: 1 to 2.5, 2.5 to 4, 4 to 5.5. Layer 2 begins at 2.5 and layer 3 at 4; then 8 s, behind which all come back.
    assert forecast.seconds == pytest.approx(2 * (5 + 8))


def test_stalls_name_who_waited_for_whom() -> None:
    plan = make_plan(training(6, budget=2, load=4.0))
    forecast = forecast_step(plan, [BlockTraffic()] * 6, FAST)
    assert forecast.stalls
    for stall in forecast.stalls:
        assert stall.lane is CostLane.ONLOAD
        assert stall.waited_for == f"weights {stall.name.split()[-1]}"
    assert sum(stall.seconds for stall in forecast.stalls) == pytest.approx(
        forecast.seconds - forecast.busy_seconds[CostLane.COMPUTE], rel=1e-6
    )


def test_shared_memory_slows_both() -> None:
    tasks = [
        Task(CostLane.UPDATE, "update", 1.0, dram_bytes=10e9),
        Task(CostLane.ONLOAD, "copy", 1.0, dram_bytes=10e9),
        Task(CostLane.COMPUTE, "compute", 1.0),
    ]
    run_lanes(tasks, dram_rate=10e9)
    update, copy, compute = tasks
    assert (update.end, copy.end, compute.end) == (pytest.approx(2.0), pytest.approx(2.0), pytest.approx(1.0))


def test_directions_may_take_from_each_other() -> None:
    link, drive = (CostLane.ONLOAD, CostLane.OFFLOAD), (CostLane.FETCH, CostLane.SPILL)

    def ends(lanes: tuple[CostLane, CostLane], **shares: float) -> list[float]:
        tasks = [Task(lane, "copy", seconds) for lane, seconds in zip(lanes, (1.0, 2.0), strict=True)]
        run_lanes(tasks, **shares)
        return [task.end for task in tasks]

    assert ends(link, duplex_share=0.5) == pytest.approx([2.0, 3.0])
    assert ends(drive, duplex_share=0.5) == pytest.approx([1.0, 2.0])
    assert ends(drive, disk_duplex_share=0.5) == pytest.approx([2.0, 3.0])


@given(st.data())
def test_lanes_keep_order_and_waits(data: st.DataObject) -> None:
    tasks = []
    for index in range(data.draw(st.integers(1, 12))):
        after = data.draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        lane = data.draw(st.sampled_from(list(CostLane)))
        tasks.append(Task(lane, str(index), data.draw(st.floats(0, 5)), tuple(after), data.draw(st.floats(0, 5))))
    run_lanes(tasks, dram_rate=2.0)
    last: dict[CostLane, float] = {}
    for task in tasks:
        assert task.begin + task.seconds * (1 - 1e-9) - 1e-9 <= task.end < math.inf
        assert task.begin >= last.get(task.lane, 0.0) - 1e-9
        assert all(tasks[other].end <= task.begin + 1e-9 for other in task.after)
        last[task.lane] = task.end


def test_a_lane_runs_what_was_submitted_first() -> None:
    """A load that is submitted after the second of three updates passes the third, which is submitted later."""
    tasks = [
        Task(CostLane.ONLOAD, "update 0", 1.0, thread=UPDATE_THREAD),
        Task(CostLane.ONLOAD, "update 1", 1.0, (0,), thread=UPDATE_THREAD, submitted_after=(0,)),
        Task(CostLane.ONLOAD, "update 2", 1.0, (1,), thread=UPDATE_THREAD, submitted_after=(1,)),
        Task(CostLane.ONLOAD, "load 0", 1.0, (0,), submitted_after=(0,)),
        Task(CostLane.COMPUTE, "forward 0", 2.0, (3,)),
        Task(CostLane.ONLOAD, "load 1", 1.0, (4,), submitted_after=(2,)),
    ]
    run_lanes(tasks)
    assert [task.begin for task in tasks] == pytest.approx([0.0, 1.0, 3.0, 2.0, 3.0, 5.0])


def test_what_waits_on_a_lane_holds_up_what_was_submitted_later() -> None:
    """A load waits for compute, and the update that was submitted after it waits behind it."""
    tasks = [
        Task(CostLane.COMPUTE, "forward 0", 3.0),
        Task(CostLane.ONLOAD, "load 1", 1.0, (0,)),
        Task(CostLane.FETCH, "state", 1.0),
        Task(CostLane.ONLOAD, "update 0", 1.0, (2,), thread=UPDATE_THREAD, submitted_after=(2,)),
    ]
    run_lanes(tasks)
    assert [task.begin for task in tasks] == pytest.approx([0.0, 3.0, 0.0, 4.0])


def test_threads_cannot_wait_for_each_other() -> None:
    tasks = [
        Task(CostLane.ONLOAD, "load", 1.0, (), submitted_after=()),
        Task(CostLane.OFFLOAD, "update", 1.0, (0,), thread=UPDATE_THREAD, submitted_after=(0,)),
        Task(CostLane.COMPUTE, "forward", 1.0, (1,)),
    ]
    run_lanes(tasks)
    assert tasks[-1].end == pytest.approx(3.0)
    tasks = [
        Task(CostLane.COMPUTE, "forward", 1.0),
        Task(CostLane.ONLOAD, "update", 1.0, (0,), thread=UPDATE_THREAD, submitted_after=(0,)),
        Task(CostLane.COMPUTE, "wait", 0.0, (1,)),
        Task(CostLane.ONLOAD, "load", 1.0, (2,)),
    ]
    with pytest.raises(ValueError, match="two threads wait for each other"):
        run_lanes(tasks)


@pytest.mark.parametrize("seed", range(60))
def test_no_forecast_ends_with_threads_that_wait_for_each_other(seed: int) -> None:
    """Whatever comes and goes beside the update by the device, each task of the step ends."""
    rng = random.Random(seed)
    blocks, ranks_share = rng.randint(2, 5), rng.random() < 0.5
    gathers = ranks_share and rng.random() < 0.5
    alike = BlockTraffic(
        activation_bytes=rng.choice([0, 10**9]),
        activations_spill=rng.random() < 0.5,
        state_bytes=rng.choice([0, 10**9]),
        fetch_bytes=rng.choice([0, 10**9]),
        norm_bytes=rng.choice([0.0, 1e8]),
        reduce_seconds=rng.choice([0.0, 0.5]),
        pass_on_seconds=0.0 if ranks_share else rng.choice([0.0, 0.5]),
        gather_seconds=0.5 if gathers else 0.0,
        load_bytes=5 * 10**8 if gathers else None,
        sum_bytes=rng.choice([0, 10**8]) if ranks_share else 0,
        over_link=ranks_share and rng.random() < 0.5,
    )
    trained = dataclasses.replace(alike, gradient_bytes=10**9, update_in_bytes=2 * 10**9, update_out_bytes=10**9)
    traffic = [rng.choice([alike, trained]) for _ in range(blocks)]
    load = rng.choice([0.1, 1.0, 4.0])
    plan = make_plan(training(blocks, budget=rng.randint(1, blocks), load=load, changing=True))
    for overlap in Overlap:
        assert math.isfinite(forecast_step(plan, traffic, FAST, overlap).seconds)


def test_the_way_back_of_an_update_is_that_of_its_last_piece() -> None:
    """Beside passes, a block's update begins when the one before it is back; 16 MiB of 2 GB leave behind all others."""
    plan = make_plan(training(2, budget=2, load=0.1, changing=True))
    traffic = [BlockTraffic(gradient_bytes=1, update_in_bytes=2 * 10**9, update_out_bytes=10**9)] * 2
    tasks = [task for task in forecast_step(plan, traffic, FAST, Overlap.FORWARD).tasks if "update" in task.name]
    arrived = max(task.end for task in tasks if task.name == "update 1" and task.lane is CostLane.ONLOAD)
    back = max(task.end for task in tasks if task.name == "update 1" and task.lane is CostLane.OFFLOAD)
    assert back - arrived == pytest.approx((16 << 20) / 2 / 1e9, rel=0.01)


def test_a_task_cannot_wait_for_itself() -> None:
    with pytest.raises(ValueError, match="give indices below its own"):
        run_lanes([Task(CostLane.COMPUTE, "x", 1.0, (0,))])
