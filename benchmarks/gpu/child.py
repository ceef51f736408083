"""How is one job measured? In a process of its own, which writes a row for each stage of each load as it goes."""

import gc
import hashlib
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

import headrace
from benchmarks.gpu.cases import Job, is_headrace, meta_model, with_budgets
from benchmarks.gpu.floor import forecast, must_of
from benchmarks.gpu.machine import open_device
from benchmarks.gpu.ways import Running, no_room, way_of
from benchmarks.gpu.work import SEQUENCE, Stage, is_training, stages
from headrace.config import format_bytes
from headrace.planning.cost import Hardware

Row = dict[str, Any]


class HostWatch:
    """The most host memory that is in use, beyond what was before: of this process, and of the whole machine.

    Drivers' page-locked memory is in no process's resident memory; the machine's count has it, and others' work.
    """

    def __init__(self) -> None:
        gc.collect()
        self._resident = psutil.Process().memory_info().rss
        self._available = self._least = psutil.virtual_memory().available
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self._least = min(self._least, psutil.virtual_memory().available)
            time.sleep(0.05)

    def row(self) -> Row:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "host_resident_peak_bytes": peak - self._resident,
            "host_taken_peak_bytes": self._available - self._least,
        }


def run(job: Job, hardware: Hardware, file: Path) -> None:
    """Rows as JSON lines in `file`."""
    device = open_device(job.device)
    model = meta_model(job.kind, job.size)
    job = with_budgets(job, model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _, total_bytes = torch.accelerator.get_memory_info(device)
    about: Row = {"case": job.case, "kind": job.kind, "way": job.way, "size": job.size, "parameters": parameters}
    about |= {"device_memory": job.device_memory, "host_memory": job.host_memory, "disk": job.disk}
    rows = Rows(file, about)
    reason = no_room(job, parameters, psutil.virtual_memory().available, total_bytes)
    if reason:
        rows.write({"skipped": reason})
        return
    watch = HostWatch()
    begin = time.perf_counter()
    try:
        running = way_of(job).run(job, device)
        rows.about |= {"note": running.note, "setup_seconds": time.perf_counter() - begin}
        for load in job.loads:
            rows.about |= {"load": load}
            gc.collect()
            torch.accelerator.empty_cache()  # blocks of the former load's sizes
            for stage in stages(job, load, device, running.model, running.step):
                row = {"stage": stage.name, **measured(job, stage, running, device), **watch.row()}
                rows.write(row | predicted(job, model, stage, load, hardware))
    except torch.OutOfMemoryError as error:
        held = torch.accelerator.max_memory_allocated(device)
        said = f"{format_bytes(held)} held of {format_bytes(total_bytes)}; {str(error).splitlines()[0]:.120}"
        rows.write({"skipped": f"out of memory: {said}"})
    except Exception as error:
        if (job.way == "plain" or is_headrace(job.way)) and not isinstance(error, ImportError):
            raise
        lines = str(error).strip().splitlines() or [""]
        rows.write({"skipped": f"{type(error).__name__}: {lines[0]:.200}"})


class Rows:
    def __init__(self, file: Path, about: Row) -> None:
        self.about = about
        self._file = file

    def write(self, row: Row) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(self.about | row) + "\n")


def measured(job: Job, stage: Stage, running: Running, device: torch.device) -> Row:
    """One more turn is made between the resetting of counters, which waits for updates, and the clock's start.

    So as many updates are under way when the clock starts as when it stops; what handles count is of all these turns.
    """
    turns = stage.turns or job.steps
    results: list[Tensor] = []
    begin = begin_on_host = 0.0
    for number in range(stage.warm_up + 1 + turns):
        if number == stage.warm_up:
            if running.handle is not None:
                running.handle.reset_stats()
            torch.accelerator.synchronize(device)
            torch.accelerator.reset_peak_memory_stats(device)
        if number == stage.warm_up + 1:
            torch.accelerator.synchronize(device)
            begin, begin_on_host = time.perf_counter(), time.process_time()
        results.append(stage.turn(number))
    torch.accelerator.synchronize(device)
    seconds = (time.perf_counter() - begin) / turns
    host_seconds = (time.process_time() - begin_on_host) / turns
    allocated, reserved = torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(device)
    row: Row = {
        "turns": turns,
        "tokens": stage.tokens,
        "seconds": seconds,
        "tokens_per_second": stage.tokens / seconds,
        "host_cpu_seconds": host_seconds,
        "device_peak_bytes": allocated,
        "device_reserved_peak_bytes": reserved,
        "reserved_over_allocated": reserved / allocated,
        "results": [told(result) for result in results],
    }
    if job.way == "plain":
        row["compute_seconds"] = seconds if running.clock is None else running.clock.seconds(turns)
    if running.handle is not None and job.kind != "activations":
        row |= of_weights(running.handle, turns + 1)
    elif running.handle is not None:
        row |= of_activations(running.handle, turns + 1)
    return row


def told(result: Tensor) -> Any:
    """A number as it is, a few as a list, many as what stands for their bits."""
    if result.numel() <= 256:
        return result.tolist()
    data = result.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def of_weights(handle: headrace.Offloaded, turns: int) -> Row:
    """What the handle on the weights tells, of one turn."""
    record = handle.report().record
    stats = record.stats
    assert stats is not None
    lanes = {
        lane: {
            "bytes": record.moved_bytes(lane),
            "busy_seconds": record.busy_seconds(lane),
            "bytes_per_second": record.achieved_rate(lane),
            "stall_seconds": record.stall_seconds(lane),
        }
        for lane in [*record.lanes, "host"]
        if lane != "compute" and (record.moved_bytes(lane) or record.stall_seconds(lane))
    }
    planned = record.planned
    return {
        "device_weights_peak_bytes": stats.device_peak_bytes,
        "device_budget_bytes": stats.device_budget_bytes,
        "device_gradients_peak_bytes": stats.device_gradient_peak_bytes,
        "compute_seconds": stats.compute_seconds / turns,
        "stall_seconds": stats.stall_seconds / turns,
        "onload_bytes": stats.onload_bytes / turns,
        "offload_bytes": stats.offload_bytes / turns,
        "fetch_bytes": stats.fetch_bytes / turns,
        "spill_bytes": stats.spill_bytes / turns,
        "demand_onloads": stats.demand_onloads,
        "last_step_seconds": record.step_seconds,
        "lanes": lanes,
        "planned_seconds": None if planned is None else planned.cycle_seconds,
        "planned_floor_seconds": None if planned is None else planned.lower_bound_seconds,
        "host_refused_bytes": stats.host_refused_bytes,
    }


def of_activations(handle: headrace.ActivationOffloading, turns: int) -> Row:
    stats = handle.stats()
    return {
        "stall_seconds": stats.stall_seconds / turns,
        "onload_bytes": stats.onload_bytes / turns,
        "offload_bytes": stats.offload_bytes / turns,
        "demand_onloads": stats.demand_onloads,
        "host_activations_peak_bytes": stats.host_peak_bytes,
    }


def predicted(job: Job, model: torch.nn.Module, stage: Stage, load: int, hardware: Hardware) -> Row:
    """What is known of a turn without running it: the cost model's forecast, and the bytes that have to cross."""
    if not is_headrace(job.way) or job.kind == "activations":
        return {}
    rows, sequence = load, stage.tokens // load
    if job.kind == "dit":
        rows, sequence = 1, load
    elif is_training(job):
        sequence = min(load, SEQUENCE)
        rows = load // sequence
    return {"forecast_seconds": forecast(job, model, rows, sequence, hardware), **vars(must_of(job, model))}


def main() -> None:
    job, hardware, file = sys.argv[1:]
    run(Job.from_json(job), Hardware.from_json(hardware), Path(file))
    sys.stdout.flush()
    os._exit(0)  # engines of others keep threads that never end


if __name__ == "__main__":
    main()
