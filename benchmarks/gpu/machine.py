"""Which machine is this, and how fast is each of its lanes alone?"""

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

import psutil
import torch

import headrace
from headrace.ahead import HardwareNotFound, cached_probe
from headrace.config import format_bytes
from headrace.optim import kernel
from headrace.planning.cost import Hardware
from headrace.runtime.device import resolve_device
from headrace.runtime.probe import link_rates, memory_rate, update_rate

PACKAGES = ("torch", "transformers", "peft", "accelerate", "diffusers", "deepspeed", "torchao", "roundpipe")


def open_device(name: str) -> torch.device:
    """`name`: "" for the current accelerator. "emu" is the emulated one, which is built when it is first used."""
    if name.split(":")[0] == "emu":
        from emulator import emu

        emu.reset(device_memory=4 << 30, allocator="exact")
    return resolve_device(name or None)


def measure(name: str, directory: str) -> dict[str, Any]:
    """The device, and the machine's rates: as `headrace probe` measured them before, or does now.

    Of the emulated accelerator a few small copies: its speed means nothing.
    """
    device = open_device(name)
    module = torch.get_device_module(device)
    called = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    return {"device": called, "hardware": rates_of(device, directory).to_json()}


def rates_of(device: torch.device, directory: str) -> Hardware:
    if device.type == "emu":
        return emulated(device)
    try:
        found = cached_probe()
        if found.name == f"{platform.node()} ({device})":
            return found
    except (HardwareNotFound, ValueError):
        pass
    probe = headrace.probe(device, disk=directory)
    print(probe.to_text(), file=sys.stderr)
    return probe.hardware


def emulated(device: torch.device) -> Hardware:
    link = link_rates(device, copy_bytes=2**20)
    return Hardware(
        name=f"emulated ({device})",
        device_memory_bytes=int(torch.accelerator.get_memory_info(device)[1]),
        device_bytes_per_second=link.onload,
        flops_per_second=1e10,
        onload_bytes_per_second=link.onload,
        offload_bytes_per_second=link.offload,
        host_memory_bytes=psutil.virtual_memory().total,
        dram_bytes_per_second=memory_rate(copy_bytes=2**22),
        update_bytes_per_second=update_rate(parameters=2**16),
        disk_bytes=2**30,
        disk_read_bytes_per_second=1e9,
        disk_write_bytes_per_second=1e9,
    )


def heading(found: dict[str, Any]) -> dict[str, Any]:
    """Hardware, date and versions: the first line of a result."""
    hardware = Hardware.from_json(found["hardware"])
    return {
        "command": "python -m benchmarks.gpu " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "device": found["device"],
        "device_memory": format_bytes(hardware.device_memory_bytes),
        "host": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        + format_bytes(psutil.virtual_memory().total),
        "link": f"{hardware.onload_bytes_per_second / 1e9:.1f} GB/s in,"
        f" {hardware.offload_bytes_per_second / 1e9:.1f} out",
        "update": f"{hardware.update_rate / 1e9:.1f} GB/s of host memory",
        "disk": f"{hardware.disk_read_bytes_per_second / 1e9:.2f} GB/s read,"
        f" {hardware.disk_write_bytes_per_second / 1e9:.2f} written",
        "python": platform.python_version(),
        "headrace": headrace.__version__ + ("" if kernel.available() else ", without its native kernel"),
        "versions": {name: version_of(name) for name in PACKAGES},
    }


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not here"


if __name__ == "__main__":  # in a process of its own: one that has used the device holds some of its memory
    print(json.dumps(measure(*sys.argv[1:])))
