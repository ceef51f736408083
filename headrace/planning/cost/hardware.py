"""What does a machine offer a run? Capacities and speeds, as measured or from a catalogue, and where they come from.

The catalogue is for planning without measuring: `catalogue.toml` has what parts are sold with, each figure with its
source. Sold figures are turned into reached ones in one place (`machine`), by stated shares.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

# How the devices of a node reach each other: over links of their own (NVLink, Infinity Fabric), over each one's link to
# the host (PCIe), or not at all: through host memory.
FABRIC, OVER_LINK, NO_PEERS = "fabric", "pcie", "none"
PEERS = (FABRIC, OVER_LINK, NO_PEERS)

_RATES = {  # the fields that a figure stands for; if two figures set the same field, the later one counts
    "link": ("onload_bytes_per_second", "offload_bytes_per_second"),
    "disk": ("disk_read_bytes_per_second", "disk_write_bytes_per_second"),
    "host": ("dram_bytes_per_second", "update_bytes_per_second"),
    "device": ("device_bytes_per_second",),
    "flops": ("flops_per_second",),
    "update": ("update_bytes_per_second",),
    "peers": ("collective_bytes_per_second",),
    "network": ("node_bytes_per_second",),
}
_NEEDED = {
    *("devices", "device_memory_bytes", "device_bytes_per_second", "flops_per_second"),
    *("onload_bytes_per_second", "offload_bytes_per_second", "dram_bytes_per_second"),
}
_RATE = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*([kKMGTP]?)(B|FLOPS?)(?:/s)?\s*")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One machine (node) with `devices` equal accelerators. In bytes, bytes per second and operations per second.

    - `flops_per_second`: rate of matrix products in 16 bits, as reached in practice, not as advertised.
    - `onload_bytes_per_second`, `offload_bytes_per_second`: rates of each device from and to page-locked host memory.
      `duplex_share` is the part of each rate that is left when both directions run at once.
    - `dram_bytes_per_second`: rate of the host's memory, which copies, optimizer and disk share. `host_memory_bytes`:
      the size of its RAM.
    - `update_bytes_per_second`: memory traffic that the optimizer's update reaches alone, on all its threads. 0: as
      much as `dram_bytes_per_second`.
    - `dram_latency_seconds`, `link_latency_seconds`, `disk_latency_seconds`: added to the time of each transfer; 0 if
      not known. They hardly matter for large blocks, but they do for small blocks on hard disks.
    - `disk_duplex_share`: the part of each of the drives' rates that is left when they are read and written at once.
    - `disk_...`: figures of all drives together; 0: no disk. `disk_endurance_bytes`: how many bytes they are rated to
      write in their lifetime; 0 if not known.
    - `unified`: whether the device's memory is the host's (the CPU as the device), so that both together have
      `host_memory_bytes`.
    - `peer`: how devices reach each other: "fabric", "pcie" or "none". `collective_bytes_per_second`: rate from each
      device to the others of the node. `node_bytes_per_second`: rate from the whole node to other nodes, each way.
    - `sources`: for each field, where its figure comes from.
    """

    name: str
    devices: int = 1
    device_memory_bytes: int
    device_bytes_per_second: float
    flops_per_second: float
    onload_bytes_per_second: float
    offload_bytes_per_second: float
    duplex_share: float = 1.0
    host_memory_bytes: int
    dram_bytes_per_second: float
    update_bytes_per_second: float = 0.0
    disk_bytes: int = 0
    disk_read_bytes_per_second: float = 0.0
    disk_write_bytes_per_second: float = 0.0
    disk_endurance_bytes: int = 0
    disk_duplex_share: float = 1.0
    unified: bool = False
    dram_latency_seconds: float = 0.0
    link_latency_seconds: float = 0.0
    disk_latency_seconds: float = 0.0
    peer: str = NO_PEERS
    collective_bytes_per_second: float = 0.0
    node_bytes_per_second: float = 0.0
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.disk_bytes and not (self.disk_read_bytes_per_second > 0 and self.disk_write_bytes_per_second > 0):
            raise ValueError(
                f"hardware {self.name!r} has {self.disk_bytes} bytes of disk, and no speed of it; give"
                " disk_read_bytes_per_second and disk_write_bytes_per_second"
            )
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not (0 < value < math.inf or (value == 0 and name not in _NEEDED)):
                least = "above 0" if name in _NEEDED else "at least 0"
                raise ValueError(f"hardware {self.name!r}: {name} is {value}; it must be finite and {least}")
        if self.peer not in PEERS:
            raise ValueError(f"hardware {self.name!r}: peer is {self.peer!r}; give one of {', '.join(PEERS)}")
        if self.peer == FABRIC and not self.collective_bytes_per_second:
            raise ValueError(
                f"hardware {self.name!r} has links among its devices, and no speed of them; give"
                " collective_bytes_per_second"
            )

    @property
    def update_rate(self) -> float:
        """Bytes per second of memory traffic that the update reaches when nothing else uses the memory."""
        return min(self.update_bytes_per_second or self.dram_bytes_per_second, self.dram_bytes_per_second)

    def changed(self, **figures: Any) -> Hardware:
        """The same machine with other figures, whose source is the caller. Give fields by name, or these short forms:

        - `link`, `disk` (each way), `host` (its memory, also for updates), `update`, `device` (its memory), `peers`
          (from each device to the others of the node), `network` (of the node, each way): rates such as "25GB/s", or
          bytes per second. `flops`: a rate such as "300TFLOPS". Give all rates as reached in practice, not as
          advertised.
        - `drive`: "nvme-gen4", "nvme-gen5", "sata" or "hdd" in place of the machine's own drives, or several: "2xhdd".

        Raises ValueError for an unknown or invalid figure.
        """
        machine, fields = self, {name: value for name, value in figures.items() if name not in (*_RATES, "drive")}
        if "drive" in figures:
            count, drive = re.fullmatch(r"(?:(-?[0-9]+)x)?(.*)", str(figures["drive"])).groups()  # type: ignore[union-attr]
            machine = _with_drives(self, drive, int(count or 1))
        for name, targets in _RATES.items():
            if name in figures:
                fields |= dict.fromkeys(targets, _rate(name, figures[name]))
        short, known = [*_RATES, "drive", "peer"], [field.name for field in dataclasses.fields(self)]
        for name, value in fields.items():
            if name not in known:
                raise ValueError(f"a machine has no figure {name!r}; give one of {', '.join([*short, *known])}")
            if isinstance(value, str) and name not in ("peer", "name"):
                raise ValueError(f"{name}={value!r} is no number; text is for {', '.join(short)}")
        peer = fields.get("peer", self.peer)
        if "peers" in figures and peer == NO_PEERS:
            raise ValueError(
                f"peers={figures['peers']!r} but devices of {self.name} do not reach each other; give peer, too: one of"
                f" {', '.join(PEERS)}"
            )
        if peer == FABRIC != self.peer and "collective_bytes_per_second" not in fields:
            raise ValueError(f"peer='fabric' of which speed? {self.name} has none; give peers, too: peers='200GB/s'")
        if peer == OVER_LINK != self.peer:
            fields.setdefault(
                "collective_bytes_per_second", fields.get(_RATES["link"][0], self.onload_bytes_per_second)
            )
        sources = {**machine.sources, **dict.fromkeys(fields, "given")}
        return dataclasses.replace(machine, **fields, sources=sources)

    @classmethod
    def named(cls, name: str) -> Hardware:
        """A machine of the catalogue, such as "4090" or "8xh100". Raises ValueError for any other name, TypeError
        unless it is text.
        """
        if not isinstance(name, str):
            raise TypeError(f"hardware={name!r} is a {type(name).__name__}; give one of {', '.join(MACHINES)}")
        if name not in MACHINES:
            raise ValueError(f"hardware={name!r} is not known{nearest(name, MACHINES)}; give {', '.join(MACHINES)}")
        return MACHINES[name]

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "sources": dict(self.sources)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """What `to_json` wrote. Raises ValueError for anything else."""
        try:
            fields = json.loads(text)
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"this is no hardware file of this version ({error}); run headrace probe again") from error


def share_of(machine: Hardware) -> Hardware:
    """The machine with one device, and its share of what the devices have in common."""
    count = machine.devices
    return dataclasses.replace(
        machine,
        devices=1,
        dram_bytes_per_second=machine.dram_bytes_per_second / count,
        update_bytes_per_second=machine.update_bytes_per_second / count,
        host_memory_bytes=machine.host_memory_bytes // count,
        disk_bytes=machine.disk_bytes // count,
        disk_read_bytes_per_second=machine.disk_read_bytes_per_second / count,
        disk_write_bytes_per_second=machine.disk_write_bytes_per_second / count,
    )


def _rate(name: str, value: Any) -> float:
    """A number, or text such as "25GB/s" and "300TFLOPS": units of 1000, of bytes and not of bits."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    found = _RATE.fullmatch(str(value))
    if found is None or (found[3] == "B") == (name == "flops"):
        example = "300TFLOPS" if name == "flops" else "25GB/s"
        raise ValueError(f"{name}={value!r} is no rate; give one such as {example!r}")
    return float(found[1]) * 1000.0 ** " KMGTP".index(found[2].upper() or " ")


# the catalogue --------------------------------------------------------------------------------------------------------
Part = dict[str, Any]  # figures as sold, and their sources: `catalogue.toml` says what each is
_CATALOGUE = tomllib.loads(files("headrace.planning.cost").joinpath("catalogue.toml").read_text())
DEVICES: dict[str, Part] = _CATALOGUE["devices"]
HOSTS: dict[str, Part] = _CATALOGUE["hosts"]
DRIVES: dict[str, Part] = _CATALOGUE["drives"]

# The shares of sold figures that a run reaches.
COMPUTE_SHARE = 0.6  # matrix products within a transformer's step, of the dense tensor peak
LINK_SHARE = 0.8  # of the raw rate (25 of 31.5 GB/s on PCIe 4), for page-locked copies of megabytes; also of networks
DRAM_SHARE = 0.75  # streams of reads and writes on all cores, of channels times rate
DISK_SHARE = 0.9  # direct reads and writes of megabytes, of the sequential rate

# What a transfer takes besides its bytes. For memory: the middle of the range that the source gives, 50 to 80 ns.
_LATENCIES = "https://www.techcompare.app/latency-visualizer/memory-latency-numbers"
_LINK_LATENCY = "https://www.cs.virginia.edu/~mwb7w/cuda_support/memory_transfer_overhead.html"
DRAM_LATENCY, LINK_LATENCY = 65e-9, 10e-6
_ASSUMED = {1.25e9: "assumed: 10 Gigabit Ethernet", 12.5e9: "assumed: 100 Gigabit Ethernet"}  # networks of hosts


def machine(
    device: str, *, host: str, drive: str | None = None, drives: int = 1, devices: int = 1, name: str | None = None
) -> Hardware:
    """A machine of catalogue parts, with sold figures turned into reached ones.

    Raises ValueError naming what the catalogue has when a part is not in it.
    """
    chip, board = _part(DEVICES, device, "device"), _part(HOSTS, host, "host")
    link, peers = chip["link_bytes_per_second"], chip.get("peer_bytes_per_second", 0.0)
    cards = chip.get("network_bytes_per_second", 0.0) * devices
    network = cards or board["network_bytes_per_second"]
    of_device: dict[str, Any] = {
        "device_memory_bytes": chip["memory_bytes"],
        "device_bytes_per_second": chip["bytes_per_second"],
        "flops_per_second": chip["flops_per_second"] * COMPUTE_SHARE,
        "onload_bytes_per_second": link * LINK_SHARE,
        "offload_bytes_per_second": link * LINK_SHARE,
        "collective_bytes_per_second": (peers or link) * LINK_SHARE,
    }
    of_host: dict[str, Any] = {
        "host_memory_bytes": board["memory_bytes"],
        "dram_bytes_per_second": board["dram_bytes_per_second"] * DRAM_SHARE,
    }
    sources = dict.fromkeys(of_device, "; ".join(chip["sources"]))
    sources |= dict.fromkeys(of_host, "; ".join(board["sources"]))
    sources |= {"dram_latency_seconds": _LATENCIES, "link_latency_seconds": _LINK_LATENCY}
    sources["node_bytes_per_second"] = "; ".join(chip["sources"]) if cards else _ASSUMED[network]
    made = Hardware(
        name=name or device,
        devices=devices,
        **of_device,
        **of_host,
        dram_latency_seconds=DRAM_LATENCY,
        link_latency_seconds=LINK_LATENCY,
        peer=FABRIC if peers else NO_PEERS,
        node_bytes_per_second=network * LINK_SHARE,
        sources=sources,
    )
    return made if drive is None else _with_drives(made, drive, drives)


def _with_drives(hardware: Hardware, drive: str, drives: int) -> Hardware:
    """The machine with `drives` of this kind in place of its own, read and written all at once."""
    disk = _part(DRIVES, drive, "drive")
    if drives < 1:
        raise ValueError(f"drives={drives}; give at least 1")
    fields: dict[str, Any] = {
        "disk_bytes": disk["disk_bytes"] * drives,
        "disk_read_bytes_per_second": disk["read_bytes_per_second"] * drives * DISK_SHARE,
        "disk_write_bytes_per_second": disk["write_bytes_per_second"] * drives * DISK_SHARE,
        "disk_endurance_bytes": disk.get("endurance_bytes", 0) * drives,
        "disk_latency_seconds": disk["latency_seconds"],
        "disk_duplex_share": disk.get("duplex_share", 1.0),
    }
    sources = dict.fromkeys(fields, "; ".join(disk["sources"])) | {"disk_latency_seconds": _LATENCIES}
    return dataclasses.replace(hardware, **fields, sources={**hardware.sources, **sources})


def nearest(name: str, known: Collection[str]) -> str:
    """Words that name the closest match to `name`, such as "h100" for "NVIDIA H100 80GB"; empty if there is none."""
    asked = re.sub("[^a-z0-9]", "", name.lower())
    within = [one for one in known if re.sub("[^a-z0-9]", "", one) in asked]
    close = sorted(within, key=len)[-1:] or difflib.get_close_matches(name.lower(), known, n=1)
    return f"; the nearest is {close[0]}" if close else ""


def _part(parts: dict[str, Part], name: str, kind: str) -> Part:
    """The part of that name. Raises ValueError naming what the catalogue has when the part is not in it."""
    if name not in parts:
        raise ValueError(f"the catalogue has no {kind} {name!r}{nearest(name, parts)}; it has {', '.join(parts)}")
    return parts[name]


def _machines() -> dict[str, Hardware]:
    """Usual machines: one of each device (cards in a desktop, others in a server), and eight of it in a server."""
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
