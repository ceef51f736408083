"""How fast is common hardware? For planning without measuring; each figure with its source.

Sold figures are turned into reached ones in one place (`machine`), by stated shares. Where no source was found for a
figure it is left out, and a part that lacks one cannot be made into a machine without it being given.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from headrace.planning.cost.hardware import FABRIC, NO_PEERS, Hardware

__all__ = ["DEVICES", "DRIVES", "HOSTS", "MACHINES", "Device", "Drive", "Host", "machine", "nearest", "with_drives"]

Part = TypeVar("Part")

_GB, _TB = 10**9, 10**12

# What a run reaches of what is sold.
COMPUTE_SHARE = 0.6  # matrix products within a transformer's step, of the dense tensor peak
LINK_SHARE = 0.8  # page-locked copies of megabytes, of the link's raw rate (25 of 31.5 GB/s on PCIe 4); of networks
DRAM_SHARE = 0.75  # streams of reads and writes on all cores, of channels times rate
DISK_SHARE = 0.9  # direct reads and writes of megabytes, of the sequential rate

# What a transfer takes besides its bytes. Of memory and drives the middle of the range that the source gives: 50 to 80
# ns, 50 to 100 us, 100 to 200 us, and 5 to 15 ms, of which half a turn at 7,200 turns a minute is 4.16.
_LATENCIES = "https://www.techcompare.app/latency-visualizer/memory-latency-numbers"
_LINK_LATENCY = "https://www.cs.virginia.edu/~mwb7w/cuda_support/memory_transfer_overhead.html"
DRAM_LATENCY, LINK_LATENCY = 65e-9, 10e-6
NVME_LATENCY, SATA_LATENCY, HDD_LATENCY = 75e-6, 150e-6, 10e-3


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
    endurance_bytes: int
    latency_seconds: float
    duplex_share: float = 1.0  # of each rate while it is read and written: SATA carries one direction at a time
    sources: tuple[str, ...]


_PCIE = "https://gigagpu.com/pcie-gen4-vs-gen5-ai-inference/"
_GEN4, _GEN5 = 32e9, 64e9
_CARDS = "https://cuttingedgegamer.com/2022/12/"
_NVIDIA_TABLE = "https://jishuzhan.net/article/1872432607539499010"
_HOPPER = "https://glennklockwood.com/garden/processors/h100"
_BLACKWELL = "https://hmc-tech.com/gpus/nvidia-b200-vs-nvidia-gb200"
_NETWORK = "https://chippub.substack.com/p/disassembling-nvidias-16t-network"  # 200 Gb/s with A100, 400 with H100
_POD = "https://docs.nvidia.com/dgx-basepod/reference-architecture-infrastructure-foundation-enterprise-ai/latest/core-components.html"
# What hosts usually have in a slot, not a figure of theirs; such a network is one to give yourself.
_ASSUMED = {1.25e9: "assumed: 10 Gigabit Ethernet", 12.5e9: "assumed: 100 Gigabit Ethernet"}
_EPYC = "https://www.tomshardware.com/uk/news/amd-confirms-12-ddr5-memory-channels-on-genoa"

DEVICES = {
    "3090": Device(
        memory_bytes=24 * _GB,
        bytes_per_second=936.2e9,
        # The source lists 142 with sums in float16; sums in float32 run at half of that on this generation, as its
        # table for the 3090 Ti (160 and 80) says: https://hmc-tech.com/gpu/nvidia-geforce-rtx-4090-d-vs-nvidia-geforce-rtx-3090-ti
        flops_per_second=71e12,
        link_bytes_per_second=_GEN4,
        sources=(
            _CARDS,
            "https://holynerdvana.blogspot.com/2022/10/nvidia-geforce-rtx-3090-specifications.html",
            _PCIE,
        ),
    ),
    "4090": Device(
        memory_bytes=24 * _GB,
        bytes_per_second=1008e9,
        flops_per_second=165.2e12,
        link_bytes_per_second=_GEN4,
        sources=(_CARDS, "https://waredb.com/processor/nvidia-geforce-rtx-4090", _PCIE),
    ),
    "5090": Device(
        memory_bytes=32 * _GB,
        bytes_per_second=1792e9,
        # 838 is sold for FP16 with sparsity and sums in float16; a quarter is dense with sums in float32.
        flops_per_second=209.5e12,
        link_bytes_per_second=_GEN5,
        sources=("https://www.spheron.network/blog/nvidia-rtx-5090-specs/", _PCIE),
    ),
    "a100": Device(
        memory_bytes=80 * _GB,
        bytes_per_second=2039e9,
        flops_per_second=312e12,
        link_bytes_per_second=_GEN4,
        peer_bytes_per_second=300e9,
        network_bytes_per_second=25e9,
        sources=(_NVIDIA_TABLE, _PCIE, _NETWORK),
    ),
    "h100": Device(
        memory_bytes=80 * _GB,
        bytes_per_second=3350e9,
        flops_per_second=989.4e12,
        link_bytes_per_second=_GEN5,
        peer_bytes_per_second=450e9,
        network_bytes_per_second=50e9,
        sources=(_HOPPER, _NVIDIA_TABLE, _POD),
    ),
    "h200": Device(
        memory_bytes=141 * _GB,
        bytes_per_second=4800e9,
        flops_per_second=989.4e12,
        link_bytes_per_second=_GEN5,
        peer_bytes_per_second=450e9,
        network_bytes_per_second=50e9,
        sources=("https://www.saulelectric.com/nvidia-h200.html", _HOPPER, _POD),
    ),
    "b200": Device(
        memory_bytes=192 * _GB,
        bytes_per_second=7700e9,
        flops_per_second=2250e12,
        link_bytes_per_second=_GEN5,
        peer_bytes_per_second=900e9,
        network_bytes_per_second=50e9,
        sources=(_BLACKWELL, "https://wifitalents.com/nvidia-blackwell-statistics", _PCIE, _POD),
    ),
    "gh200": Device(
        memory_bytes=96 * _GB,
        bytes_per_second=4000e9,
        flops_per_second=989.4e12,
        link_bytes_per_second=450e9,
        sources=(
            "https://www.emergentmind.com/topics/gh200-superchip",
            "https://spheron.network/blog/nvidia-gh200-guide",
        ),
    ),
    "mi300x": Device(
        memory_bytes=192 * _GB,
        bytes_per_second=5300e9,
        flops_per_second=1300e12,
        link_bytes_per_second=_GEN5,
        peer_bytes_per_second=448e9,
        sources=(
            "https://www.emergentmind.com/topics/amd-mi300x-gpu",
            "https://www.jaredwatkins.com/research/ai-accelerators/amd-instinct/mi300-series/",
            "https://gpu.blog/gpus/instinct-mi300x-mi300x",
        ),
    ),
    # Sources disagree on its memory (32 to 64 GB) and bandwidth (0.77 to 1.6 TB/s): the lowest of each that is stated.
    "910b": Device(
        memory_bytes=32 * _GB,
        bytes_per_second=768e9,
        flops_per_second=256e12,
        link_bytes_per_second=31.5e9,
        sources=(
            "https://jishuzhan.net/article/1872432607539499010",
            "https://www.oryoy.com/news/910b-suan-li-shi-duo-shao-jie-mi-hua-wei-sheng-teng-910b-xin-pian-de-xing-neng-can-shu-yu-shi-ji-sua.html",
        ),
    ),
}

HOSTS = {
    "desktop": Host(  # two channels of DDR5-5200 of 8 bytes: 83.2 GB/s
        memory_bytes=128 * _GB,
        dram_bytes_per_second=83.2e9,
        network_bytes_per_second=1.25e9,
        sources=("https://zaro.info/ryzen-memory-support/how-much-ram-can-a-ryzen-7-7800x3d-handle",),
    ),
    "server-ddr4": Host(
        memory_bytes=512 * _GB, dram_bytes_per_second=204.8e9, network_bytes_per_second=12.5e9, sources=(_EPYC,)
    ),
    "server-2xddr4": Host(  # two sockets of eight channels of DDR4-3200, as a server that had eight 4090s
        memory_bytes=512 * _GB,
        dram_bytes_per_second=2 * 204.8e9,
        network_bytes_per_second=12.5e9,
        sources=("https://blog.chlc.cc/p/rtx4090-gpudirect-p2p-unlocked", _EPYC),
    ),
    "server-ddr5": Host(  # two sockets
        memory_bytes=2 * _TB,
        dram_bytes_per_second=2 * 460.8e9,
        network_bytes_per_second=12.5e9,
        sources=(_EPYC,),
    ),
    "grace": Host(
        memory_bytes=480 * _GB,
        dram_bytes_per_second=500e9,
        network_bytes_per_second=12.5e9,
        sources=("https://www.emergentmind.com/topics/gh200-superchip",),
    ),
}

DRIVES = {
    "nvme-gen4": Drive(
        disk_bytes=2 * _TB,
        read_bytes_per_second=7.45e9,
        write_bytes_per_second=6.9e9,
        endurance_bytes=1200 * 10**12,
        latency_seconds=NVME_LATENCY,
        sources=("https://visualfoodie.com/understanding-samsung-990-pro-specifications",),
    ),
    "nvme-gen5": Drive(
        disk_bytes=2 * _TB,
        read_bytes_per_second=12.4e9,
        write_bytes_per_second=11.8e9,
        endurance_bytes=1200 * 10**12,
        latency_seconds=NVME_LATENCY,
        sources=("https://www.gamingpcbuilder.com/product/crucial-t700/",),
    ),
    "sata": Drive(  # the interface is the limit
        disk_bytes=2 * _TB,
        read_bytes_per_second=560e6,
        write_bytes_per_second=530e6,
        endurance_bytes=1200 * 10**12,
        latency_seconds=SATA_LATENCY,
        duplex_share=0.5,
        sources=("https://www.tomshardware.com/uk/news/samsung-announces-870-evo",),
    ),
    "hdd": Drive(  # on its outer tracks; about half of it on the inner ones
        disk_bytes=18 * _TB,
        read_bytes_per_second=270e6,
        write_bytes_per_second=270e6,
        endurance_bytes=0,
        latency_seconds=HDD_LATENCY,
        duplex_share=0.5,
        sources=(
            "https://computerbase.de/2022-11/seagate-exos-2x18-erste-hdd-mit-550-mb-s-dank-dual-aktor-mach-2-enthuellt",
        ),
    ),
}


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
