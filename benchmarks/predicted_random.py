"""How close is what is predicted to what is measured, for methods drawn at random? Step times and bytes that move.

    PYTHONPATH=. python benchmarks/predicted_random.py [--count 60] [--first-seed 0]

In virtual time on the emulated accelerator, so no noise. Each method is a decoder of 24 blocks (`overlap.py`), uniform
or uneven, that trains, recomputes or infers, at a load time of 0.3 to 2 forwards of a block and a budget of 2 to 16
blocks. A step has 1 to 16 micro-batches, one after the other or several together (`forward_backward`). Weights change
at each step: at once, or by AdamW on the host or on the device, with any overlap.

Bars: each step's time within 5% of the prediction, and the bytes that a step brings and sends within 1%.
"""

import argparse
import contextlib
import dataclasses
import gc
import random
from collections.abc import Callable

import torch
from overlap import FLOPS_PER_SECOND, TOKENS, WIDTH, Case, configure
from overlap_updates import UPDATE_BYTES, Host, modelled
from predicted import INFERENCE, RECOMPUTING, TRAINING, hardware
from torch import nn

import headrace
from emulator import emu
from headrace.cli.noise import without_noise
from headrace.optim import AdamW
from headrace.optim.on_device import device_bytes
from headrace.planning.cost import Activations, Method, Overlap, Place, Spread, Training, Work, shape_of_module
from headrace.planning.cost import Case as CostCase
from headrace.planning.cost.forecast import Run, run_of
from headrace.planning.cost.lanes import CostLane

SETTLED_AFTER = 5  # steps
AT_ONCE = "at once"  # how weights change that no optimizer of headrace's updates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """One method, on a machine. `update` is AT_ONCE, "host" or "device"; `ratio`: its seconds over all forwards'."""

    case: Case
    micro_batches: int
    together: int
    update: str
    overlap: str
    ratio: float

    def __str__(self) -> str:
        case = self.case
        batches = f"{self.micro_batches} x {self.together}" if self.together > 1 else f"{self.micro_batches}"
        updated = "" if case.mode == INFERENCE else f"{self.update} {self.overlap if self.update != AT_ONCE else ''}"
        load = f"load {case.ratio:.2f}, {case.budget_blocks:2} blocks"
        return f"{case.model:8}{case.mode:12}{load:21} micro-batches {batches:7}{updated}"


def draw(seed: int) -> Drawn:
    """The method of a seed."""
    rng = random.Random(seed)
    mode = rng.choice([TRAINING, TRAINING, RECOMPUTING, INFERENCE])
    case = Case(
        model=rng.choice(["uniform", "uneven"]),
        mode=mode,
        ratio=round(rng.uniform(0.3, 2.0), 2),
        budget_blocks=rng.randint(2, 16),
    )
    micro_batches = 1 if mode == INFERENCE else rng.choice([1, 2, 3, 4, 6, 8, 12, 16])
    together = rng.choice([each for each in (1, 1, 2, 4) if micro_batches % each == 0])
    update = AT_ONCE if mode == INFERENCE else rng.choice([AT_ONCE, "host", "device"])
    one_backward = micro_batches == together  # overlap="backward" refuses gradients that accumulate
    overlaps = [each.value for each in Overlap if one_backward or each is not Overlap.BACKWARD]
    overlap = rng.choice(overlaps) if update != AT_ONCE else "none"
    return Drawn(
        case=case,
        micro_batches=micro_batches,
        together=together,
        update=update,
        overlap=overlap,
        ratio=round(rng.uniform(0.25, 2.0), 2),
    )


def predict(drawn: Drawn, model: nn.Module, bandwidth: float, dram: float, budget_bytes: int) -> Run:
    """The forecast of a drawn method for `model`."""
    shape, infers = shape_of_module(model), drawn.case.mode == INFERENCE
    work = Work(
        training=Training.NONE if infers else Training.FULL,
        sequence_length=TOKENS,
        micro_batches=drawn.micro_batches,
        gradient_bytes=4,
        master_bytes=0,
        state_bytes=0 if drawn.update == AT_ONCE else 8,
    )
    method = Method(
        weights=Place.HOST,
        state=Place.HOST,
        activations=Activations.RECOMPUTED if drawn.case.mode == RECOMPUTING else Activations.KEPT,
        overlap=Overlap(drawn.overlap),
        together=drawn.together,
        update=Place.DEVICE if drawn.update == "device" else Place.HOST,
    )
    shape = shape.frozen() if infers else shape
    return run_of(CostCase(shape, work, Spread(), method, hardware(bandwidth, dram=dram)), budget_bytes)


def step_of(drawn: Drawn, model: nn.Module, handle: headrace.Offloaded) -> Callable[[], None]:
    """One step: all micro-batches, and the update."""
    optimizer: torch.optim.Optimizer
    if drawn.update == AT_ONCE:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    else:
        optimizer = AdamW(model.parameters(), overlap=drawn.overlap, update=drawn.update)

    def inputs() -> torch.Tensor:
        return torch.empty(TOKENS, WIDTH, device="emu").requires_grad_()

    def step() -> None:
        if drawn.case.mode == INFERENCE:
            with torch.no_grad():
                model(inputs())
            return
        for _ in range(drawn.micro_batches // drawn.together):
            if drawn.together > 1:
                batches = [inputs() for _ in range(drawn.together)]
                handle.forward_backward(batches, lambda batch: model(batch).sum())
            else:
                model(inputs()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@dataclasses.dataclass(frozen=True)
class Row:
    """Measured over predicted: seconds of a step, and the bytes that it brings to the device and sends from there."""

    seconds: float
    onloaded: float
    offloaded: float

    @property
    def is_within(self) -> bool:
        return abs(self.seconds - 1) <= 0.05 and abs(self.onloaded - 1) <= 0.01 and abs(self.offloaded - 1) <= 0.01


def measure(drawn: Drawn) -> Row:
    """Runs the method until it has settled, and compares a round of its plan with the forecast."""
    bandwidth = configure(drawn.case)
    model = drawn.case.build()
    elements = sum(parameter.numel() for parameter in model.parameters())
    dram = elements * UPDATE_BYTES / (drawn.ratio * 2 * TOKENS * elements / FLOPS_PER_SECOND)
    largest = max(sum(parameter.nbytes for parameter in layer.parameters()) for layer in model.layers)
    budget_bytes = drawn.case.budget_blocks * largest
    run = predict(drawn, model, bandwidth, dram if drawn.update == "host" else 1e18, budget_bytes)
    lent = device_bytes(dict.fromkeys(model.parameters(), False)) if drawn.update == "device" else 0
    updates = contextlib.nullcontext() if drawn.update == AT_ONCE else modelled(Host(dram), drawn.update)
    with (
        updates,
        headrace.offload(model, device="emu", device_memory=budget_bytes + lent, blocks=[model.layers]) as handle,
    ):
        step = step_of(drawn, model, handle)
        for _ in range(SETTLED_AFTER):
            step()
        rounds = max(2, len(handle.plan.cycles) if handle.plan else 1)
        begin, end = (torch.Event("emu", enable_timing=True) for _ in range(2))
        handle.reset_stats()  # waits for updates, so that the next round begins late
        for event in (begin, end):
            for _ in range(rounds):
                step()
            event.record()
        handle.synchronize()
        torch.accelerator.synchronize()
        stats = handle.stats()
        seconds = begin.elapsed_time(end) / 1e3 / rounds
    reports = emu.take_reports()
    if reports:
        raise RuntimeError(f"{len(reports)} races, the first: {reports[0]}")
    gc.collect()

    def over(nbytes: int, lane: CostLane) -> float:
        planned = run.moved_bytes[lane]
        return nbytes / (2 * rounds) / planned if planned else 1.0 + nbytes

    crossing = _crossing_bytes(drawn, elements)
    return Row(
        seconds / run.seconds,
        over(stats.onload_bytes + 2 * rounds * crossing[0], CostLane.ONLOAD),
        over(stats.offload_bytes + 2 * rounds * crossing[1], CostLane.OFFLOAD),
    )


def _crossing_bytes(drawn: Drawn, elements: int) -> tuple[int, int]:
    """What an update by the device brings and sends, which `stats()` does not count."""
    return (16 * elements, 12 * elements) if drawn.update == "device" else (0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{'seed':6}{'measured over predicted':92}step  brought    sent")
    missed = []
    errors = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.count):
        drawn = draw(seed)
        row = measure(drawn)
        mark = "" if row.is_within else "  missed"
        print(f"{seed:<6}{drawn!s:90}{row.seconds:6.3f}{row.onloaded:9.3f}{row.offloaded:8.3f}{mark}", flush=True)
        errors.append(abs(row.seconds - 1))
        missed += [] if row.is_within else [seed]
    errors.sort()
    print(f"\nstep time off by {errors[len(errors) // 2]:.1%} in the median, {errors[-1]:.1%} at worst")
    if missed:
        raise SystemExit(f"{len(missed)} of {arguments.count} missed a bar: seeds {missed}")


if __name__ == "__main__":
    with without_noise():
        main()
