"""How does the plan of a run read? Plain text: the recommendation, the tiers, the lanes, a time line, what helps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.formulas import WEIGHTS_RATIO
from headrace.planning.cost.decoding import Decoding, DecodingRate
from headrace.planning.cost.forecast import SIMULATED_MICRO_BATCHES, Run
from headrace.planning.cost.lanes import CostLane
from headrace.planning.cost.packing import mean_read_share
from headrace.planning.cost.run_plan import RunPlan
from headrace.planning.cost.work import Place, Training
from headrace.planning.text import columns, decimal_text, seconds_text

__all__ = ["compare_text", "run_plan_text"]

NOT_RUN = "headrace does not run this yet"
_LINE = 72  # columns of the time line
_NOTICED = 0.05  # of a lane's time: latency
_SHOWN = 4  # stalls and helps
_BOUND = 0.85  # of a step: what is in use for longer bounds it
_TOLD_SHARE = 0.99  # of the bytes on disk: if more is read, as few weights are packed, nothing is told
_USED = 0.1  # what is in use for less is not told
_RESOURCES = {
    "onload": "the link to the device",
    "offload": "the link from the device",
    "update": "the update on the host",
    "fetch": "the disk (reading)",
    "spill": "the disk (writing)",
    "collective": "the links among devices",
    "network": "the network",
}


def run_plan_text(plan: RunPlan) -> str:
    """The plan as text."""
    lines = [*_head(plan), "", *_tiers(plan)]
    if plan.run is None:
        lines += ["", *_missing(plan)]
    else:
        lines += ["", *_lanes(plan.run), "", *_time_line(plan, plan.run), "", *_closing(plan, plan.run)]
        lines += [] if plan.decoding is None else ["", *_decoding(plan.decoding)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def compare_text(plans: Sequence[tuple[str, RunPlan]]) -> str:
    """Several plans side by side: one row each."""
    rows: list[tuple[str, ...]] = [("plan", "strategy", "step", "tokens/s", "efficiency", "device", "host", "disk")]
    for name, plan in plans:
        tiers = [decimal_text(plan.tiers.total(place)) for place in Place]
        strategy = plan.method.text(plan.work.training)
        if plan.run is None:
            lacks = ", ".join(
                f"{place.value} lacks {decimal_text(plan.tiers.short(place))}"
                for place in Place
                if plan.tiers.short(place)
            )
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
    degrees = [f"data {spread.data}"] if spread.data > 1 else []
    if spread.nodes > 1:
        degrees.append(f"on {spread.nodes} nodes")
    if spread.zero_stage:
        degrees.append(f"ZeRO stage {spread.zero_stage}")
    over = f", {', '.join(degrees)}" if degrees else ""
    lines = [
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
    """What is in use for most of the step, and how much of it the others are."""
    used = sorted(run.in_use.items(), key=lambda item: -item[1])
    shares = [f"{_RESOURCES.get(name, name)} {share:.0%}" for name, share in used if share >= _USED]
    if not shares or used[0][1] < _BOUND:
        return f"nothing alone: of the step {', '.join(shares) or 'nothing takes a tenth'}"
    others = f"; {', '.join(shares[1:])}" if shares[1:] else ""
    return f"{shares[0]} of the step{others}"


def _tiers(plan: RunPlan) -> list[str]:
    tiers = plan.tiers
    purposes = list(dict.fromkeys(held.purpose for held in tiers.held))
    rows = [("bytes per device", *(place.value for place in Place))]
    for purpose in purposes:
        cells = []
        for place in Place:
            nbytes = sum(h.nbytes for h in tiers.held if h.place is place and h.purpose == purpose)
            cells.append(decimal_text(nbytes) if nbytes else "")
        rows.append((purpose, *cells))
    rows.append(("in all", *(decimal_text(tiers.total(place)) for place in Place)))
    rows.append(("of", *(decimal_text(tiers.capacity[place]) for place in Place)))
    if not tiers.fits:
        rows.append(("lacks", *(decimal_text(tiers.short(place)) if tiers.short(place) else "" for place in Place)))
    return columns(rows, right=True)


def _lanes(run: Run) -> list[str]:
    rows = [("lane", "busy", "of the step", "moved", "floor")]
    for lane, busy in run.busy_seconds.items():
        floor = getattr(run.floors, f"{lane.value}_seconds")
        if not busy and not floor:
            continue
        moved = run.moved_bytes[lane]
        share = f"{busy / run.seconds:.0%}" if run.seconds else ""
        rows.append((lane.value, seconds_text(busy), share, decimal_text(moved) if moved else "", seconds_text(floor)))
    return columns(rows, right=True)


def _time_line(plan: RunPlan, run: Run) -> list[str]:
    """One step, a row for each lane: # busy more than half of the column's time, - busy less.

    A step is followed by others like it: what goes on beyond its end was under way at its begin, too.
    """
    step, columns = run.step, _LINE * len(run.visits.cycles)
    lines = [f"{_pictured(plan, run)}:"]
    for lane in CostLane:
        busy = [0.0] * columns
        for task, span in zip(step.tasks, step.spans, strict=True):
            if task.lane is not lane or span.end <= span.begin:
                continue
            first, last = span.begin / step.seconds * _LINE, span.end / step.seconds * _LINE
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
    if run.method.grouped(plan.work).micro_batches <= SIMULATED_MICRO_BATCHES:
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
        lines.append(f"hides     {lane} hides behind compute from {tokens:,.0f} tokens on")
    if plan.wear_steps is not None:
        lines.append(
            f"wear      {decimal_text(plan.written_bytes)} written to disk a step: the drives are guaranteed "
            f"{plan.wear_steps:,.0f} steps"
        )
    share = mean_read_share(plan.model, plan.work, plan.spread, run.method, plan.hardware)
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


def _decoding(decoding: Decoding) -> list[str]:
    """A token of each sequence: what moves, and how fast."""
    cut, cached = decoding.cut, ""
    if decoding.cache_bytes:
        cached = f", {decimal_text(decoding.cache_bytes)} of keys and values"
    lines = [f"decoding  {decoding.sequences} x {decoding.context:,} tokens of context{cached}"]
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
    if plan.shortfall is None:
        return []
    lines = [f"closest   {plan.method.text(plan.work.training)}"]
    for place, lack in plan.shortfall.lacks:
        lines.append(f"lacks     {decimal_text(lack)} of {place.value} memory for each device")
    lines += [f"would fit {fix}" for fix in plan.shortfall.fixes]
    return lines
