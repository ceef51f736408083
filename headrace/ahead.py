"""What will a run hold, and how long will it take? `plan()` says so, for the machine here or another one."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from headrace.config import Size, check_count, check_share, is_number, parse_budget, parse_bytes
from headrace.errors import HeadraceError
from headrace.planning.cost import (
    MACHINES,
    Hardware,
    Overlap,
    RunPlan,
    Spread,
    Training,
    Work,
    plan_run,
    wanted,
)
from headrace.shapes import shape_of

if TYPE_CHECKING:
    import torch  # not imported here: `headrace plan` does without


MEASURED = "measured"

Choice = TypeVar("Choice", bound=Enum)


class HardwareNotFound(HeadraceError, ValueError):  # noqa: N818 - the name says what is wrong
    """The machine that was named is neither in the catalogue nor measured."""


def cached_probe() -> Hardware:
    """What `probe()` last measured on this machine. Raises HardwareNotFound if it never has."""
    path = cache_path()
    try:
        return Hardware.from_json(path.read_text())
    except FileNotFoundError:
        measure = "this machine has not been measured; run headrace probe, or name a machine: "
        raise HardwareNotFound(measure + _known()) from None
    except OSError as error:
        raise HardwareNotFound(
            f"the measurement {path} cannot be read ({error.strerror}); run headrace probe again, or name a machine: "
            + _known()
        ) from error


def probed_rates(device: torch.device) -> dict[str, float]:
    """Bytes per second of each lane, as `probe()` measured for `device`; empty without a valid measurement."""
    try:
        hardware = cached_probe()
    except ValueError:  # damaged, or of another version: `plan` says so; a report has no rates then
        return {}
    if not hardware.name.endswith(f"({device})"):
        return {}
    return {
        "onload": hardware.onload_bytes_per_second,
        "offload": hardware.offload_bytes_per_second,
        "fetch": hardware.disk_read_bytes_per_second,
        "spill": hardware.disk_write_bytes_per_second,
    }


def plan(
    model: Any,
    *,
    hardware: Hardware | str | None = None,
    batch_size: int = 1,
    sequence_length: int = 2048,
    micro_batches: int = 1,
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    disk: Size | bool | None = None,
    devices: int | None = None,
    nodes: int = 1,
    training: Literal["full", "adapter", "inference"] = "full",
    adapter_rank: int | None = None,
    weight_bits: float | None = None,
    overlap: Literal["none", "forward", "backward"] = "none",
    state_dtype: torch.dtype | Literal["float32", "bfloat16", "8bit"] = "float32",
    master_form: Literal["split", "full", "none"] = "split",
    zero_stage: int = 0,
    method: str | None = None,
    optimizer_fraction: float | None = None,
    expert_hit_rate: float | None = None,
) -> RunPlan:
    """What a run of `model` will hold in each tier, how long a step will take and why, before anything is allocated.

    - `model`: a module (on meta is enough), a transformers config, its dictionary, or a path to a config.json.
    - `hardware`: a `Hardware`, a name from the catalogue ("4090", "8xh100"), or "measured": what `probe()` found.
      Default: "measured" if there is a measurement, otherwise "4090".
    - `batch_size`, `sequence_length`, `micro_batches`: the size of one optimizer step of one replica.
    - `device_memory`, `host_memory`, `disk`: bytes or text such as "24GiB", instead of the machine's own. `disk=False`:
      no disk. For other rates and drives, give `hardware=Hardware.named("4090").changed(link="25GB/s")`.
    - `devices`: how many devices of each of the `nodes` are used, data-parallel. Default: one, or with several nodes
      all that the machine has. The devices of a node share one copy on the host; with a `zero_stage` of 1 or 2, state
      (and gradients) are divided among all devices instead. What headrace cannot run yet is simulated all the same: see
      `RunPlan.not_run`.
    - `method`: plan this method instead of the fastest one. Give its name ("none", "offload-optimizer",
      "offload-optimizer-to-disk", "stream-weights", "stream-weights-from-disk"), its parts
      ("weights=host,state=disk,update=device,activations=recomputed"), or both. Weights and state rest on "device",
      "host" or "disk"; activations are "kept", "recomputed", "offloaded" or "spilled". `optimizer_fraction`: the share
      of the optimizer's state and update that is on the host, 0 to 1; the rest is on the device, as with
      `device_fraction` of `headrace.optim`. In inference on one device, `cache=host` and `cache=disk` plan for
      `offload_cache()`: keys and values rest there. By default they do where the device lacks room for them.
    - `training`: "full", "adapter" (LoRA of `adapter_rank`, default 16) or "inference". `weight_bits`: bits per weight
      of the layers, such as 4.5 for NF4. `overlap`, `state_dtype` and `master_form`: those of `headrace.optim.AdamW`:
      "none", "forward" or "backward"; torch.float32, torch.bfloat16 or "8bit"; "split", "full" or "none".

    - `expert_hit_rate`: the share, 0 to 1, of the experts used in decoding that are on the device already. A run's
      stats have it (1 - `expert_loads` / `expert_uses`). `RunPlan.decoding` has the speed for this share and for
      others.

    Raises TypeError for settings of another type, ValueError for settings that are invalid or have no effect (settings
    of the update in inference, or of several devices without `devices`), and HardwareNotFound for an unknown machine. A
    model that does not fit is not an error: see `RunPlan.fits`.
    """
    sizes: Any = {"batch_size": batch_size, "sequence_length": sequence_length, "micro_batches": micro_batches}
    _check_numbers(sizes | {"nodes": nodes}, devices, adapter_rank, weight_bits, expert_hit_rate, optimizer_fraction)
    machine = _resized(machine_of(hardware), device_memory, host_memory, disk)
    kind = _one_of(Training, training, "training")
    shape = shape_of(model, kind, adapter_rank, weight_bits, sequence_length)
    spread = Spread(data=_all_devices(machine, devices, nodes), zero_stage=zero_stage, nodes=nodes)
    full_width = shape.weight_bytes >= 3.9 * shape.parameters
    work = Work(
        training=kind,
        **sizes,
        gradient_bytes=4 if full_width else 2,
        master_bytes=_bytes_of_master(master_form, full_width=full_width),
        state_bytes=_state_bytes(state_dtype),
    )
    updates, adapts = kind is not Training.NONE, kind is Training.ADAPTER
    decodes = not updates and spread.data == 1 and any(block.expert_parameters for block in shape.blocks)
    replicas = devices is not None or spread.data > 1
    of_update = "of an update, and training='inference' has none; leave it out"
    _refuse_idle(
        ("adapter_rank", adapter_rank, adapts, "of training='adapter' alone; leave it out"),
        ("overlap", None if overlap == Overlap.NONE.value else overlap, updates, of_update),
        ("state_dtype", None if work.state_bytes == 8 else state_dtype, updates, of_update),
        ("master_form", None if master_form == "split" else master_form, updates, of_update),
        ("optimizer_fraction", optimizer_fraction, updates, of_update),
        ("expert_hit_rate", expert_hit_rate, decodes, "of inference with experts on one device; leave it out"),
        ("zero_stage", zero_stage or None, replicas, "for several replicas; give devices, too, or leave it out"),
    )
    return plan_run(
        shape,
        machine,
        work,
        spread,
        overlap=_one_of(Overlap, overlap, "overlap"),
        disk=disk is not False,
        wanted=wanted(method, optimizer_fraction),
        expert_hit_rate=expert_hit_rate,
    )


def _check_numbers(
    counts: Mapping[str, Any], devices: Any, rank: Any, bits: Any, hit_rate: Any, optimizer_fraction: Any
) -> None:
    """Raises TypeError or ValueError for settings of `plan` that are not the numbers they should be, or None."""
    optional = {"devices": devices, "adapter_rank": rank}
    for name, count in (*counts.items(), *((name, one) for name, one in optional.items() if one is not None)):
        check_count(count, name)
    if bits is not None and not is_number(bits):
        raise TypeError(f"weight_bits={bits!r} is a {type(bits).__name__}; give bits, such as 4.5")
    if hit_rate is not None:
        check_share(hit_rate, "expert_hit_rate", "the share of experts that is there, from 0 to 1")
    if optimizer_fraction is not None:
        check_share(optimizer_fraction, "optimizer_fraction", "the host's share, from 0 to 1")


def _all_devices(machine: Hardware, devices: int | None, nodes: int) -> int:
    """The devices of all nodes together. Raises ValueError if several nodes have a network of unknown speed."""
    if nodes > 1 and not machine.node_bytes_per_second:
        raise ValueError(
            f"nodes={nodes} but the network of {machine.name} is not known; give it: Hardware.changed(network='12GB/s')"
        )
    return nodes * (devices or (1 if nodes == 1 else machine.devices))


def _refuse_idle(*settings: tuple[str, Any, bool, str]) -> None:
    """Raises ValueError for a setting (not None) that does not apply."""
    for name, value, applies, why in settings:
        if value is not None and not applies:
            raise ValueError(f"{name}={value!r} is {why}")


def _state_bytes(state_dtype: torch.dtype | str) -> float:
    """Bytes of a parameter's moments."""
    name = str(state_dtype).removeprefix("torch.")
    if name == "8bit":
        from headrace.optim.eight_bit import RECORD_BYTES, RUN_ELEMENTS  # here: it imports torch

        return 2 * RECORD_BYTES / RUN_ELEMENTS
    known = {"float32": 8.0, "bfloat16": 4.0}
    if name not in known:
        raise ValueError(f"state_dtype={state_dtype!r}; give one of {', '.join(known)}, 8bit")
    return known[name]


def _bytes_of_master(form: str, *, full_width: bool) -> int:
    """Bytes of a parameter's master. `full_width`: weights are in float32."""
    known = {"split": 2, "full": 4, "none": 0}
    if not isinstance(form, str) or form not in known:
        raise ValueError(f"master_form={form!r}; give one of {', '.join(known)}")
    if full_width and form != "split":
        raise ValueError(f"master_form={form!r} is of bfloat16 weights, and these are float32; leave it out")
    return 0 if full_width else known[form]


def machine_of(hardware: Hardware | str | None) -> Hardware:
    """The machine of that name. Without one, the measured machine, or else a 4090. Raises HardwareNotFound."""
    if isinstance(hardware, Hardware):
        return hardware
    if hardware == MEASURED or (hardware is None and cache_path().exists()):
        return cached_probe()
    try:
        return Hardware.named("4090" if hardware is None else hardware)
    except ValueError as error:
        raise HardwareNotFound(f'{error} or "{MEASURED}"') from error


def _resized(
    machine: Hardware, device_memory: Size | None, host_memory: Size | None, disk: Size | bool | None
) -> Hardware:
    fields: dict[str, Any] = {}
    if device_memory is not None:
        fields["device_memory_bytes"] = parse_budget(device_memory, name="device_memory")
    if host_memory is not None:
        fields["host_memory_bytes"] = parse_budget(host_memory, name="host_memory")
    if disk is not None and not isinstance(disk, bool):
        fields["disk_bytes"] = parse_bytes(disk, name="disk")
        if not machine.disk_read_bytes_per_second:
            raise ValueError(f"disk={disk!r} but the speed of {machine.name}'s disk is not known; give a Hardware")
    return machine.changed(**fields) if fields else machine


def cache_path() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "headrace" / f"hardware-{platform.node() or 'host'}.json"


def _known() -> str:
    return ", ".join(MACHINES) + ' or "measured"'


def _one_of(kind: type[Choice], value: str, name: str) -> Choice:
    known = {str(member.value): member for member in kind}
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={value!r}; give one of {', '.join(known)}")
    return known[value]
