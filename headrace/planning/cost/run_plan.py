"""What does a plan of a run say? Everything that `headrace plan` prints, as frozen data."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from headrace.formulas import WEIGHTS_RATIO, codec_cores, wear_steps
from headrace.planning.cost.call import calls_of
from headrace.planning.cost.choose import Help, Shortfall, best_run, helps, options, orders, shortfall
from headrace.planning.cost.decoding import Decoding, DecodingRate, decoding_of
from headrace.planning.cost.floors import Floors, hiding_tokens
from headrace.planning.cost.forecast import SIMULATED_MICRO_BATCHES, Option, Run, planned
from headrace.planning.cost.hardware import Hardware
from headrace.planning.cost.lanes import CostLane
from headrace.planning.cost.packing import mean_read_share
from headrace.planning.cost.shape import BlockKind, ModelShape
from headrace.planning.cost.tiers import Tiers
from headrace.planning.cost.traffic import traffic_of
from headrace.planning.cost.wanted import Wanted
from headrace.planning.cost.work import Activations, Method, Overlap, Place, Spread, Training, Work
from headrace.planning.text import columns, decimal_text, seconds_text


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run as `headrace.plan` plans it before it starts. In bytes and seconds, per device unless stated otherwise.

    - `fits`: whether any method fits. If not, `shortfall` says by how much and what would help, and `run` is None.
    - `run`: the recommended method with its bytes by tier, floors, lanes and step time; `run.visits` is the plan of its
      visits, an object like `handle.plan`.
    - `options`: all methods that were considered, the simplest first.
    - `decoding`: for inference on one device, what a token takes once the prompt has been read. None for other runs.
    - `idle_devices`: the devices of a node that the run does not use.
    """

    model: ModelShape
    work: Work
    spread: Spread
    hardware: Hardware
    run: Run | None
    options: tuple[Option, ...]
    shortfall: Shortfall | None
    decoding: Decoding | None = None
    idle_devices: int = 0

    @property
    def fits(self) -> bool:
        return self.run is not None

    @property
    def _option(self) -> Option:
        """The recommended method, or the one that lacks least."""
        found = self.run or self.shortfall
        if found is None:
            raise ValueError("neither a run nor a shortfall was found: please report this problem")
        return found

    @cached_property
    def helps(self) -> tuple[Help, ...]:
        """What would speed the run up most. Each is a forecast of its own, made when somebody first asks."""
        return () if self.run is None else tuple(helps(self.run, self.options))

    @cached_property
    def orders(self) -> dict[int, float]:
        """The seconds of a step by how many micro-batches go through a block together
        (`handle.forward_backward(..., together=N)`). It has only numbers that fit. Forecast when somebody first asks.
        """
        return {} if self.run is None else orders(self.run)

    @property
    def tiers(self) -> Tiers:
        """Bytes by tier of the recommended method, or of the one that lacks least."""
        return self._option.tiers

    @property
    def method(self) -> Method:
        return self._option.method

    @property
    def not_run(self) -> tuple[str, ...]:
        """The parts of the plan that headrace simulates but cannot run yet; empty if it can run all of it."""
        spread = self.spread
        parts = []
        sharing = None if self.run is None else self.run.sharing
        if sharing is not None:
            helped = {one for one, of in ((sharing.gathered, sharing.loaded), (sharing.reduced, sharing.trained)) if of}
            if helped - {0} and (sharing.gathered, sharing.reduced) != (sharing.loaded, sharing.trained):
                parts += ["weights gathered among devices"] if sharing.gathered else []
                parts += ["gradients summed among devices"] if sharing.reduced else []
        # For replicas whose weights stay, headrace.optim does it with mesh= and zero_stage=.
        by_optimizer = not self.method.streamed and self.method.overlap is Overlap.NONE
        if spread.zero_stage and spread.data > 1 and not by_optimizer:
            which = " of offloaded weights" if self.method.streamed else ""
            parts.append(f"ZeRO stage {spread.zero_stage} of {spread.data} replicas{which}")
        if self.method.host_share < 1 and self.method.overlap is not Overlap.NONE:
            parts.append(f"overlap={self.method.overlap.value!r} where the device has a share of the optimizer")
        if self.work.training is Training.FULL and any(b.weight_bits < 16 and b.trainable for b in self.model.blocks):
            parts.append("training weights of fewer than 16 bits (adapters beside them are trained)")
        return tuple(parts)

    @property
    def latency_share(self) -> dict[str, float]:
        """For each lane of copies, the share of its time that is latency. It is large when blocks are small."""
        if self.run is None:
            return {}
        step, hardware = self.run.step, self.hardware
        link, disk = hardware.link_latency_seconds, hardware.disk_latency_seconds
        latency = {CostLane.ONLOAD: link, CostLane.OFFLOAD: link, CostLane.FETCH: disk, CostLane.SPILL: disk}
        shares = {}
        for lane, seconds in latency.items():
            mine = [task for task in step.tasks if task.lane is lane and task.nbytes]
            busy = sum(task.end - task.begin for task in mine)
            shares[lane.value] = seconds * len(mine) / busy if busy else 0.0
        return shares

    @property
    def step_seconds(self) -> float | None:
        return None if self.run is None else self.run.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all replicas together."""
        if self.run is None:
            return None
        return self.work.tokens * self.work.micro_batches * self.spread.data / self.run.seconds

    @property
    def floors(self) -> Floors | None:
        return None if self.run is None else self.run.floors

    @property
    def hiding_tokens(self) -> dict[str, float]:
        """For each lane, the number of tokens from which it hides behind compute."""
        option = self._option
        traffic = traffic_of(option.case, tables=option.tiers.tables, on_disk=option.tiers.on_disk)
        return hiding_tokens(traffic, option.case)

    @property
    def written_bytes(self) -> int:
        """Bytes written to the node's disks in each step."""
        if self.run is None:
            return 0
        return self.run.moved_bytes[CostLane.SPILL] * self.hardware.devices

    @property
    def wear_steps(self) -> float | None:
        """Steps until the drives' guaranteed writes are used up; None if nothing is written, or they are not known."""
        if not self.written_bytes or not self.hardware.disk_endurance_bytes:
            return None
        return wear_steps(self.written_bytes, self.hardware.disk_endurance_bytes)

    @property
    def codec_cores(self) -> int:
        """Cores that must do nothing else for compression of disk traffic to pay; 0 if there is no such traffic."""
        if self.run is None:
            return 0
        moved, hardware = self.run.moved_bytes, self.hardware
        return codec_cores(
            read_rate=hardware.disk_read_bytes_per_second if moved[CostLane.FETCH] else 0.0,
            write_rate=hardware.disk_write_bytes_per_second if moved[CostLane.SPILL] else 0.0,
        )

    def to_text(self) -> str:
        """What `headrace plan` prints."""
        return _text(self)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON. `docs/json.md` describes all keys, and says when `version` changes."""
        run, by_lane = self.run, ("busy_seconds", "moved_bytes", "in_use")
        return {
            "version": 1,
            "model": {
                "name": self.model.name,
                "parameters": self.model.parameters,
                "active_parameters": self.model.active_parameters,
                "trainable_parameters": self.model.trainable,
            },
            "hardware": json.loads(self.hardware.to_json()),
            "work": _plain(self.work),
            "spread": _plain(self.spread),
            "fits": self.fits,
            "method": _plain(self.method),
            "strategy": self.method.text(self.work.training),
            "runnable": not self.not_run,
            "not_run": list(self.not_run),
            "tiers": [
                {"tier": held.place.value, "purpose": held.purpose, "bytes": held.nbytes} for held in self.tiers.held
            ],
            "capacity_bytes": {place.value: nbytes for place, nbytes in self.tiers.capacity.items()},
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "efficiency": run and run.efficiency,
            "resident_fraction": run and run.resident_fraction,
            **{name: run and {str(lane): n for lane, n in getattr(run, name).items()} for name in by_lane},
            "floors_seconds": run and _plain(run.floors),
            "sharing": run and run.sharing and _plain(run.sharing),
            "latency_share": run and self.latency_share,
            "hiding_tokens": {lane: n if math.isfinite(n) else None for lane, n in self.hiding_tokens.items()},
            "written_bytes_per_step": self.written_bytes,
            "wear_steps": self.wear_steps,
            "codec_cores": self.codec_cores,
            "helps": [_plain(help) for help in self.helps],
            "orders": {str(together): seconds for together, seconds in self.orders.items()},
            "decoding": None if self.decoding is None else self.decoding.to_dict(),
            "options": [
                {
                    "strategy": option.method.text(self.work.training),
                    "lacks_bytes": {place.value: nbytes for place, nbytes in option.lacks},
                    "floor_seconds": option.floor_seconds,
                }
                for option in self.options
            ],
            "fixes": list(self.shortfall.fixes) if self.shortfall else [],
        }


def plan_run(
    model: ModelShape,
    hardware: Hardware,
    work: Work,
    spread: Spread | None = None,
    *,
    overlap: Overlap = Overlap.NONE,
    disk: bool = True,
    wanted: Wanted | None = None,
    expert_hit_rate: float | None = None,
) -> RunPlan:
    """The plan of `model` on `hardware`, by the fastest of all methods, or of those that are `wanted`.

    Where its device has no room for keys and values, these are planned on the host, or else on disk.
    `expert_hit_rate`: the share of the experts that decoding wants and finds on the device. Raises ValueError when no
    method is as wanted.
    """
    planned.cache_clear()
    spread, wanted = spread or Spread(), wanted or {}
    idle = max(0, hardware.devices - spread.ranks)
    hardware = replace(hardware, devices=spread.ranks)  # unused devices share nothing

    def plan_of(asked: Wanted) -> RunPlan:
        considered = options(model, work, spread, hardware, overlap, disk, asked)
        run = best_run(considered)
        return RunPlan(
            model=model,
            work=work,
            spread=spread,
            hardware=hardware,
            run=run,
            options=tuple(considered),
            shortfall=shortfall(considered) if run is None else None,
            decoding=None if run is None else decoding_of(run.case, run.tiers, expert_hit_rate),
            idle_devices=idle,
        )

    plan = plan_of(wanted)
    for place in (Place.HOST, Place.DISK):
        if plan.decoding is None or not plan.decoding.lacks_bytes or "cache" in wanted:
            break
        with suppress(ValueError):  # no such method
            other = plan_of({**wanted, "cache": place})
            plan = other if other.fits else plan
    return plan


def _plain(settings: object) -> dict[str, Any]:
    """The fields, with enums replaced by values."""
    return {key: getattr(value, "value", value) for key, value in vars(settings).items()}


# how it reads ---------------------------------------------------------------------------------------------------------
NOT_RUN = "headrace does not run this yet"
_LINE = 72  # columns of the time line
_NOTICED = 0.05  # latency is named from this share of a lane's time on
_SHOWN = 4  # at most this many stalls, and as many helps
_BOUND = 0.85  # what is in use for a larger share of the step bounds it
_TOLD_SHARE = 0.99  # packing is not named if a larger share of the bytes on disk is read
_USED = 0.1  # what is in use for a smaller share is not named
_RESOURCES = {
    "onload": "the link to the device",
    "offload": "the link from the device",
    "update": "the update on the host",
    "fetch": "the disk (reading)",
    "spill": "the disk (writing)",
    "collective": "the links among devices",
    "network": "the network",
}


def _text(plan: RunPlan) -> str:
    lines = [*_head(plan), "", *_tiers(plan)]
    if plan.run is None:
        lines += ["", *_missing(plan)]
    else:
        lines += ["", *_lanes(plan.run), "", *_time_line(plan, plan.run), "", *_closing(plan, plan.run)]
        lines += [] if plan.decoding is None else ["", *_decoding(plan.decoding, plan.method.cache)]
        calls = [] if plan.not_run else calls_of(plan.run)
        lines += ["", *(f"call      {call}" for call in calls)] if calls else []
    return "\n".join(line.rstrip() for line in lines) + "\n"


def compare_text(plans: Sequence[tuple[str, RunPlan]]) -> str:
    """Several plans side by side: one row each."""
    rows: list[tuple[str, ...]] = [("plan", "strategy", "step", "tokens/s", "efficiency", "device", "host", "disk")]
    for name, plan in plans:
        tiers = [decimal_text(plan.tiers.total(place)) for place in Place]
        strategy = plan.method.text(plan.work.training)
        if plan.run is None:
            lacks = ", ".join(f"{place.value} lacks {decimal_text(lack)}" for place, lack in plan._option.lacks)
            rows.append((name, f"does not fit: {lacks}", "", "", "", *tiers))
        else:
            speed = f"{plan.tokens_per_second:,.0f}"
            strategy += f" ({NOT_RUN})" if plan.not_run else ""
            rows.append((name, strategy, seconds_text(plan.run.seconds), speed, f"{plan.run.efficiency:.0%}", *tiers))
    return "\n".join(columns(rows)) + "\n"


def _head(plan: RunPlan) -> list[str]:
    model, work, spread = plan.model, plan.work, plan.spread
    unit, name = next((pair for pair in ((1e9, "B"), (1e6, "M")) if model.parameters >= pair[0]), (1e3, "K"))
    count = f"{model.parameters / unit:.3g}{name} parameters"
    if model.active_parameters < 0.95 * model.parameters:
        count += f", {model.active_parameters / 1e9:.3g}B of them active"
    if work.training is Training.ADAPTER:
        count += f", {model.trainable / 1e6:.3g}M trained in adapters"
    batches = f"{work.micro_batches} x " if work.micro_batches > 1 else ""
    tokens = f"{batches}{work.batch_size} x {work.sequence_length:,} tokens"
    over = f", data {spread.data}" if spread.data > 1 else ""
    over += f", on {spread.nodes} nodes" if spread.nodes > 1 else ""
    over += f", ZeRO stage {spread.zero_stage}" if spread.zero_stage else ""
    lines = []
    if plan.idle_devices:
        there = plan.hardware.devices + plan.idle_devices
        to_use = f"to use them all: --devices {there}, devices={there}"
        lines.append(f"idle      {plan.idle_devices} of {there} devices; {to_use}")
    lines += [
        f"model     {model.name}: {count}, {model.layers} layers, weights {decimal_text(model.weight_bytes)}",
        f"work      {work.training.value}: {tokens} a step{over}",
        f"hardware  {plan.hardware.name}: {decimal_text(plan.hardware.device_memory_bytes)} on each of "
        f"{plan.hardware.devices} device(s), {decimal_text(plan.hardware.host_memory_bytes)} of host memory, "
        f"{decimal_text(plan.hardware.disk_bytes)} of disk",
    ]
    if plan.run is None:
        lines.append("result    does not fit")
    else:
        lines.append(f"do        {plan.method.text(work.training)}")
        lines += [f"copies    {plan.run.sharing.text()}"] if plan.run.sharing is not None else []
        lines += [f"cannot    {NOT_RUN}, it is simulated: {', '.join(plan.not_run)}"] if plan.not_run else []
        lines.append(
            f"result    {seconds_text(plan.run.seconds)} a step, {plan.tokens_per_second:,.0f} tokens/s, "
            f"{plan.run.efficiency:.0%} of the speed of compute alone"
        )
        lines.append(f"bound by  {_bound(plan.run)}")
    return lines


def _bound(run: Run) -> str:
    """What is in use for most of the step, and the shares of the step for which the others are."""
    used = sorted(run.in_use.items(), key=lambda item: -item[1])
    shares = [f"{_RESOURCES.get(name, name)} {share:.0%}" for name, share in used if share >= _USED]
    if not shares or used[0][1] < _BOUND:
        return f"nothing alone: of the step {', '.join(shares) or 'nothing takes a tenth'}"
    others = f"; {', '.join(shares[1:])}" if shares[1:] else ""
    return f"{shares[0]} of the step{others}"


def _tiers(plan: RunPlan) -> list[str]:
    tiers = plan.tiers
    rows = [("bytes per device", *(place.value for place in Place))]
    for purpose in dict.fromkeys(held.purpose for held in tiers.held):
        cells = []
        for place in Place:
            nbytes = sum(h.nbytes for h in tiers.held if h.place is place and h.purpose == purpose)
            cells.append(decimal_text(nbytes) if nbytes else "")
        rows.append((purpose, *cells))
        if purpose == "activations" and (logits := _logits_bytes(plan)):
            rows.append(("  logits of them", decimal_text(logits), "", ""))
    rows.append(("in all", *(decimal_text(tiers.total(place)) for place in Place)))
    rows.append(("of", *(decimal_text(tiers.capacity[place]) for place in Place)))
    if lacks := dict(plan._option.lacks):
        rows.append(("lacks", *(decimal_text(lacks[place]) if place in lacks else "" for place in Place)))
    return columns(rows, right=True)


def _logits_bytes(plan: RunPlan) -> float:
    """The head's part of the activations on the device; 0 if a layer needs more, and the two are not there together."""
    case = plan._option.case.grouped()
    tokens, recomputed = case.work.tokens, case.method.activations is Activations.RECOMPUTED
    sizes = [(block.kind, block.activation_bytes(tokens)) for block in case.shape.blocks]
    head = sum(nbytes for kind, nbytes in sizes if kind is BlockKind.HEAD)
    if not case.trains:  # of last positions
        head = case.work.batch_size * sum(block.logit_bytes for block in case.shape.blocks)
    layer = max((nbytes for kind, nbytes in sizes if kind is not BlockKind.HEAD), default=0.0)
    beside = recomputed or not case.trains  # of a layer and the head, the larger one is there at a time
    return head if head > layer / (case.method.together if recomputed else 1) or not beside else 0.0


def _lanes(run: Run) -> list[str]:
    rows = [("lane", "busy", "of the step", "moved", "floor")]
    for lane, busy in run.busy_seconds.items():
        floor = getattr(run.floors, f"{lane}_seconds")
        if not busy and not floor:
            continue
        moved = run.moved_bytes[lane]
        share = f"{busy / run.seconds:.0%}" if run.seconds else ""
        rows.append((lane, seconds_text(busy), share, decimal_text(moved) if moved else "", seconds_text(floor)))
    return columns(rows, right=True)


def _time_line(plan: RunPlan, run: Run) -> list[str]:
    """One step, a row for each lane: # busy more than half of the column's time, - busy less.

    Steps follow each other, so a task that goes on beyond the end of the step is drawn at its beginning, too.
    """
    step, columns = run.step, _LINE * len(run.visits.cycles)
    lines = [f"{_pictured(plan, run)}:"]
    for lane in CostLane:
        busy = [0.0] * columns
        for task in step.tasks:
            if task.lane is not lane or task.end <= task.begin:
                continue
            first, last = task.begin / step.seconds * _LINE, task.end / step.seconds * _LINE
            for column in range(math.floor(first), math.floor(last) + 1):
                busy[column % columns] += max(0.0, min(last, column + 1) - max(first, column))
        busy = busy[:_LINE]
        if any(busy):
            marks = "".join("#" if share > 0.5 else "-" if share > 0.02 else " " for share in busy)
            lines.append(f"  {lane.value:<10}|{marks}|")
    return lines


def _pictured(plan: RunPlan, run: Run) -> str:
    """What the time line shows: the whole step, or the part of it that is simulated."""
    seconds = seconds_text(run.step.seconds)
    if run.case.grouped().work.micro_batches <= SIMULATED_MICRO_BATCHES:
        return f"one step of {seconds}"
    shown = SIMULATED_MICRO_BATCHES * run.method.together
    return f"one step with {shown} of its {plan.work.micro_batches} micro-batches, {seconds}"


def _closing(plan: RunPlan, run: Run) -> list[str]:
    lines = []
    if run.method.streamed:
        which = "other " if any(held.purpose == "experts" for held in run.tiers.held) else ""
        lines.append(f"resident  {run.resident_fraction:.0%} of the {which}weights stay on the device")
    for stall in sorted(run.step.stalls, key=lambda stall: -stall.seconds)[:_SHOWN]:
        lines.append(
            f"stall     {seconds_text(stall.seconds)}: {stall.name} waits for {stall.waited_for} ({stall.lane.value})"
        )
    for lane, share in plan.latency_share.items():
        if share > _NOTICED:
            lines.append(f"latency   {share:.0%} of the {lane} lane's time, not bytes: larger blocks would help")
    for lane, tokens in plan.hiding_tokens.items():
        lines.append(f"hides     {lane} behind compute, from {tokens:,.0f} tokens on")
    if plan.wear_steps is not None:
        lines.append(
            f"wear      {decimal_text(plan.written_bytes)} written to disk a step: the drives are guaranteed "
            f"{plan.wear_steps:,.0f} steps"
        )
    share = mean_read_share(run.case)
    if share < _TOLD_SHARE:
        lines.append(f"packed    weights that have come a few times are read in {share:.2f} of their bytes")
    if plan.codec_cores:
        lines.append(
            f"compress  raw: a codec ({WEIGHTS_RATIO} times smaller) pays only on more than {plan.codec_cores} cores"
            " that do nothing else"
        )
    if plan.orders:
        steps = ", ".join(f"{together} in {seconds_text(seconds)}" for together, seconds in plan.orders.items())
        lines.append(f"order     a step by how many micro-batches go through a block together: {steps}")
    for help in plan.helps[:_SHOWN]:
        lines.append(f"helps     {help.change}: {help.gain:.2f} times the tokens/s")
    return lines


def _decoding(decoding: Decoding, cache: Place) -> list[str]:
    """The lines about decoding: what moves for a token of each sequence, and how fast."""
    cut, cached = decoding.cut, ""
    if decoding.cache_bytes:
        where = {Place.DEVICE: "", Place.HOST: " in host memory", Place.DISK: " on disk"}[cache]
        cached = f", {decimal_text(decoding.cache_bytes)} of keys and values{where}"
    lines = [f"decoding  {decoding.sequences} x {decoding.context:,} tokens of context{cached}"]
    if decoding.lacks_bytes:
        lines.append(
            f"lacks     {decimal_text(decoding.lacks_bytes)} of device memory for keys and values, so this is out of"
            " reach; to let them rest in host memory: --method cache=host"
        )
    if decoding.disk_share:
        lines.append(f"on disk   {decoding.disk_share:.0%} of the weights; host memory has room for the others")
    if cut is None:
        whole = decoding.whole
        moved = f", {decimal_text(whole.onload_bytes)} moved for each" if whole.onload_bytes else ""
        return [*lines, f"writes    {whole.tokens_per_second:,.3g} tokens/s{moved}"]
    lines.append(
        f"experts   one by one: a token needs {cut.routed} of {cut.count} in each of {cut.layers} layers,"
        f" {decimal_text(cut.expert_bytes)} each"
    )
    if decoding.sequences > 1:
        lines.append(f"wanted    {decoding.wanted_experts:.3g} different ones of each layer, if routing is even")
    lines.append(
        f"room      for {cut.slots:,} of {cut.layers * cut.count:,} experts ({cut.held_share:.0%}) beside"
        f" {decimal_text(cut.other_room_bytes)} of {decimal_text(cut.other_bytes)} of other weights"
    )
    if 0 < decoding.experts_disk_share < 1:
        lines.append(
            f"          {1 - decoding.experts_disk_share:.0%} of the others are in host memory, if routing is even:"
            " those that the device gave up"
        )
    rows: list[tuple[str, ...]] = [("experts there", "moved a token", "from disk", "tokens/s")]

    def row(name: str, rate: DecodingRate) -> None:
        moved = [decimal_text(nbytes) if nbytes else "" for nbytes in (rate.onload_bytes, rate.fetch_bytes)]
        rows.append((name, *moved, f"{rate.tokens_per_second:,.3g}"))

    for rate in decoding.rates:
        row(f"{rate.hit_rate:.0%}", rate)
    if decoding.even is not None:
        row(f"even routing: {decoding.even.hit_rate:.0%}", decoding.even)
    if decoding.given is not None:
        row(f"as given: {decoding.given.hit_rate:.0%}", decoding.given)
    row("whole layers", decoding.whole)
    return [*lines, *("  " + line for line in columns(rows, right=True))]


def _missing(plan: RunPlan) -> list[str]:
    lines = [f"closest   {plan.method.text(plan.work.training)}"]
    for place, lack in plan._option.lacks:
        lines.append(f"lacks     {decimal_text(lack)} of {place.value} memory for each device")
    return [*lines, *(f"would fit {fix}" for fix in (plan.shortfall.fixes if plan.shortfall else ()))]
