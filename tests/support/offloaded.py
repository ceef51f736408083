"""Does an offloaded model give what a plain one gives, within its budget, and are weights moved as planned?"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import headrace
from headrace.memory.arena import aligned
from tests.support.compare import Outcome, assert_on_host, assert_same
from tests.support.held import weight_bytes

Script = Callable[[nn.Module], Outcome]

GRANULE_BYTES = 512  # a device's allocator rounds every allocation up to a multiple


def largest_block_bytes(handle: headrace.Offloaded) -> int:
    """Of the blocks that come and go."""
    assert handle.plan is not None, "no plan was made"
    return max(handle.plan.problem.block_bytes)


def resident_bytes(handle: headrace.Offloaded, model: nn.Module) -> int:
    """Of the weights that stay."""
    assert handle.plan is not None, "no plan was made"
    total = sum(aligned(p.nbytes) for p in model.parameters())
    return total - sum(handle.plan.problem.block_bytes)


def rounding_bytes(handle: headrace.Offloaded, model: nn.Module) -> int:
    """The most that rounding adds to what the budget counts: for each block, resident part, dtype and module buffer."""
    assert handle.plan is not None, "no plan was made"
    return GRANULE_BYTES * (len(handle.plan.problem.block_bytes) + len(list(model.buffers())) + 8)


def settle(handle: headrace.Offloaded, cycle: Callable[[], None], limit: int = 12) -> None:
    """Repeats the cycle until its plan stays the same."""
    unchanged = 0
    plan = handle.plan
    for _ in range(limit):
        cycle()
        unchanged = unchanged + 1 if handle.plan is plan else 0
        plan = handle.plan
        if plan is not None and unchanged >= 2 * len(plan.cycles):
            return
    raise AssertionError(f"no plan lasted within {limit} cycles")


def count_settled_round(handle: headrace.Offloaded, cycle: Callable[[], None], limit: int = 12) -> headrace.Stats:
    """The counts of one round of a settled plan. The round is run again where its plan was replaced within it: a cycle
    that computes faster than planned, as on a machine that was busy before, has the plan made anew.
    """
    for _ in range(limit):
        settle(handle, cycle)
        plan = handle.plan
        assert plan is not None
        handle.reset_stats()
        for _ in range(len(plan.cycles)):
            cycle()
        if handle.plan is plan:
            return handle.stats()
    raise AssertionError(f"the plan was replaced in each of {limit} settled rounds")


def assert_moves_as_planned(handle: headrace.Offloaded, model: nn.Module, cycle: Callable[[], None]) -> None:
    """Settled cycles bring exactly what is planned, when it is planned; residents that changed are renewed besides."""
    stats = count_settled_round(handle, cycle)
    plan = handle.plan
    assert plan is not None
    rounds = len(plan.cycles)
    planned = plan.predicted.onload_bytes * rounds
    late = [  # where memory is short, a block may be planned to come only at the visit that needs it
        block
        for steps in plan.cycles
        for visit, step in zip(plan.problem.visits, steps, strict=False)
        for block in step.loads
        if block in visit.blocks
    ]
    assert stats.demand_onloads == len(late)
    in_plan_bytes = stats.onload_bytes - stats.expert_bytes - stats.row_bytes  # experts and rows come when asked for
    assert planned - rounds <= in_plan_bytes  # the prediction is rounded
    assert in_plan_bytes <= planned + rounds * (1 + resident_bytes(handle, model))
    assert plan.predicted.peak_bytes <= stats.device_budget_bytes
    trained = sum(p.nbytes for p in model.parameters() if p.grad is not None)
    assert stats.offload_bytes == trained * rounds


def budget_bytes(model: nn.Module, share: float) -> int:
    """That share of the weights, and room for the buffers of modules."""
    return int(weight_bytes(model) * share) + sum(buffer.nbytes for buffer in model.buffers())


def offload(model: nn.Module, device: torch.device, share: float = 0.4, **options: Any) -> headrace.Offloaded:
    """Offloads with a budget of that share of the weights."""
    options.setdefault("device_memory", budget_bytes(model, share))
    return headrace.offload(model, device=device, **options)


def assert_streamed(handle: headrace.Offloaded, model: nn.Module) -> None:
    """The budget was below the weights and was kept, weights came again and again, and they are on the host."""
    assert_on_host(model)
    stats = handle.stats()
    assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes < weight_bytes(model)
    assert stats.onload_bytes > weight_bytes(model)


def assert_exact(
    make: Callable[[], nn.Module], script: Script, device: torch.device, share: float = 0.4, **options: Any
) -> tuple[headrace.Offloaded, nn.Module]:
    """Runs the script on the plain model and on the offloaded one: everything must be equal."""
    plain = script(make().to(device))
    model = make()
    handle = offload(model, device, share, **options)
    assert_same(script(model), plain)
    assert_streamed(handle, model)
    return handle, model
