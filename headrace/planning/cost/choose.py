"""Which method should a run take, what would help it most, and what would make it fit if nothing does?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.planning.cost.forecast import Run, outline_of, run_of
from headrace.planning.cost.hardware import NO_PEERS, OVER_LINK, Hardware
from headrace.planning.cost.shape import ModelShape
from headrace.planning.cost.tiers import DEVICE_RESERVE, HOST_RESERVE, Tiers
from headrace.planning.cost.wanted import Wanted
from headrace.planning.cost.work import Activations, Method, Overlap, Place, Spread, Training, Work
from headrace.planning.text import decimal_text

__all__ = ["Help", "Option", "Shortfall", "best_run", "helps", "options", "shortfall"]

_SIMPLER = 1.02  # a simpler method is taken when the best other one is not faster than this


@dataclass(frozen=True, kw_only=True)
class Option:
    """A method that was considered: what it lacks (None: it fits), and a step time below which it cannot come."""

    method: Method
    lacks: tuple[tuple[Place, int], ...]
    floor_seconds: float
    tiers: Tiers


@dataclass(frozen=True, kw_only=True)
class Help:
    """A change, and how many times faster each token is processed with it."""

    change: str
    gain: float


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """Why nothing fits: the method that lacks least, what it lacks in bytes, and what would make it fit."""

    method: Method
    lacks: tuple[tuple[Place, int], ...]
    fixes: tuple[str, ...]
    tiers: Tiers


def options(
    shape: ModelShape,
    work: Work,
    spread: Spread,
    hardware: Hardware,
    overlap: Overlap,
    disk: bool = True,
    wanted: Wanted | None = None,
) -> list[Option]:
    """All methods that are `wanted`, the simplest first, each with what it lacks."""
    found = []
    methods = list(_methods(work, overlap, disk=disk and hardware.disk_bytes > 0, alone=spread.data == 1))
    for method in methods if wanted is None else wanted.of(methods, work.training):
        outline = outline_of(shape, work, spread, method, hardware)
        tiers, floors = outline.tiers, outline.floors
        lacks = tuple((place, tiers.short(place)) for place in Place if tiers.short(place))
        on_host = method.overlap is Overlap.NONE and method.state is not Place.DEVICE
        floor = floors.serial_update if on_host and work.training is not Training.NONE else floors.longest
        found.append(Option(method=method, lacks=lacks, floor_seconds=floor, tiers=tiers))
    return found


def best_run(shape: ModelShape, work: Work, spread: Spread, hardware: Hardware, considered: list[Option]) -> Run | None:
    """The fastest method that fits; a simpler one when it is nearly as fast. None when none fits."""
    order = {id(option): place for place, option in enumerate(considered)}
    best: tuple[int, Run] | None = None
    for option in sorted((o for o in considered if not o.lacks), key=lambda o: (o.floor_seconds, order[id(o)])):
        place = order[id(option)]
        if best is not None:
            # Neither faster than the best by enough, nor simpler and nearly as fast.
            limit = best[1].seconds * _SIMPLER if place < best[0] else best[1].seconds / _SIMPLER
            if option.floor_seconds >= limit:
                continue
        run = run_of(shape, work, spread, option.method, hardware)
        if (
            best is None
            or run.seconds < best[1].seconds / _SIMPLER
            or (place < best[0] and run.seconds < best[1].seconds * _SIMPLER)
        ):
            best = (place, run)
    return None if best is None else best[1]


def _methods(work: Work, overlap: Overlap, *, disk: bool, alone: bool) -> Iterator[Method]:
    """From nothing to everything. On a device that is `alone`, micro-batches may go together."""
    training = work.training
    kept = [Activations.KEPT]
    states = [Place.DEVICE]
    if training is not Training.NONE:
        kept += [Activations.RECOMPUTED, Activations.OFFLOADED, *([Activations.SPILLED] if disk else [])]
        states += [Place.HOST] + ([Place.DISK] if disk else [])
    for weights in (Place.DEVICE, Place.HOST, *((Place.DISK,) if disk else ())):
        for state in states:
            if training is Training.FULL and weights is not Place.DEVICE and state is Place.DEVICE:
                continue  # homes on the host are updated on the host
            if training is Training.ADAPTER and state is Place.DISK:
                continue  # an adapter's state is too small to be worth a disk
            for activations in kept:
                own = Overlap.NONE if state is Place.DEVICE or training is Training.NONE else overlap
                method = Method(weights=weights, state=state, activations=activations, overlap=own)
                for together in _groups(work, method) if alone else (1,):
                    yield replace(method, together=together)


def _groups(work: Work, method: Method) -> list[int]:
    """How many micro-batches may go through a block each time it is there."""
    if not method.streamed or work.training is Training.NONE or method.overlap is Overlap.BACKWARD:
        return [1]
    doubled = [2**power for power in range(work.micro_batches.bit_length())]
    return sorted({*doubled, work.micro_batches})


def orders(shape: ModelShape, work: Work, spread: Spread, hardware: Hardware, run: Run) -> dict[int, float]:
    """Micro-batches that go through a block together -> seconds of the step, as far as they fit; {}: no choice."""
    found = {}
    for together in _groups(work, run.method) if spread.data == 1 else ():
        method = replace(run.method, together=together)
        if together == run.method.together:
            found[together] = run.seconds
        elif outline_of(shape, work, spread, method, hardware).tiers.fits:
            found[together] = run_of(shape, work, spread, method, hardware).seconds
    return found if len(found) > 1 else {}


def helps(shape: ModelShape, work: Work, spread: Spread, hardware: Hardware, run: Run, overlap: Overlap) -> list[Help]:
    """What would speed the run up, most first: each change with the gain in tokens per second."""
    found: list[Help] = []
    longest = max(run.busy_seconds, key=lambda lane: run.busy_seconds[lane]).value

    def consider(change: str, other: Run | None, tokens: float = 1.0) -> None:
        if other is not None and run.seconds / other.seconds * tokens > 1.02:
            found.append(Help(change=change, gain=run.seconds / other.seconds * tokens))

    def again(machine: Hardware, doing: Work = work, method: Method = run.method) -> Run | None:
        fits = outline_of(shape, doing, spread, method, machine).tiers.fits
        return run_of(shape, doing, spread, method, machine) if fits else None

    def twice(*figures: str) -> Hardware:
        return hardware.changed(**{figure: 2 * getattr(hardware, figure) for figure in figures})

    if run.efficiency > 0.98:
        return []
    if work.training is not Training.NONE:
        doubled = replace(work, batch_size=2 * work.batch_size)
        consider(f"twice the tokens in a micro-batch ({doubled.tokens:,})", again(hardware, doubled), 2.0)
        if run.method.state is not Place.DEVICE and overlap is Overlap.NONE:
            beside = replace(run.method, overlap=Overlap.FORWARD)
            consider("the update beside the next forward (overlap)", again(hardware, method=beside))
    if longest in ("onload", "offload") or run.method.streamed:
        consider("a link of twice the rate", again(twice("onload_bytes_per_second", "offload_bytes_per_second")))
        larger = hardware.changed(device_memory_bytes=hardware.device_memory_bytes * 3 // 2)
        consider("half as much device memory again", again(larger))
    if run.method.uses_disk:
        drives = twice("disk_read_bytes_per_second", "disk_write_bytes_per_second")
        consider("as many drives again", again(drives))
        on_host = run.method.without_disk()
        total = outline_of(shape, work, spread, on_host, hardware).tiers.total(Place.HOST)
        needed = _up(total * hardware.devices / (1 - HOST_RESERVE))
        enough = hardware.changed(host_memory_bytes=max(hardware.host_memory_bytes, needed))
        consider(f"{decimal_text(needed, 4)} of host memory instead of the disk", again(enough, method=on_host))
    if spread.nodes > 1:
        consider("a network of twice the rate", again(twice("node_bytes_per_second")))
    if run.sharing is not None and run.sharing.ranks > 1 and hardware.peer == NO_PEERS:
        reach = hardware.changed(peer=OVER_LINK, collective_bytes_per_second=hardware.onload_bytes_per_second)
        consider("peer access among the devices over PCIe", again(reach))
    if run.method.state is Place.HOST:
        faster = twice("dram_bytes_per_second", "update_bytes_per_second")
        consider("host memory of twice the rate", again(faster))
    return sorted(found, key=lambda help: -help.gain)


def shortfall(hardware: Hardware, work: Work, considered: list[Option]) -> Shortfall:
    """The method that lacks something in the fewest tiers, and the least there; and what would make it fit."""

    def lacking(option: Option) -> tuple[int, float]:
        return len(option.lacks), max(lack / _room(hardware, place) for place, lack in option.lacks)

    closest = min(considered, key=lacking)
    fixes = []
    for place, _ in closest.lacks:
        total = closest.tiers.total(place)
        if place is Place.DEVICE:
            fixes.append(f"devices of {decimal_text(_up(total / (1 - DEVICE_RESERVE)), 4)}")
            if work.batch_size * work.sequence_length > 1:
                fixes.append("fewer tokens in a micro-batch, and more micro-batches")
        elif place is Place.HOST:
            fixes.append(
                f"{decimal_text(_up(total * hardware.devices / (1 - HOST_RESERVE)), 4)} of host memory in the node"
            )
            if not hardware.disk_bytes and work.training is not Training.NONE:
                fixes.append("a disk for the optimizer's state")
        else:
            fixes.append(f"{decimal_text(_up(total * hardware.devices), 4)} of disk in the node")
    return Shortfall(method=closest.method, lacks=closest.lacks, fixes=tuple(fixes), tiers=closest.tiers)


def _room(hardware: Hardware, place: Place) -> float:
    sizes = {
        Place.DEVICE: hardware.device_memory_bytes,
        Place.HOST: hardware.host_memory_bytes,
        Place.DISK: hardware.disk_bytes,
    }
    return max(1.0, sizes[place])


def _up(nbytes: float) -> int:
    """Rounded up to what is sold: whole gigabytes, tens of them from 100 on."""
    unit = 10**10 if nbytes > 10**11 else 10**9
    return int(-(-nbytes // unit) * unit)
