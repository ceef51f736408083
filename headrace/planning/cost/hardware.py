"""What does a machine offer a run? Capacities and speeds, as measured or from a catalogue, and where they come from."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FABRIC", "NO_PEERS", "OVER_LINK", "PEERS", "Hardware", "share_of"]

# How the devices of a node reach each other: over links of their own (NVLink, Infinity Fabric), over each one's link to
# the host (PCIe), or not at all: through host memory.
FABRIC, OVER_LINK, NO_PEERS = "fabric", "pcie", "none"
PEERS = (FABRIC, OVER_LINK, NO_PEERS)

_RATES = {  # the fields that one figure stands for; where two have the same, the later one counts
    "link": ("onload_bytes_per_second", "offload_bytes_per_second"),
    "disk": ("disk_read_bytes_per_second", "disk_write_bytes_per_second"),
    "host": ("dram_bytes_per_second", "update_bytes_per_second"),
    "device": ("device_bytes_per_second",),
    "flops": ("flops_per_second",),
    "update": ("update_bytes_per_second",),
    "peers": ("collective_bytes_per_second",),
    "network": ("node_bytes_per_second",),
}
_RATE = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*([kKMGTP]?)(B|FLOPS?)(?:/s)?\s*")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One machine (node) of `devices` equal accelerators. Bytes, bytes per second, operations per second.

    - `flops_per_second`: of matrix products in 16 bits, as reached in practice, not as advertised.
    - `onload_bytes_per_second`, `offload_bytes_per_second`: from and to page-locked host memory, of each device;
      both directions at once unless `duplex_share` is below 1 (the part of each that is left when both run).
    - `dram_bytes_per_second`: of the host, which copies, optimizer and disk share; `host_memory_bytes` of RAM.
    - `update_bytes_per_second`: DRAM traffic of the optimizer's update alone, on all its threads; 0: all of DRAM's.
    - `dram_latency_seconds`, `link_latency_seconds`, `disk_latency_seconds`: added to each transfer's bytes over the
      rate; 0 when not known. They hardly matter for large blocks, but do for small ones on hard disks.
    - `disk_duplex_share`: of the drives' rates, what is left of each while they are read and written at once.
    - `disk_...`: of all drives together; 0: no disk. `disk_endurance_bytes`: the bytes that they are rated to write in
      their lifetime; 0 when not known.
    - `peer`: how devices reach each other: "fabric", "pcie" or "none"; `collective_bytes_per_second`: each device's, to
      the others of the node; `node_bytes_per_second`: of the whole node to other nodes, each way.
    - `sources`: field -> where the figure comes from.
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
    dram_latency_seconds: float = 0.0
    link_latency_seconds: float = 0.0
    disk_latency_seconds: float = 0.0
    peer: str = NO_PEERS
    collective_bytes_per_second: float = 0.0
    node_bytes_per_second: float = 0.0
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (
            "device_memory_bytes",
            "device_bytes_per_second",
            "flops_per_second",
            "onload_bytes_per_second",
            "offload_bytes_per_second",
            "dram_bytes_per_second",
        ):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"hardware {self.name!r}: {name} is {value}; it must be finite and above 0")
        for name in (
            "dram_latency_seconds",
            "link_latency_seconds",
            "disk_latency_seconds",
            "collective_bytes_per_second",
            "node_bytes_per_second",
            "update_bytes_per_second",
        ):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"hardware {self.name!r}: {name} is {value}; it must be finite and at least 0")
        if self.disk_bytes and not (self.disk_read_bytes_per_second > 0 and self.disk_write_bytes_per_second > 0):
            raise ValueError(
                f"hardware {self.name!r} has {self.disk_bytes} bytes of disk, and no speed of it; give"
                " disk_read_bytes_per_second and disk_write_bytes_per_second"
            )
        if self.peer not in PEERS:
            raise ValueError(f"hardware {self.name!r}: peer is {self.peer!r}; give one of {', '.join(PEERS)}")
        if self.peer == FABRIC and not self.collective_bytes_per_second:
            raise ValueError(
                f"hardware {self.name!r} has links among its devices, and no speed of them; give"
                " collective_bytes_per_second"
            )
        if self.devices < 1:
            raise ValueError(f"hardware {self.name!r}: devices is {self.devices}; give at least 1")

    @property
    def update_rate(self) -> float:
        """Bytes per second of DRAM traffic that the update reaches when nothing else uses it."""
        return min(self.update_bytes_per_second or self.dram_bytes_per_second, self.dram_bytes_per_second)

    def changed(self, **figures: Any) -> Hardware:
        """The same machine with other figures, whose source is the caller: fields by name, or in short:

        - `link`, `disk` (each way), `host` (memory, and updates in it), `update`, `device` (its memory), `peers` (from
          each device to the others of the node), `network` (of the node, each way): rates such as "25GB/s", or bytes
          per second; `flops`: such as "300TFLOPS". As reached in practice, not as sold.
        - `drive`: "nvme-gen4", "nvme-gen5", "sata" or "hdd" in place of the machine's own drives, or several: "2xhdd".

        Raises ValueError for a figure that does not exist or makes no sense.
        """
        machine, fields = self, {name: value for name, value in figures.items() if name not in (*_RATES, "drive")}
        if "drive" in figures:
            from headrace.planning.cost.catalogue import with_drives  # which is made of this

            count, drive = re.fullmatch(r"(?:(-?[0-9]+)x)?(.*)", str(figures["drive"])).groups()  # type: ignore[union-attr]
            machine = with_drives(self, drive, int(count or 1))
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
        """A machine of the catalogue, such as "4090" or "8xh100". Raises ValueError for any other."""
        from headrace.planning.cost.catalogue import MACHINES, nearest  # which is made of this

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
    """One device's share of what the devices of the machine share."""
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
