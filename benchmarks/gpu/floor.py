"""What can no schedule beat, and what does the cost model forecast? From bytes, rates and the job alone."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from benchmarks.gpu.cases import Job
from benchmarks.gpu.models import config_of, nbytes_of
from benchmarks.gpu.work import RANK, is_training
from headrace.planning.cost import Activations, Case, Hardware, Method, Overlap, Place, Spread, Training, Work
from headrace.planning.cost.forecast import run_of
from headrace.shapes import shape_of

STATE_BYTES = 10  # each way, for each bfloat16 parameter that the device updates: master's other half, two moments
UPDATE_BYTES = 26  # of host memory, for each bfloat16 parameter: gradient, weight, master's other half, two moments


@dataclass(frozen=True, kw_only=True)
class Must:
    """Bytes of one turn that have to cross with the job's budgets, whatever the schedule."""

    must_onload_bytes: int
    must_offload_bytes: int
    must_update_bytes: int  # of host memory, in updates there
    must_state_bytes: int  # each way, for updates on the device
    must_fetch_bytes: int
    must_spill_bytes: int


def must_of(job: Job, model: nn.Module) -> Must:
    """Between two sweeps over the layers, forward or backward, no more than the budget can stay.

    Trained weights change at each step, so all of them come anew. An embedding's table is left out, because only rows
    of it need to come, and so are stacked experts.
    """
    tables = sum(nbytes_of(module) for module in model.modules() if isinstance(module, nn.Embedding))
    tables += sum(parameter.nbytes for parameter in model.parameters() if parameter.ndim > 2)
    weights, budget = nbytes_of(model) - tables, job.device_memory or 0
    missing = max(0, weights - budget)
    below_host = max(0, missing - (job.host_memory or 0)) if job.disk else 0
    state = 0
    if job.kind == "train":
        parameters = sum(parameter.numel() for parameter in model.parameters())
        update, onload, offload = UPDATE_BYTES * parameters, weights + missing, weights
        if job.way == "headrace-device":
            update, state = 0, STATE_BYTES * parameters
    elif job.kind == "lora":
        linears = (module for module in model.model.modules() if isinstance(module, nn.Linear))  # without the head
        adapters = sum(RANK * (linear.in_features + linear.out_features) for linear in linears)
        update, onload, offload = UPDATE_BYTES * adapters, 2 * missing, 2 * adapters
    else:
        update, onload, offload = 0, missing, 0
    return Must(
        must_onload_bytes=onload,
        must_offload_bytes=offload,
        must_update_bytes=update,
        must_state_bytes=state,
        must_fetch_bytes=below_host * (2 if is_training(job) else 1),
        must_spill_bytes=below_host if job.kind == "train" else 0,
    )


def floor_of(row: dict[str, Any], compute_seconds: float, hardware: Hardware) -> dict[str, float]:
    """What binds -> its seconds alone; the longest of them is the floor."""
    rates = {
        "onload": hardware.onload_bytes_per_second,
        "offload": hardware.offload_bytes_per_second,
        "update": hardware.update_rate,
        "state": hardware.onload_bytes_per_second,
        "fetch": hardware.disk_read_bytes_per_second,
        "spill": hardware.disk_write_bytes_per_second,
    }
    moved = {name: row[f"must_{name}_bytes"] / rate for name, rate in rates.items() if row[f"must_{name}_bytes"]}
    return {"compute": compute_seconds, **moved}


def forecast(job: Job, model: nn.Module, rows: int, sequence: int, hardware: Hardware) -> float:
    """Seconds of a turn as `headrace plan` simulates it, with the job's budget for the weights."""
    kind = {"train": Training.FULL, "lora": Training.ADAPTER}.get(job.kind, Training.NONE)
    described: Any = model if job.kind == "dit" else config_of(job.kind, job.size)
    method = Method(
        weights=Place.DISK if job.disk else Place.HOST,
        state=Place.HOST,
        activations=Activations.RECOMPUTED if is_training(job) else Activations.KEPT,
        overlap=Overlap.FORWARD if is_training(job) else Overlap.NONE,
    )
    work = Work(training=kind, batch_size=rows, sequence_length=sequence, master_bytes=2, clipped=True)
    if kind is Training.NONE:
        work = dataclasses.replace(work, clipped=False)
    shape = shape_of(described, kind, RANK if job.kind == "lora" else None, None)
    return run_of(Case(shape, work, Spread(), method, hardware), job.device_memory).seconds
