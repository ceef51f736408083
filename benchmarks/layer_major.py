"""What does a step of several micro-batches cost with few blocks on the device? Virtual time, so no noise.

    PYTHONPATH=. python benchmarks/layer_major.py

The decoder of `overlap.py` (24 uniform blocks) takes a step of 8 micro-batches with a budget of 3 blocks, where loading
a block takes 1.5 and 4 times its forward. Each row shows the step over the same with all weights on the device, by
`handle.forward_backward` and by a loop over the micro-batches; the share of the step in which compute waited; what
crossed the link to the device and from it, over the bytes of the weights; and the most that the device held in MiB,
of which 48 are the budget: what autograd saves is there for one micro-batch in the loop, and for all 8 together.
"""

import itertools
from typing import NamedTuple

import torch
from overlap import MEASURED, SETTLED_AFTER, TOKENS, WIDTH, Case, Decoder, configure, settled_seconds

import headrace
from emulator import emu
from headrace.report import Stats

RATIOS = (1.5, 4.0)
MICRO_BATCHES = 8
BUDGET_BLOCKS = 3
BAR = 1.06


class Measured(NamedTuple):
    """Steps in the steady state; `stats` of all that are measured."""

    seconds: float
    peak_bytes: int
    stats: Stats


def batches() -> list[torch.Tensor]:
    return [torch.empty(TOKENS, WIDTH, device="emu") for _ in range(MICRO_BATCHES)]


def loss_of(model: Decoder, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).sum()
    return loss


def in_turn(model: Decoder) -> None:
    for batch in batches():
        loss_of(model, batch).backward()


def resident_seconds(case: Case) -> float:
    """All weights on the device."""
    configure(case)
    model = case.build().to("emu")

    def step() -> None:
        in_turn(model)
        model.zero_grad(set_to_none=True)

    return settled_seconds(step)


def measure(case: Case, together: bool) -> Measured:
    configure(case)
    model = case.build()
    budget_bytes = case.budget_blocks * weight_bytes(model) // len(model.layers)
    handle = headrace.offload(model, device="emu", device_memory=budget_bytes, blocks=[model.layers])
    number = itertools.count()

    def step() -> None:
        if next(number) == SETTLED_AFTER:
            handle.reset_stats()
            torch.accelerator.reset_peak_memory_stats()
        if together:
            handle.forward_backward(batches(), lambda batch: loss_of(model, batch))
        else:
            in_turn(model)
        model.zero_grad(set_to_none=True)

    with handle:
        seconds, stats = settled_seconds(step), handle.stats()
    if reports := emu.take_reports():
        raise RuntimeError(f"{len(reports)} races, the first: {reports[0]}")
    return Measured(seconds, torch.accelerator.max_memory_allocated(), stats)


def weight_bytes(model: Decoder) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def main() -> None:
    worst = 0.0
    print("                                           step over  share of  weights   gradients    device")
    print("                                            resident   waiting  onloaded  offloaded  peak MiB")
    for mode, ratio in itertools.product(("training", "recomputing"), RATIOS):
        case = Case(model="uniform", mode=mode, ratio=ratio, budget_blocks=BUDGET_BLOCKS)
        resident, total = resident_seconds(case), MEASURED * weight_bytes(case.build())
        for together in (True, False):
            found = measure(case, together)
            label = f"{mode:12}{ratio:4.1f} {'forward_backward' if together else 'loop'}"
            stats, over = found.stats, found.seconds / resident
            print(
                f"{label:43}{over:9.3f} {stats.stall_share:9.1%} {stats.onload_bytes / total:9.2f}"
                f" {stats.offload_bytes / total:10.2f} {found.peak_bytes >> 20:9}",
                flush=True,
            )
            worst = max(worst, over) if together else worst
    print(f"\nforward_backward over all weights on the device: worst {worst:.3f} (bar {BAR})")


if __name__ == "__main__":
    main()
