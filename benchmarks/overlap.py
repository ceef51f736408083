"""How close does streaming come to what is possible? Virtual time on the emulated accelerator, so no noise.

    python benchmarks/overlap.py [--quick] [--ratio 0.5|0.9|1.5]

A decoder of 24 blocks (uniform, and uneven) runs in training (with and without recomputation) and inference, at ratios
of load time to forward compute time per block and budgets in blocks. Each row shows the settled step time over what
the planner predicted; over the lower bound max(compute, fewest possible bytes / bandwidth); over a bound that no
schedule of this budget can beat (bytes that must arrive within a stretch of visits); and over the run with all weights
on the device. Beside it the same model with synchronous per-layer offload, and with prefetch a fixed number of blocks
ahead beside fixed residents (`overlap_rivals.py`). Steps that hold an optimizer's update too: `overlap_updates.py`.
"""

import argparse
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterator

import torch
from overlap_rivals import ahead_of_residents, synchronous
from torch import nn
from torch.utils.checkpoint import checkpoint

import headrace
from emulator import emu
from headrace.planning import lower_bound

WIDTH = 1024
TOKENS = 512
FLOPS_PER_SECOND = 2e11
LINEARS = 4  # of a uniform block: 16 MiB in all
UNEVEN_LINEARS = (2, 4, 6, 3, 5, 4, 1, 7)
BLOCKS = 24
RATIOS = (0.5, 0.9, 1.5)  # load seconds over forward seconds of a block
SETTLED_AFTER = 5  # cycles: recording, the first plan, its refinement, and the way into the steady state
MEASURED = 2


class Layer(nn.Module):
    """A residual stack of linear layers."""

    def __init__(self, linears: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(linears))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            hidden = linear(hidden)
        return hidden


class Decoder(nn.Module):
    """Layers one behind the other, checkpointed or not."""

    def __init__(self, linears: list[int], recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(count) for count in linears)
        self.recompute = recompute

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.recompute else layer(hidden)
        return hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    model: str
    mode: str  # training, recomputing, inference
    ratio: float  # load seconds over forward seconds of a block
    budget_blocks: int

    @property
    def linears(self) -> list[int]:
        pattern = (LINEARS,) if self.model == "uniform" else UNEVEN_LINEARS
        return list(itertools.islice(itertools.cycle(pattern), BLOCKS))

    def build(self) -> Decoder:
        torch.manual_seed(0)
        return Decoder(self.linears, self.mode == "recomputing")


def cases(quick: bool) -> Iterator[Case]:
    budgets = (3, 6) if quick else (2, 3, 6, 12, 24)
    for model, mode in itertools.product(("uniform", "uneven"), ("training", "recomputing", "inference")):
        for ratio, budget in itertools.product(RATIOS, budgets):
            yield Case(model=model, mode=mode, ratio=ratio, budget_blocks=budget)


def configure(case: Case) -> float:
    """A device on which loading a block takes `ratio` times its forward compute; its bytes per second."""
    block_bytes = WIDTH * WIDTH * 4
    forward_seconds = 2 * TOKENS * WIDTH * WIDTH / FLOPS_PER_SECOND
    bandwidth = block_bytes / (case.ratio * forward_seconds)
    gc.collect()  # pinned memory of the case before
    emu.reset(
        scheduler="lazy",
        dry_run=True,
        race_detector=True,
        allocator="exact",
        device_memory=16 << 30,
        pinned_memory=16 << 30,
        flops_per_second=FLOPS_PER_SECOND,
        device_bytes_per_second=1e13,
        h2d_bytes_per_second=bandwidth,
        d2h_bytes_per_second=bandwidth,
    )
    return bandwidth


def cycle(model: nn.Module, mode: str) -> None:
    hidden = torch.empty(TOKENS, WIDTH, device="emu")
    if mode == "inference":
        with torch.no_grad():
            model(hidden)
        return
    model(hidden.requires_grad_()).sum().backward()
    model.zero_grad(set_to_none=True)


def settled_seconds(run: Callable[[], None]) -> float:
    """Virtual seconds of one cycle in the steady state, on the compute stream."""
    for _ in range(SETTLED_AFTER):
        run()
    begin, end = (torch.Event("emu", enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(MEASURED):
        run()
    end.record()
    torch.accelerator.synchronize()
    return begin.elapsed_time(end) / 1e3 / MEASURED


@functools.cache
def resident_seconds(model: str, mode: str, ratio: float) -> float:
    """The same model with all weights on the device."""
    case = Case(model=model, mode=mode, ratio=ratio, budget_blocks=0)
    configure(case)
    resident = case.build().to("emu")
    return settled_seconds(lambda: cycle(resident, mode))


@functools.cache
def rival_seconds(rival: Callable[..., None], model: str, mode: str, ratio: float, budget_blocks: int) -> float:
    case = Case(model=model, mode=mode, ratio=ratio, budget_blocks=budget_blocks)
    configure(case)
    streamed = case.build()
    rival(streamed.layers, torch.device("emu", 0), budget_blocks, training=mode != "inference")
    return settled_seconds(lambda: cycle(streamed, mode))


def measure(case: Case) -> dict[str, float]:
    """The row's ratios."""
    alike = (case.model, case.mode, case.ratio)
    resident = resident_seconds(*alike)
    synchronous_seconds = rival_seconds(synchronous, *alike, 0)
    ahead_seconds = rival_seconds(ahead_of_residents, *alike, case.budget_blocks)
    bandwidth = configure(case)
    model = case.build()
    budget_bytes = case.budget_blocks * WIDTH * WIDTH * 4 * max(case.linears if case.model == "uneven" else [LINEARS])
    with headrace.offload(model, device="emu", device_memory=budget_bytes, blocks=[model.layers]) as handle:
        seconds = settled_seconds(lambda: cycle(model, case.mode))
        plan = handle.plan
        if plan is None:
            raise RuntimeError("nothing was planned")
    reports = emu.take_reports()
    if reports:
        raise RuntimeError(f"{len(reports)} races, the first: {reports[0]}")
    only_loads = dataclasses.replace(
        plan.problem,
        load_seconds=tuple(nbytes / bandwidth for nbytes in plan.problem.block_bytes),
        visits=tuple(dataclasses.replace(visit, compute_seconds=0.0) for visit in plan.problem.visits),
    )
    return {
        "predicted": seconds / plan.predicted.cycle_seconds,
        "bound": seconds / max(resident, lower_bound(only_loads)),
        "proven": seconds / max(resident, lower_bound(plan.problem)),
        "resident": seconds / resident,
        "sync": synchronous_seconds / resident,
        "ahead": ahead_seconds / resident,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="budgets of 3 and 6 blocks only")
    parser.add_argument("--ratio", type=float, choices=RATIOS, help="this ratio only")
    arguments = parser.parse_args()
    print("step time over                     predicted  bound proven  resident | rivals over resident: sync  ahead")
    worst: dict[str, list[float]] = {"predicted": [], "up to 0.9, from 3 blocks": [], "1.5, from 6 blocks": []}
    for case in cases(arguments.quick):
        if arguments.ratio not in (None, case.ratio):
            continue
        row = measure(case)
        label = f"{case.model:8}{case.mode:12}{case.ratio:4.1f} {case.budget_blocks:3} blocks"
        print(
            f"{label:34}{row['predicted']:10.3f} {row['bound']:6.3f} {row['proven']:6.3f} {row['resident']:9.3f} |"
            f" {row['sync']:26.3f} {row['ahead']:6.3f}",
            flush=True,
        )
        worst["predicted"].append(row["predicted"])
        if case.ratio < 1 and case.budget_blocks >= 3:
            worst["up to 0.9, from 3 blocks"].append(row["bound"])
        if case.ratio > 1 and case.budget_blocks >= 6:
            worst["1.5, from 6 blocks"].append(row["bound"])
    print()
    for name, bar in (("predicted", 1.03), ("up to 0.9, from 3 blocks", 1.03), ("1.5, from 6 blocks", 1.06)):
        if worst[name]:
            over = "the prediction" if name == "predicted" else f"the bound, {name}"
            print(f"over {over}: worst {max(worst[name]):.3f} (bar {bar})")


if __name__ == "__main__":
    main()
