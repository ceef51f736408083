"""How close is what is predicted before a run to what is measured in it? Step times and peak bytes of each tier.

    PYTHONPATH=. python benchmarks/predicted.py [--cpu]

In virtual time on the emulated accelerator, so no noise: the prediction knows the model's shape and the device's
settings (operations and bytes per second), nothing of the run. Decoders of 24 blocks and small Llamas train, with and
without recomputation, or infer, at budgets from 2 blocks on; optimizers step after backward, beside the next forward,
and within backward (`overlap_updates.py`). Activations leave, alone and with the weights, and over a link that is
slower than the layers compute under the ceiling that is forecast (`device_memory`).

Bars: step time within 3% in the median and 8% at worst, peak bytes of a settled step within 2%. `run` is the peak of
the whole run, whose first pass is recorded and takes what it may: over the forecast, and, as `budget`, over the budget,
which it may never exceed. "-": there is nothing to compare. Activations that do not leave are PyTorch's own to keep;
where all weights stay on the device, none visit it, and gradients go as they come; inference has none; without
`device_memory` activations have no budget.

Weights from disk are in wall-clock time (`predicted_disk.py`). With `--cpu` also others, with the CPU as device, by
what `headrace.probe()` measures just before; the spread of the steps themselves stands beside it. There is no bar: the
CPU copies and computes with the same cores.
"""

import argparse
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import activations as saved
import torch
import transformers
from overlap import FLOPS_PER_SECOND, TOKENS, WIDTH, Case, configure, settled_seconds
from overlap_updates import UPDATE_BYTES, measured
from predicted_disk import disk_rows
from torch import nn

import headrace
from emulator import emu
from headrace.cli.noise import without_noise
from headrace.planning.cost import (
    Activations,
    Hardware,
    Method,
    Overlap,
    Place,
    Spread,
    Training,
    Work,
    shape_of_module,
)
from headrace.planning.cost import Case as CostCase
from headrace.planning.cost.forecast import Run, run_of
from headrace.planning.cost.lanes import CostLane

UNLIMITED = 1e18
TRAINING, RECOMPUTING, INFERENCE = "training", "recomputing", "inference"
WEIGHTS = [
    *(("uniform", TRAINING, ratio, budget) for ratio, budget in ((0.5, 2), (0.9, 3), (1.5, 3), (1.5, 6), (1.5, 12))),
    *(("uniform", RECOMPUTING, ratio, budget) for ratio, budget in ((0.9, 3), (1.5, 6))),
    *(("uniform", INFERENCE, ratio, budget) for ratio, budget in ((0.9, 3), (1.5, 6))),
    *(("uneven", TRAINING, ratio, budget) for ratio, budget in ((0.9, 3), (1.5, 6))),
    *(("uneven", RECOMPUTING, ratio, budget) for ratio, budget in ((1.5, 3),)),
    *(("uneven", INFERENCE, ratio, budget) for ratio, budget in ((1.5, 3), (0.9, 6))),
]
UPDATES = [(ratio, overlap) for ratio in (0.25, 0.5, 1.0, 1.5, 2.0) for overlap in Overlap]
# Copies of a layer over its forward, beside weights or not, and whether no more than two layers' may stay.
ACTIVATIONS = [
    *((ratio, weights, False) for weights in (False, True) for ratio in (0.5, 0.9)),
    *((ratio, False, True) for ratio in (0.9, 1.5, 3.0)),
]
LLAMAS = [("300MiB", 4e9), ("150MiB", 8e9), ("150MiB", 3e9)]  # device memory, bytes per second of the link
LLAMA_TOKENS = (4, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Measured over predicted; None where there is nothing to compare (see above).

    `step`, and the peak bytes of a settled one: `device` of weights that visit, `gradients` and `activations` there,
    `host` of all (of activations, where these leave). `run`: the peak of the whole run, recording included, of `device`
    (of `activations`, where no weights visit); `budget`: the same over what the run was given.
    """

    name: str
    step: float
    device: float | None = None
    gradients: float | None = None
    activations: float | None = None
    host: float | None = None
    run: float | None = None
    budget: float | None = None

    def __str__(self) -> str:
        peaks = (self.device, self.gradients, self.activations, self.host, self.run, self.budget)
        return f"{self.name:56}{self.step:6.3f}" + "".join(
            f"{'-' if peak is None else f'{peak:.3f}':>{width}}"
            for peak, width in zip(peaks, (8, 11, 13, 8, 8, 8), strict=True)
        )


HEADING = f"{'measured over predicted':57}step  device  gradients  activations    host     run  budget"


def hardware(bandwidth: float, *, flops: float = FLOPS_PER_SECOND, dram: float = UNLIMITED) -> Hardware:
    """The emulated device's settings as a machine."""
    return Hardware(
        name="emulated",
        device_memory_bytes=10**15,
        device_bytes_per_second=1e13,
        flops_per_second=flops,
        onload_bytes_per_second=bandwidth,
        offload_bytes_per_second=bandwidth,
        host_memory_bytes=10**15,
        dram_bytes_per_second=UNLIMITED,
        update_bytes_per_second=dram,
    )


def predict(
    model: nn.Module,
    machine: Hardware,
    mode: str,
    budget_bytes: int,
    work: Work,
    overlap: Overlap = Overlap.NONE,
    update: Place = Place.HOST,
) -> Run:
    """The forecast of a model that is streamed within `budget_bytes`, and updated by the host or by the device."""
    shape = shape_of_module(model)
    activations = Activations.RECOMPUTED if mode == RECOMPUTING else Activations.KEPT
    method = Method(weights=Place.HOST, state=Place.HOST, activations=activations, overlap=overlap, update=update)
    if mode == INFERENCE:
        shape, work = shape.frozen(), dataclasses.replace(work, training=Training.NONE)
    return run_of(CostCase(shape, work, Spread(), method, machine), budget_bytes)


def compare(name: str, run: Run, handle: headrace.Offloaded, step: Callable[[], None]) -> Row:
    """A settled step and its peak bytes, as the ledger counted them, and the peak of all steps up to there."""
    seconds = settled_seconds(step)
    whole = handle.stats().device_peak_bytes
    handle.reset_stats()
    step()
    handle.synchronize()
    stats = handle.stats()
    whole = max(whole, stats.device_peak_bytes)
    gradients = held_bytes(run, Place.DEVICE, "gradients")
    host = sum(held_bytes(run, Place.HOST, purpose) for purpose in ("weights", "gradients"))
    planned = run.visits.predicted.peak_bytes + held_bytes(run, Place.DEVICE, "updates")
    return Row(
        name=name,
        step=seconds / run.seconds,
        device=stats.device_peak_bytes / planned,
        gradients=stats.device_gradient_peak_bytes / gradients if gradients else None,
        host=stats.host_peak_bytes / host,
        run=whole / planned,
        budget=whole / stats.device_budget_bytes,
    )


def held_bytes(run: Run, place: Place, purpose: str) -> int:
    """What the forecast has of one purpose in one tier."""
    return sum(item.nbytes for item in run.tiers.held if (item.place, item.purpose) == (place, purpose))


def weights_rows() -> Iterator[Row]:
    """Weights that visit, and gradients that leave; homes change at every step, in no virtual time."""
    work = Work(sequence_length=TOKENS, gradient_bytes=4, master_bytes=0, state_bytes=0)
    for kind, mode, ratio, budget_blocks in WEIGHTS:
        case = Case(model=kind, mode=mode, ratio=ratio, budget_blocks=budget_blocks)
        bandwidth = configure(case)
        model = case.build()
        budget_bytes = budget_blocks * max(sum(p.nbytes for p in layer.parameters()) for layer in model.layers)
        run = predict(model, hardware(bandwidth), mode, budget_bytes, work)
        with headrace.offload(model, device="emu", device_memory=budget_bytes, blocks=[model.layers]) as handle:
            name = f"{kind} {mode}, load/compute {ratio}, {budget_blocks} blocks"
            yield compare(name, run, handle, _step(model, mode))
        gc.collect()


def _step(model: nn.Module, mode: str) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hidden = torch.empty(TOKENS, WIDTH, device="emu")

    def step() -> None:
        if mode == INFERENCE:
            with torch.no_grad():
                model(hidden)
            return
        model(hidden.detach().requires_grad_()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def update_rows() -> Iterator[Row]:
    """The update by the host at several speeds, and by the device, in each of its modes."""
    by_device = [(1.0, overlap, Place.DEVICE) for overlap in Overlap]
    for ratio, overlap, update in [*((*case, Place.HOST) for case in UPDATES), *by_device]:
        case = Case(model="uniform", mode=TRAINING, ratio=0.9, budget_blocks=3)
        bandwidth = configure(case)
        model = case.build()
        elements = sum(parameter.numel() for parameter in model.parameters())
        forward_seconds = 2 * TOKENS * elements / FLOPS_PER_SECOND
        dram = elements * UPDATE_BYTES / (ratio * forward_seconds)
        budget_bytes = 3 * sum(parameter.nbytes for parameter in model.layers[0].parameters())
        work = Work(sequence_length=TOKENS, gradient_bytes=4, master_bytes=0, clipped=overlap is not Overlap.BACKWARD)
        run = predict(model, hardware(bandwidth, dram=dram), TRAINING, budget_bytes, work, overlap, update)
        del model
        busy = run.step.busy_seconds[CostLane.UPDATE]
        by_host = f"update/forward {ratio}, overlap={overlap.value} (update {busy:.2f} s)"
        name = by_host if update is Place.HOST else f"updated by the device, overlap={overlap.value}"
        measure = functools.partial(compare, name, run)
        yield measured(case, ratio, forward_seconds, overlap.value, measure, update=update.value)


def activation_rows() -> Iterator[Row]:
    """What autograd saves waits on the host, alone and with the weights over the same link."""
    work = Work(sequence_length=saved.TOKENS, gradient_bytes=4, master_bytes=0, state_bytes=0)
    for ratio, with_weights, ceiling in ACTIVATIONS:
        saved.configure(ratio, recompute=False)
        bandwidth = emu.settings()["h2d_bytes_per_second"]
        model = saved.Decoder(recompute=False)
        place = Place.HOST if with_weights else Place.DEVICE
        method = Method(weights=place, state=place, activations=Activations.OFFLOADED)
        budget_bytes = 4 * saved.BLOCK_BYTES if with_weights else None
        run = run_of(CostCase(shape_of_module(model), work, Spread(), method, hardware(bandwidth)), budget_bytes)
        if with_weights:
            handle = headrace.offload(
                model, device="emu", device_memory=budget_bytes, blocks=[model.layers], activations=True
            )
            offloading = handle.activations
        else:
            planned = held_bytes(run, Place.DEVICE, "activations")
            handle = offloading = headrace.offload_activations(
                saved.drop_gradients(model.to("emu")), device_memory=planned if ceiling else None
            )
        with handle:
            name = f"activations, copies/forward {ratio}" + (", with weights" if with_weights else "")
            name += ", under a ceiling" if ceiling else ""
            peaks = [saved.device_peaks(model, handle) for _ in range(saved.SETTLED_AFTER)]
            seconds, _ = saved.measure(lambda model=model: saved.cycle(model))
            weights = handle.stats().device_peak_bytes if with_weights else 0  # of those cycles
            peaks.append(saved.device_peaks(model, handle))
            settled = peaks[-1]
            whole = max(peak.weights for peak in [*peaks, dataclasses.replace(settled, weights=weights)])
            kept = max(peak.activations for peak in peaks)
            planned = held_bytes(run, Place.DEVICE, "activations")  # the ceiling, where there is one
            visiting = run.visits.predicted.peak_bytes
            yield Row(
                name=name,
                step=seconds / run.seconds,
                device=settled.weights / visiting if with_weights else None,
                gradients=settled.gradients / held_bytes(run, Place.DEVICE, "gradients") if with_weights else None,
                activations=settled.activations / planned,
                host=offloading.stats().host_peak_bytes / held_bytes(run, Place.HOST, "activations"),
                run=whole / visiting if with_weights else kept / planned,
                budget=whole / budget_bytes if with_weights else (kept / planned if ceiling else None),
            )
        gc.collect()


def llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=2816,
        vocab_size=8000,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def llama_rows() -> Iterator[Row]:
    """A model with attention, norms and a loss, which the prediction knows by its config."""
    for memory, bandwidth in LLAMAS:
        emu.reset(
            scheduler="lazy",
            dry_run=True,
            allocator="exact",
            device_memory=16 << 30,
            pinned_memory=16 << 30,
            flops_per_second=2e12,
            device_bytes_per_second=1e13,
            h2d_bytes_per_second=bandwidth,
            d2h_bytes_per_second=bandwidth,
        )
        model = llama()
        batch, length = LLAMA_TOKENS
        work = Work(batch_size=batch, sequence_length=length, gradient_bytes=4, master_bytes=0, state_bytes=0)
        budget_bytes = int(memory.removesuffix("MiB")) << 20
        run = predict(model, hardware(bandwidth, flops=2e12), TRAINING, budget_bytes, work)
        with headrace.offload(model, device="emu", device_memory=memory) as handle:
            # On the device: a batch that is copied there waits behind what is loaded ahead over the same link.
            tokens = torch.zeros(batch, length, dtype=torch.long, device="emu")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

            def step(model: Any = model, tokens: torch.Tensor = tokens, optimizer: Any = optimizer) -> None:
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            yield compare(f"llama training, {memory}, link {bandwidth / 1e9:g} GB/s", run, handle, step)
        gc.collect()


def cpu_rows() -> Iterator[str]:
    """Wall-clock on the CPU: predicted, measured in the median, and the spread of the steps."""
    from overlap import Decoder

    probed = headrace.probe("cpu", cache=False)
    machine = probed.hardware.changed(flops_per_second=probed.matmul_flops_per_second["float32"])
    work = Work(sequence_length=TOKENS, gradient_bytes=4, master_bytes=0)
    for mode, blocks in ((TRAINING, 3), (TRAINING, 6), (RECOMPUTING, 3), (INFERENCE, 3)):
        torch.manual_seed(0)
        model = Decoder([4] * 8, mode == RECOMPUTING)
        budget_bytes = blocks * 4 * WIDTH * WIDTH * 4
        run = predict(model, machine, mode, budget_bytes, work)
        with headrace.offload(model, device="cpu", device_memory=budget_bytes, blocks=[model.layers]):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
            hidden = torch.randn(TOKENS, WIDTH)
            taken = []
            for _ in range(9):
                begun = perf_counter()
                if mode == INFERENCE:
                    with torch.no_grad():
                        model(hidden)
                else:
                    model(hidden.detach().requires_grad_()).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                taken.append(perf_counter() - begun)
        settled = sorted(taken[4:])
        middle = median(settled)
        spread = f"{settled[0] / middle:.2f} to {settled[-1] / middle:.2f}"
        name = f"cpu {mode}, {blocks} of 8 blocks"
        yield f"{name:44}{run.seconds:10.3f} s {middle:8.3f} s {middle / run.seconds:8.2f}   {spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="also in wall-clock time on the CPU")
    arguments = parser.parse_args()
    print(HEADING)
    rows = []
    for row in itertools.chain(weights_rows(), llama_rows(), update_rows(), activation_rows()):
        print(row, flush=True)
        rows.append(row)
    errors = sorted(abs(row.step - 1) for row in rows)
    compared = [(row.device, row.gradients, row.activations, row.host) for row in rows]
    nbytes = [abs(peak - 1) for peaks in compared for peak in peaks if peak is not None]
    budget = max(row.budget for row in rows if row.budget is not None)
    print(f"\nstep time: off by {median(errors):.1%} in the median (bar 3%), {errors[-1]:.1%} at worst (bar 8%)")
    print(f"peak bytes of a settled step: off by {max(nbytes):.1%} at worst of {len(nbytes)} (bar 2%)")
    print(f"peak of a whole run, recording included: {budget:.3f} of its budget at worst (bar 1)")
    print(
        "\nwall-clock, from disk                                 predicted  measured  over it  fetched  device   spread"
    )
    for line in disk_rows(hardware(1e11, flops=4e10)):
        print(line, flush=True)
    if arguments.cpu:
        print("\nwall-clock on the CPU                         predicted  measured  over it   spread of its steps")
        for line in cpu_rows():
            print(line, flush=True)
    if median(errors) > 0.03 or errors[-1] > 0.08 or max(nbytes) > 0.02 or budget > 1:
        raise SystemExit("a bar was missed")


if __name__ == "__main__":
    with without_noise():
        main()
