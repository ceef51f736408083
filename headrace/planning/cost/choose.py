"""Which method should a run take, what would help it most, and what would make it fit if nothing does?"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.planning.cost.forecast import Option, Run, forecast_of, option_of
from headrace.planning.cost.hardware import NO_PEERS, OVER_LINK, Hardware
from headrace.planning.cost.shape import ModelShape
from headrace.planning.cost.tiers import DEVICE_RESERVE, HOST_RESERVE
from headrace.planning.cost.wanted import Wanted, admitted
from headrace.planning.cost.work import Activations, Case, Method, Overlap, Place, Spread, Training, Work
from headrace.planning.text import decimal_text

_HELPS = 1.02  # times the tokens/s: a change that gains less is not named
_SIMPLER = 1.02  # a simpler method is taken when the best other one is not faster than this
_WEAR = 1.1  # a method that writes to the drive at each step has to be faster than this to be taken


@dataclass(frozen=True, kw_only=True)
class Help:
    """A change, and how many times faster each token is processed with it."""

    change: str
    gain: float


@dataclass(frozen=True, kw_only=True)
class Shortfall(Option):
    """Where nothing fits, the method that lacks least, and what would make it fit."""

    fixes: tuple[str, ...]


def options(
    shape: ModelShape,
    work: Work,
    spread: Spread,
    hardware: Hardware,
    overlap: Overlap,
    disk: bool = True,
    wanted: Wanted | None = None,
) -> list[Option]:
    """All methods that are `wanted`, the simplest first."""
    wanted, disk = wanted or {}, disk and hardware.disk_bytes > 0
    methods = list(_methods(work, overlap, wanted.get("cache", Place.DEVICE), disk=disk, alone=spread.data == 1))
    asked = admitted(methods, wanted, work.training)
    return [option_of(Case(shape, work, spread, method, hardware)) for method in asked]


def best_run(considered: list[Option]) -> Run | None:
    """The fastest method that fits; None when none fits. One that is simpler, or does not wear out the drive, is taken
    when it is nearly as fast.
    """
    fitting = [(place, option) for place, option in enumerate(considered) if not option.lacks]

    def weighed(option: Option, seconds: float) -> float:
        return seconds * (_WEAR if option.wears else 1.0)

    runs: dict[int, Run] = {}
    best = -1
    for place, option in sorted(fitting, key=lambda pair: (weighed(pair[1], pair[1].floor_seconds), pair[0])):
        # An option below this limit is enough faster than the best, or simpler and nearly as fast.
        limit = math.inf
        if runs:
            limit = weighed(runs[best], runs[best].seconds) * (_SIMPLER if place < best else 1 / _SIMPLER)
        if weighed(option, option.floor_seconds) < limit:
            runs[place] = forecast_of(option)
            if weighed(option, runs[place].seconds) < limit:
                best = place
    # Options passed over above may be simpler than the best one, and nearly as fast as the fastest.
    nearly = _SIMPLER * min((weighed(run, run.seconds) for run in runs.values()), default=0.0)
    for place, option in fitting:
        if place < best and weighed(option, option.floor_seconds) <= nearly:
            runs[place] = runs.get(place) or forecast_of(option)
            if weighed(option, runs[place].seconds) <= nearly:
                return runs[place]
    return runs.get(best)


def _methods(work: Work, overlap: Overlap, cache: Place, *, disk: bool, alone: bool) -> Iterator[Method]:
    """All methods, from no offloading to all of it. On a device that is `alone`, micro-batches may go together, and
    the `cache` of inference may leave.
    """
    training = work.training
    kept = [Activations.KEPT]
    states = [Place.DEVICE]
    if training is not Training.NONE:
        kept += [Activations.RECOMPUTED, Activations.OFFLOADED, *([Activations.SPILLED] if disk else [])]
        states += [Place.HOST] + ([Place.DISK] if disk else [])
    for weights in (Place.DEVICE, Place.HOST, *((Place.DISK,) if disk else ())):
        by_handle = alone and training is Training.NONE and weights is not Place.DEVICE
        if cache is not Place.DEVICE and not (by_handle and (disk or cache is Place.HOST)):
            continue
        for state in states:
            if training is Training.FULL and weights is not Place.DEVICE and state is Place.DEVICE:
                continue  # weights with homes on the host are updated there
            if training is Training.ADAPTER and state is Place.DISK:
                continue  # an adapter's state is too small to be worth a disk
            for activations in kept:
                own = Overlap.NONE if state is Place.DEVICE or training is Training.NONE else overlap
                method = Method(weights=weights, state=state, activations=activations, overlap=own, cache=cache)
                by_device = [Place.DEVICE] if state is not Place.DEVICE and (alone or method.streamed) else []
                for update in (Place.HOST, *by_device):
                    # A plain model on a device reads weights there at any time: nothing may be updated beside it.
                    beside = own if method.streamed or update is Place.HOST else Overlap.NONE
                    for together in _groups(work, method) if alone else (1,):
                        yield replace(method, together=together, update=update, overlap=beside)


def _groups(work: Work, method: Method) -> list[int]:
    """The numbers of micro-batches that may go through a block each time it is on the device."""
    if not method.streamed or work.training is Training.NONE or method.overlap is Overlap.BACKWARD:
        return [1]
    doubled = [2**power for power in range(work.micro_batches.bit_length())]
    return sorted({*doubled, work.micro_batches})


def orders(run: Run) -> dict[int, float]:
    """Seconds of the step by how many micro-batches go through a block together, if they fit; {}: no choice."""
    case, found = run.case, {}
    for together in _groups(case.work, run.method) if case.spread.data == 1 else ():
        if together == run.method.together:
            found[together] = run.seconds
        else:
            option = option_of(replace(case, method=replace(run.method, together=together)))
            found |= {} if option.lacks else {together: forecast_of(option).seconds}
    return found if len(found) > 1 else {}


def helps(run: Run, considered: Sequence[Option]) -> list[Help]:
    """What would speed the run up, most first: each change with the gain in tokens per second.

    `considered`: the options among which the run was chosen; smaller micro-batches may make another one the fastest.
    """
    found: list[Help] = []
    case = run.case
    work, hardware = case.work, case.hardware
    longest = max(run.busy_seconds, key=lambda lane: run.busy_seconds[lane])

    def consider(change: str, tokens: float = 1.0, **changed: Any) -> None:
        option = option_of(replace(case, **changed))
        seconds = tokens * run.seconds  # the step with the change takes at least its floor
        if option.lacks or seconds <= _HELPS * option.floor_seconds:
            return
        gain = seconds / forecast_of(option).seconds
        if gain > _HELPS:
            found.append(Help(change=change, gain=gain))

    def twice(*figures: str) -> Hardware:
        return hardware.changed(**{figure: 2 * getattr(hardware, figure) for figure in figures})

    if run.efficiency > 0.98:
        return []
    if case.trains:
        doubled = replace(work, batch_size=2 * work.batch_size)
        consider(f"twice the tokens in a micro-batch ({doubled.tokens:,})", 2.0, work=doubled)
        found += _in_smaller_batches(run, considered)
        if run.method.state is not Place.DEVICE and run.method.overlap is Overlap.NONE:
            beside = replace(run.method, overlap=Overlap.FORWARD)
            consider("the update beside the next forward (overlap)", method=beside)
    if longest in ("onload", "offload") or run.method.streamed:
        link = twice("onload_bytes_per_second", "offload_bytes_per_second")
        consider("a link of twice the rate", hardware=link)
        larger = hardware.changed(device_memory_bytes=hardware.device_memory_bytes * 3 // 2)
        consider("half as much device memory again", hardware=larger)
    if run.method.uses_disk:
        drives = twice("disk_read_bytes_per_second", "disk_write_bytes_per_second")
        consider("as many drives again", hardware=drives)
        on_host = run.method.without_disk()
        needed = _host_memory(option_of(replace(case, method=on_host)))
        enough = hardware.changed(host_memory_bytes=max(hardware.host_memory_bytes, needed))
        if hardware.unified:
            enough = enough.changed(device_memory_bytes=enough.host_memory_bytes)
        more = f"{decimal_text(needed, 4)} of host memory instead of the disk"
        consider(more, hardware=enough, method=on_host)
    if case.spread.nodes > 1:
        consider("a network of twice the rate", hardware=twice("node_bytes_per_second"))
    if run.sharing is not None and run.sharing.ranks > 1 and hardware.peer == NO_PEERS:
        reach = hardware.changed(peer=OVER_LINK, collective_bytes_per_second=hardware.onload_bytes_per_second)
        consider("peer access among the devices over PCIe", hardware=reach)
    if run.method.state is Place.HOST:
        faster = twice("dram_bytes_per_second", "update_bytes_per_second")
        consider("host memory of twice the rate", hardware=faster)
    return sorted(found, key=lambda help: -help.gain)


def _in_smaller_batches(run: Run, considered: Sequence[Option]) -> list[Help]:
    """The same step in twice as many micro-batches, by the method that is the fastest then.

    That helps where a whole micro-batch leaves no room for anything but a slow method.
    """
    work, method = run.case.work, run.method
    if work.batch_size % 2 or method.together > 1 or method.activations is Activations.KEPT:
        return []
    halved = replace(work, batch_size=work.batch_size // 2, micro_batches=2 * work.micro_batches)
    split = best_run([option_of(replace(option.case, work=halved)) for option in considered])
    if split is None or run.seconds <= _HELPS * split.seconds:
        return []
    how = "" if split.method == method else f", with {split.method.text(work.training)}"
    return [
        Help(
            change=f"{halved.micro_batches} micro-batches of {halved.tokens:,} tokens{how}",
            gain=run.seconds / split.seconds,
        )
    ]


def shortfall(considered: list[Option]) -> Shortfall:
    """The method that is too large for the fewest tiers, and lacks least there, with what would make it fit."""

    def lacking(option: Option) -> tuple[int, float]:
        hardware = option.case.hardware
        sizes = (hardware.device_memory_bytes, hardware.host_memory_bytes, hardware.disk_bytes)
        rooms = dict(zip(Place, sizes, strict=True))
        return len(option.lacks), max(lack / max(1.0, rooms[place]) for place, lack in option.lacks)

    closest = min(considered, key=lacking)
    work, hardware = closest.case.work, closest.case.hardware
    fixes = []
    for place, _ in closest.lacks:
        total = closest.tiers.total(place)
        if place is Place.DEVICE and hardware.unified:
            continue  # the host lacks that as well
        if place is Place.DEVICE:
            fixes.append(f"devices of {decimal_text(_up(total / (1 - DEVICE_RESERVE)), 4)}")
            if work.tokens > 1:
                fixes.append("fewer tokens in a micro-batch, and more micro-batches")
        elif place is Place.HOST:
            fixes.append(f"{decimal_text(_host_memory(closest), 4)} of host memory in the node")
            if not hardware.disk_bytes and closest.case.trains:
                fixes.append("a disk for the optimizer's state")
            if hardware.disk_bytes and closest.method.cache is Place.HOST:
                fixes.append("keys and values on disk (cache=disk in the method)")
        else:
            fixes.append(f"{decimal_text(_up(total * hardware.devices), 4)} of disk in the node")
    return Shortfall(**vars(closest), fixes=tuple(fixes))


def _host_memory(option: Option) -> int:
    """The host memory of a node in which the option fits."""
    return _up(option.tiers.needed(Place.HOST) * option.case.hardware.devices / (1 - HOST_RESERVE))


def _up(nbytes: float) -> int:
    """Bytes rounded up to sizes that are sold: whole gigabytes, and tens of them above 100."""
    unit = 10**10 if nbytes > 10**11 else 10**9
    return int(-(-nbytes // unit) * unit)
