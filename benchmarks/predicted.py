"""How close is what is predicted before a run to what is measured in it? Step times and peak bytes of each tier.

    PYTHONPATH=. python benchmarks/predicted.py [--cpu]

In virtual time on the emulated accelerator, so no noise: the prediction knows the model's shape and the device's
settings (operations and bytes per second), nothing of the run. Decoders of 24 blocks and small Llamas train, with and
without recomputation, or infer, at budgets from 2 blocks on; optimizers step after backward, beside the next forward,
and within backward (`overlap_updates.py`). Bars: step time within 3% in the median and 8% at worst, peak bytes within
2%.

Activations over a link that is slower than the layers compute leave under a ceiling for two layers' (`device_memory`).

Weights from disk: the emulated device's clock knows no drive, so these rows are in wall-clock time, on the CPU, from a
drive that is made of waiting: files in RAM, of which each request takes its bytes over a rate, one at a time. Compute
is next to nothing. No bar: copies and waiting threads share the machine's cores.

With `--cpu` also in wall-clock time with the CPU as device, by what `millrace.probe()` measures just before; the spread
of the steps themselves stands beside it. There is no bar: the CPU copies and computes with the same cores.
"""

import argparse
import dataclasses
import gc
import itertools
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter, sleep
from typing import Any
from unittest import mock

import activations as saved
import torch
import transformers
from overlap import FLOPS_PER_SECOND, TOKENS, WIDTH, Case, configure, settled_seconds
from overlap_updates import UPDATE_BYTES, step_seconds
from torch import nn

import millrace
from emulator import emu
from millrace.memory.disk.file import DirectFile
from millrace.planning.cost import (
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
from millrace.planning.cost.forecast import Run, run_of
from millrace.planning.cost.lanes import CostLane

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
DRIVES = [(rate, budget, trains) for trains in (False, True) for rate, budget in ((200e6, 2), (400e6, 4))]
LLAMAS = [("300MiB", 4e9), ("150MiB", 8e9), ("150MiB", 3e9)]  # device memory, bytes per second of the link
LLAMA_TOKENS = (4, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Measured over predicted."""

    name: str
    step: float
    device: float
    gradients: float | None
    host: float | None


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
    model: nn.Module, machine: Hardware, mode: str, budget_bytes: int, work: Work, overlap: Overlap = Overlap.NONE
) -> Run:
    """The forecast of a model that is streamed within `budget_bytes` and updated on the host."""
    shape = shape_of_module(model)
    activations = Activations.RECOMPUTED if mode == RECOMPUTING else Activations.KEPT
    method = Method(weights=Place.HOST, state=Place.HOST, activations=activations, overlap=overlap)
    if mode == INFERENCE:
        shape, work = shape.frozen(), dataclasses.replace(work, training=Training.NONE)
    return run_of(shape, work, Spread(), method, machine, budget_bytes)


def compare(name: str, run: Run, handle: millrace.Offloaded, step: Callable[[], None]) -> Row:
    """A settled step and its peak bytes, as the ledger counted them, over what was predicted.

    The steps before it are not compared: the first pass, which is recorded, takes what its budget has.
    """
    seconds = settled_seconds(step)
    handle.reset_stats()
    step()
    handle.synchronize()
    stats = handle.stats()
    held = {(item.place, item.purpose): item.nbytes for item in run.tiers.held}
    gradients = held.get((Place.DEVICE, "gradients"))
    host = sum(
        item.nbytes for item in run.tiers.held if item.place is Place.HOST and item.purpose != "master and state"
    )
    return Row(
        name=name,
        step=seconds / run.seconds,
        device=stats.device_peak_bytes / run.visits.predicted.peak_bytes,
        gradients=stats.device_gradient_peak_bytes / gradients if gradients else None,
        host=stats.host_peak_bytes / host if host else None,
    )


def weights_rows() -> Iterator[Row]:
    """Weights that visit, and gradients that leave; homes change at every step, in no virtual time."""
    work = Work(sequence_length=TOKENS, gradient_bytes=4, master_bytes=0, state_bytes=0)
    for kind, mode, ratio, budget_blocks in WEIGHTS:
        case = Case(model=kind, mode=mode, ratio=ratio, budget_blocks=budget_blocks)
        bandwidth = configure(case)
        model = case.build()
        budget_bytes = budget_blocks * max(sum(p.nbytes for p in layer.parameters()) for layer in model.layers)
        run = predict(model, hardware(bandwidth), mode, budget_bytes, work)
        with millrace.offload(model, device="emu", device_memory=budget_bytes, blocks=[model.layers]) as handle:
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
    """The update on the host, in each of its modes."""
    for ratio, overlap in UPDATES:
        case = Case(model="uniform", mode=TRAINING, ratio=0.9, budget_blocks=3)
        bandwidth = configure(case)
        model = case.build()
        elements = sum(parameter.numel() for parameter in model.parameters())
        forward_seconds = 2 * TOKENS * elements / FLOPS_PER_SECOND
        dram = elements * UPDATE_BYTES / (ratio * forward_seconds)
        budget_bytes = 3 * sum(parameter.nbytes for parameter in model.layers[0].parameters())
        work = Work(sequence_length=TOKENS, gradient_bytes=4, master_bytes=0, clipped=overlap is not Overlap.BACKWARD)
        run = predict(model, hardware(bandwidth, dram=dram), TRAINING, budget_bytes, work, overlap)
        del model
        seconds = step_seconds(case, ratio, forward_seconds, overlap.value)
        busy = run.step.busy_seconds[CostLane.UPDATE]
        name = f"update/forward {ratio}, overlap={overlap.value} (update {busy:.2f} s)"
        yield Row(name=name, step=seconds / run.seconds, device=1.0, gradients=None, host=None)


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
        run = run_of(shape_of_module(model), work, Spread(), method, hardware(bandwidth), budget_bytes)
        if with_weights:
            handle = millrace.offload(
                model, device="emu", device_memory=budget_bytes, blocks=[model.layers], activations=True
            )
            offloading = handle.activations
        else:
            held = {item.purpose: item.nbytes for item in run.tiers.held if item.place is Place.DEVICE}
            handle = offloading = millrace.offload_activations(
                saved.drop_gradients(model.to("emu")), device_memory=held["activations"] if ceiling else None
            )
        with handle:
            seconds, _ = saved.measure(lambda model=model: saved.cycle(model))
            host = {item.purpose: item.nbytes for item in run.tiers.held if item.place is Place.HOST}
            name = f"activations, copies/forward {ratio}" + (", with weights" if with_weights else "")
            name += ", under a ceiling" if ceiling else ""
            yield Row(
                name=name,
                step=seconds / run.seconds,
                device=1.0,
                gradients=None,
                host=offloading.stats().host_peak_bytes / host["activations"],
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
        with millrace.offload(model, device="emu", device_memory=memory) as handle:
            # On the device: a batch that is copied there waits behind what is loaded ahead over the same link.
            tokens = torch.zeros(batch, length, dtype=torch.long, device="emu")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

            def step(model: Any = model, tokens: torch.Tensor = tokens, optimizer: Any = optimizer) -> None:
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            yield compare(f"llama training, {memory}, link {bandwidth / 1e9:g} GB/s", run, handle, step)
        gc.collect()


class Drive:
    """Serves one request at a time, each in its bytes over the rate."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._lock = threading.Lock()

    def __call__(self, call: Callable[..., None]) -> Callable[..., None]:
        def served(file: DirectFile, address: int, nbytes: int, offset: int, what: str) -> None:
            with self._lock:
                begun = perf_counter()
                call(file, address, nbytes, offset, what)
                sleep(max(0.0, nbytes / self.bytes_per_second - (perf_counter() - begun)))

        return served


def disk_rows() -> Iterator[str]:
    """Frozen weights that rest on disk, all but the staging memory's: read in forward, and again in backward."""
    from overlap import Decoder

    tokens, linears, count = 8, 8, 8
    for rate, blocks, trains in DRIVES:
        drive = Drive(rate)
        torch.manual_seed(0)
        model = Decoder([linears] * count, recompute=False).requires_grad_(False)
        block_bytes = linears * WIDTH * WIDTH * 4
        machine = hardware(1e11, flops=4e10).changed(
            disk_bytes=10**12, disk_read_bytes_per_second=rate, disk_write_bytes_per_second=rate
        )
        work = Work(training=Training.ADAPTER if trains else Training.NONE, sequence_length=tokens)
        method = Method(weights=Place.DISK, state=Place.DEVICE, activations=Activations.KEPT)
        run = run_of(shape_of_module(model), work, Spread(), method, machine, blocks * block_bytes)
        with (
            warnings.catch_warnings(action="ignore"),  # that the files lie in RAM, so that no real drive is in the way
            tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
            mock.patch.object(DirectFile, "read", drive(DirectFile.read)),
            mock.patch.object(DirectFile, "write", drive(DirectFile.write)),
            millrace.offload(
                model,
                device="cpu",
                device_memory=blocks * block_bytes,
                host_memory=block_bytes,
                disk=directory,
                blocks=[model.layers],
            ) as handle,
        ):
            hidden = torch.randn(tokens, WIDTH, requires_grad=trains)
            taken = []
            for _ in range(8):
                handle.reset_stats()
                begun = perf_counter()
                with torch.set_grad_enabled(trains):
                    out = model(hidden)
                if trains:
                    out.sum().backward()
                taken.append(perf_counter() - begun)
            stats = handle.stats()
            settled = sorted(taken[4:])
            moved = run.step.moved_bytes[CostLane.FETCH]
            name = f"from a drive of {rate / 1e6:g} MB/s, {blocks} of {count} blocks" + (
                ", backward too" if trains else ""
            )
            yield (
                f"{name:54}{run.seconds:8.3f} s {median(settled):7.3f} s {median(settled) / run.seconds:7.3f}"
                f"{stats.fetch_bytes / moved:9.3f}"
                f"{stats.device_peak_bytes / run.visits.predicted.peak_bytes:9.3f}"
                f"   {settled[0] / median(settled):.2f} to {settled[-1] / median(settled):.2f}"
            )


def cpu_rows() -> Iterator[str]:
    """Wall-clock on the CPU: predicted, measured in the median, and the spread of the steps."""
    from overlap import Decoder

    probed = millrace.probe("cpu", cache=False)
    machine = probed.hardware.changed(flops_per_second=probed.matmul_flops_per_second["float32"])
    work = Work(sequence_length=TOKENS, gradient_bytes=4, master_bytes=0)
    for mode, blocks in ((TRAINING, 3), (TRAINING, 6), (RECOMPUTING, 3), (INFERENCE, 3)):
        torch.manual_seed(0)
        model = Decoder([4] * 8, mode == RECOMPUTING)
        budget_bytes = blocks * 4 * WIDTH * WIDTH * 4
        run = predict(model, machine, mode, budget_bytes, work)
        with millrace.offload(model, device="cpu", device_memory=budget_bytes, blocks=[model.layers]):
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
    print("measured over predicted                                  step  device  gradients   host")
    rows = []
    for row in itertools.chain(weights_rows(), llama_rows(), update_rows(), activation_rows()):
        gradients, host = (f"{value:.3f}" if value is not None else "" for value in (row.gradients, row.host))
        print(f"{row.name:52}{row.step:9.3f} {row.device:7.3f} {gradients:>10} {host:>6}", flush=True)
        rows.append(row)
    errors = sorted(abs(row.step - 1) for row in rows)
    nbytes = [abs(x - 1) for row in rows for x in (row.device, row.gradients, row.host) if x is not None]
    print(f"\nstep time: off by {median(errors):.1%} in the median (bar 3%), {errors[-1]:.1%} at worst (bar 8%)")
    print(f"peak bytes of a tier: off by {max(nbytes):.1%} at worst (bar 2%)")
    print(
        "\nwall-clock, from disk                                 predicted  measured  over it  fetched  device   spread"
    )
    for line in disk_rows():
        print(line, flush=True)
    if arguments.cpu:
        print("\nwall-clock on the CPU                         predicted  measured  over it   spread of its steps")
        for line in cpu_rows():
            print(line, flush=True)


if __name__ == "__main__":
    main()
