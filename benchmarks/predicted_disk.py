"""How close is what is predicted of weights from disk to what is measured, from a drive that is made of waiting?

The rows of `predicted.py` that are in wall-clock time, on the CPU: the emulated device's clock knows no drive. Files in
RAM, of which each request takes its bytes over a rate, one at a time. Compute is next to nothing. No bar: copies and
waiting threads share the machine's cores.
"""

import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter, sleep
from unittest import mock

import torch
from overlap import WIDTH, Decoder

import headrace
from headrace.memory.disk.file import DirectFile
from headrace.planning.cost import Activations, Case, Hardware, Method, Place, Spread, Training, Work, shape_of_module
from headrace.planning.cost.forecast import run_of
from headrace.planning.cost.lanes import CostLane
from headrace.planning.cost.traffic import STAGED_BLOCKS

DRIVES = [(rate, budget, trains) for trains in (False, True) for rate, budget in ((200e6, 2), (400e6, 4))]


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


def disk_rows(hardware: Hardware) -> Iterator[str]:
    """Frozen weights that rest on disk, all but the staging memory's: read in forward, and again in backward.

    `hardware`: the machine but for its drive.
    """
    tokens, linears, count = 8, 8, 8
    for rate, blocks, trains in DRIVES:
        drive = Drive(rate)
        torch.manual_seed(0)
        model = Decoder([linears] * count, recompute=False).requires_grad_(False)
        block_bytes = linears * WIDTH * WIDTH * 4
        machine = hardware.changed(
            host_memory_bytes=STAGED_BLOCKS * block_bytes,  # none is left for weights
            disk_bytes=10**12,
            disk_read_bytes_per_second=rate,
            disk_write_bytes_per_second=rate,
        )
        work = Work(training=Training.ADAPTER if trains else Training.NONE, sequence_length=tokens)
        method = Method(weights=Place.DISK, state=Place.DEVICE, activations=Activations.KEPT)
        run = run_of(Case(shape_of_module(model), work, Spread(), method, machine), blocks * block_bytes)
        with (
            warnings.catch_warnings(action="ignore"),  # that the files lie in RAM, so that no real drive is in the way
            tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
            mock.patch.object(DirectFile, "read", drive(DirectFile.read)),
            mock.patch.object(DirectFile, "write", drive(DirectFile.write)),
            headrace.offload(
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
