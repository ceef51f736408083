"""What does a machine offer a run? Capacities and speeds, as measured or from a catalogue, and where they come from."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FABRIC", "NO_PEERS", "OVER_LINK", "PEERS", "Hardware"]

# How the devices of a node reach each other: over links of their own (NVLink, Infinity Fabric), over each one's link to
# the host (PCIe), or not at all: through host memory.
FABRIC, OVER_LINK, NO_PEERS = "fabric", "pcie", "none"
PEERS = (FABRIC, OVER_LINK, NO_PEERS)


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

    def changed(self, **fields: Any) -> Hardware:
        """The same machine with other figures, whose source is the caller."""
        sources = {**self.sources, **dict.fromkeys(fields, "given")}
        return dataclasses.replace(self, **fields, sources=sources)

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
