"""How fast is common hardware? For planning without measuring, from `catalogue.toml`: each figure with its source.

Sold figures are turned into reached ones in one place (`machine`), by stated shares. A part that lacks a figure cannot
be made into a machine without it being given.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, TypeVar

from headrace.planning.cost.hardware import FABRIC, NO_PEERS, Hardware

__all__ = ["DEVICES", "DRIVES", "HOSTS", "MACHINES", "Device", "Drive", "Host", "machine", "nearest", "with_drives"]

Part = TypeVar("Part")

# What a run reaches of what is sold.
COMPUTE_SHARE = 0.6  # matrix products within a transformer's step, of the dense tensor peak
LINK_SHARE = 0.8  # page-locked copies of megabytes, of the link's raw rate (25 of 31.5 GB/s on PCIe 4); of networks
DRAM_SHARE = 0.75  # streams of reads and writes on all cores, of channels times rate
DISK_SHARE = 0.9  # direct reads and writes of megabytes, of the sequential rate

# What a transfer takes besides its bytes; of memory the middle of the range that the source gives, 50 to 80 ns.
_LATENCIES = "https://www.techcompare.app/latency-visualizer/memory-latency-numbers"
_LINK_LATENCY = "https://www.cs.virginia.edu/~mwb7w/cuda_support/memory_transfer_overhead.html"
DRAM_LATENCY, LINK_LATENCY = 65e-9, 10e-6


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator as sold: dense 16-bit matrix rate with sums in float32, and its raw link rate per direction."""

    memory_bytes: int
    bytes_per_second: float
    flops_per_second: float
    link_bytes_per_second: float
    peer_bytes_per_second: float = 0.0  # 0: no links among devices, and no peer access over PCIe that is known of
    network_bytes_per_second: float = 0.0  # of the network card that machines of eight have for each device
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host as sold; `network_bytes_per_second` where devices bring no network cards of their own."""

    memory_bytes: int
    dram_bytes_per_second: float
    network_bytes_per_second: float
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Drive:
    """A drive as sold; `endurance_bytes` may be written in its life, 0: the maker does not say."""

    disk_bytes: int
    read_bytes_per_second: float
    write_bytes_per_second: float
    endurance_bytes: int = 0
    latency_seconds: float
    duplex_share: float = 1.0  # of each rate while it is read and written: SATA carries one direction at a time
    sources: tuple[str, ...]


_ASSUMED = {1.25e9: "assumed: 10 Gigabit Ethernet", 12.5e9: "assumed: 100 Gigabit Ethernet"}  # of hosts


def _parts(kind: type[Part], table: dict[str, dict[str, Any]]) -> dict[str, Part]:
    return {name: kind(**figures | {"sources": tuple(figures["sources"])}) for name, figures in table.items()}


_TABLES = tomllib.loads(files("headrace.planning.cost").joinpath("catalogue.toml").read_text())
DEVICES = _parts(Device, _TABLES["devices"])
HOSTS = _parts(Host, _TABLES["hosts"])
DRIVES = _parts(Drive, _TABLES["drives"])


def machine(
    device: str, *, host: str, drive: str | None = None, drives: int = 1, devices: int = 1, name: str | None = None
) -> Hardware:
    """A machine of catalogue parts, with sold figures turned into reached ones.

    Raises ValueError naming what the catalogue has when a part is not in it.
    """
    chip, board = _part(DEVICES, device, "device"), _part(HOSTS, host, "host")
    sources = {
        **dict.fromkeys(
            ("device_memory_bytes", "device_bytes_per_second", "flops_per_second", "onload_bytes_per_second"),
            "; ".join(chip.sources),
        ),
        **dict.fromkeys(("host_memory_bytes", "dram_bytes_per_second"), "; ".join(board.sources)),
        "dram_latency_seconds": _LATENCIES,
        "link_latency_seconds": _LINK_LATENCY,
    }
    network = chip.network_bytes_per_second * devices or board.network_bytes_per_second
    sources["node_bytes_per_second"] = "; ".join(chip.sources) if chip.network_bytes_per_second else _ASSUMED[network]
    made = Hardware(
        name=name or device,
        devices=devices,
        device_memory_bytes=chip.memory_bytes,
        device_bytes_per_second=chip.bytes_per_second,
        flops_per_second=chip.flops_per_second * COMPUTE_SHARE,
        onload_bytes_per_second=chip.link_bytes_per_second * LINK_SHARE,
        offload_bytes_per_second=chip.link_bytes_per_second * LINK_SHARE,
        host_memory_bytes=board.memory_bytes,
        dram_bytes_per_second=board.dram_bytes_per_second * DRAM_SHARE,
        dram_latency_seconds=DRAM_LATENCY,
        link_latency_seconds=LINK_LATENCY,
        peer=FABRIC if chip.peer_bytes_per_second else NO_PEERS,
        collective_bytes_per_second=(chip.peer_bytes_per_second or chip.link_bytes_per_second) * LINK_SHARE,
        node_bytes_per_second=network * LINK_SHARE,
        sources=sources,
    )
    return made if drive is None else with_drives(made, drive, drives)


def with_drives(hardware: Hardware, drive: str, drives: int = 1) -> Hardware:
    """The machine with `drives` of this kind in place of its own, read and written all at once.

    Raises ValueError naming what the catalogue has when the drive is not in it, or for fewer than one.
    """
    disk = _part(DRIVES, drive, "drive")
    if drives < 1:
        raise ValueError(f"drives={drives}; give at least 1")
    fields: dict[str, Any] = {
        "disk_bytes": disk.disk_bytes * drives,
        "disk_read_bytes_per_second": disk.read_bytes_per_second * drives * DISK_SHARE,
        "disk_write_bytes_per_second": disk.write_bytes_per_second * drives * DISK_SHARE,
        "disk_endurance_bytes": disk.endurance_bytes * drives,
        "disk_latency_seconds": disk.latency_seconds,
        "disk_duplex_share": disk.duplex_share,
    }
    sources = dict.fromkeys(fields, "; ".join(disk.sources)) | {"disk_latency_seconds": _LATENCIES}
    return replace(hardware, **fields, sources={**hardware.sources, **sources})


def nearest(name: str, known: Collection[str]) -> str:
    """Words that name what is most like `name`, such as "h100" for "NVIDIA H100 80GB"; empty when nothing is."""
    asked = re.sub("[^a-z0-9]", "", name.lower())
    within = [one for one in known if re.sub("[^a-z0-9]", "", one) in asked]
    close = sorted(within, key=len)[-1:] or difflib.get_close_matches(name.lower(), known, n=1)
    return f"; the nearest is {close[0]}" if close else ""


def _part(parts: dict[str, Part], name: str, kind: str) -> Part:
    if name not in parts:
        raise ValueError(f"the catalogue has no {kind} {name!r}{nearest(name, parts)}; it has {', '.join(parts)}")
    return parts[name]


def _machines() -> dict[str, Hardware]:
    """Usual machines: of each device one, cards in a desktop, others in a server, each with a drive; and of eight."""
    cards = {"3090", "4090", "5090"}
    made = {}
    for device in DEVICES:
        host = "desktop" if device in cards else "grace" if device == "gh200" else "server-ddr5"
        drive, drives = ("nvme-gen4", 1) if device in cards else ("nvme-gen4", 4)
        made[device] = machine(device, host=host, drive=drive, drives=drives)
        if device != "gh200":
            many = "server-2xddr4" if device in {"3090", "4090"} else "server-ddr5"
            made[f"8x{device}"] = machine(device, host=many, drive=drive, drives=4, devices=8, name=f"8x{device}")
    return made


MACHINES = _machines()
