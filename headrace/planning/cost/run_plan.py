"""What does a plan of a run say? Everything that `headrace plan` prints, as frozen data."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, replace
from typing import Any

from headrace.formulas import codec_cores, wear_steps
from headrace.planning.cost.choose import Help, Option, Shortfall, best_run, helps, options, orders, shortfall
from headrace.planning.cost.decoding import Decoding, decoding_of
from headrace.planning.cost.floors import Floors, hiding_tokens
from headrace.planning.cost.forecast import Run
from headrace.planning.cost.hardware import Hardware, share_of
from headrace.planning.cost.lanes import CostLane
from headrace.planning.cost.shape import ModelShape
from headrace.planning.cost.tiers import Tiers
from headrace.planning.cost.traffic import traffic_of
from headrace.planning.cost.wanted import Wanted
from headrace.planning.cost.work import Method, Overlap, Spread, Training, Work

__all__ = ["RunPlan", "plan_run"]


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run planned before it starts, by `headrace.plan`. Bytes and seconds, per device unless stated otherwise.

    - `fits`: whether any method fits. If not, `shortfall` says by how much and what would help, and `run` is None.
    - `run`: the recommended method with its bytes by tier, floors, lanes and step time; `run.visits` is the plan of its
      visits, of the class that `handle.plan` has.
    - `options`: all methods that were considered, the simplest first; `helps`: what would speed it up most.
    - `orders`: how many micro-batches go through a block together (`handle.forward_backward(..., together=N)`) ->
      seconds of the step; only numbers that fit.
    - `decoding`: of inference on one device, what a token takes once the prompt has been read; None for other runs.
    """

    model: ModelShape
    work: Work
    spread: Spread
    hardware: Hardware
    run: Run | None
    options: tuple[Option, ...]
    helps: tuple[Help, ...]
    orders: dict[int, float]
    shortfall: Shortfall | None
    decoding: Decoding | None = None

    @property
    def fits(self) -> bool:
        return self.run is not None

    @property
    def tiers(self) -> Tiers:
        """Bytes by tier of the recommended method, or of the one that lacks least."""
        if self.run is not None:
            return self.run.tiers
        if self.shortfall is None:
            raise ValueError("neither a run nor a shortfall was found: please report this problem")
        return self.shortfall.tiers

    @property
    def method(self) -> Method:
        if self.run is not None:
            return self.run.method
        if self.shortfall is None:
            raise ValueError("neither a run nor a shortfall was found: please report this problem")
        return self.shortfall.method

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
        # headrace.optim with mesh= and zero_stage= does it, for replicas whose weights stay.
        by_optimizer = not self.method.streamed and self.method.overlap is Overlap.NONE
        if spread.zero_stage and spread.data > 1 and not by_optimizer:
            which = " of offloaded weights" if spread.zero_stage <= 2 and self.method.streamed else ""
            parts.append(f"ZeRO stage {spread.zero_stage} of {spread.data} replicas{which}")
        if self.method.host_share < 1 and self.method.overlap is not Overlap.NONE:
            parts.append(f"overlap={self.method.overlap.value!r} where the device has a share of the optimizer")
        if self.work.training is Training.FULL and any(b.weight_bits < 16 and b.trainable for b in self.model.blocks):
            parts.append("training weights of fewer than 16 bits (adapters beside them are trained)")
        return tuple(parts)

    @property
    def latency_share(self) -> dict[str, float]:
        """Lane of copies -> the share of its time that is latency; large when blocks are small."""
        if self.run is None:
            return {}
        step, hardware = self.run.step, self.hardware
        link, disk = hardware.link_latency_seconds, hardware.disk_latency_seconds
        latency = {CostLane.ONLOAD: link, CostLane.OFFLOAD: link, CostLane.FETCH: disk, CostLane.SPILL: disk}
        shares = {}
        for lane, seconds in latency.items():
            mine = [s for task, s in zip(step.tasks, step.spans, strict=True) if task.lane is lane and task.nbytes]
            busy = sum(span.end - span.begin for span in mine)
            shares[lane.value] = seconds * len(mine) / busy if busy else 0.0
        return shares

    @property
    def step_seconds(self) -> float | None:
        return None if self.run is None else self.run.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Of all replicas together."""
        if self.run is None:
            return None
        return self.work.tokens * self.work.micro_batches * self.spread.data / self.run.seconds

    @property
    def floors(self) -> Floors | None:
        return None if self.run is None else self.run.floors

    @property
    def hiding_tokens(self) -> dict[str, float]:
        """Lane -> tokens from which it hides behind compute."""
        traffic = traffic_of(self.model, self.work, self.spread, self.method, self.hardware)
        return hiding_tokens(traffic, self.model, self.work, self.method, share_of(self.hardware))

    @property
    def written_bytes(self) -> int:
        """To the node's disks in each step."""
        if self.run is None:
            return 0
        return self.run.moved_bytes[CostLane.SPILL] * self.hardware.devices

    @property
    def wear_steps(self) -> float | None:
        """Steps until the drives' guaranteed writes are used up; None when nothing is written, or that is not known."""
        if not self.written_bytes or not self.hardware.disk_endurance_bytes:
            return None
        return wear_steps(self.written_bytes, self.hardware.disk_endurance_bytes)

    @property
    def codec_cores(self) -> int:
        """Cores of the node that compression of what crosses to disk would take up to pay; 0 when nothing does."""
        if self.run is None:
            return 0
        moved, hardware = self.run.moved_bytes, self.hardware
        return codec_cores(
            read_rate=hardware.disk_read_bytes_per_second if moved[CostLane.FETCH] else 0.0,
            write_rate=hardware.disk_write_bytes_per_second if moved[CostLane.SPILL] else 0.0,
        )

    def to_text(self) -> str:
        """What `headrace plan` prints."""
        from headrace.planning.cost.run_text import run_plan_text

        return run_plan_text(self)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON. `docs/json.md` describes all keys, and says when `version` changes."""
        run = self.run
        return {
            "version": 1,
            "model": {
                "name": self.model.name,
                "parameters": self.model.parameters,
                "active_parameters": self.model.active_parameters,
                "trainable_parameters": self.model.trainable,
            },
            "hardware": json.loads(self.hardware.to_json()),
            "work": _plain(dataclasses.asdict(self.work)),
            "spread": dataclasses.asdict(self.spread),
            "fits": self.fits,
            "method": _plain(dataclasses.asdict(self.method)),
            "strategy": self.method.text(self.work.training),
            "runnable": not self.not_run,
            "not_run": list(self.not_run),
            "tiers": [
                {"tier": held.place.value, "purpose": held.purpose, "bytes": held.nbytes} for held in self.tiers.held
            ],
            "capacity_bytes": {place.value: nbytes for place, nbytes in self.tiers.capacity.items()},
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "efficiency": None if run is None else run.efficiency,
            "resident_fraction": None if run is None else run.resident_fraction,
            "floors_seconds": None if run is None else dataclasses.asdict(run.floors),
            "busy_seconds": None if run is None else {k.value: v for k, v in run.busy_seconds.items()},
            "moved_bytes": None if run is None else {k.value: v for k, v in run.moved_bytes.items()},
            "in_use": None if run is None else run.in_use,
            "sharing": None if run is None or run.sharing is None else dataclasses.asdict(run.sharing),
            "latency_share": None if run is None else self.latency_share,
            "hiding_tokens": {lane: n if math.isfinite(n) else None for lane, n in self.hiding_tokens.items()},
            "written_bytes_per_step": self.written_bytes,
            "wear_steps": self.wear_steps,
            "codec_cores": self.codec_cores,
            "helps": [dataclasses.asdict(help) for help in self.helps],
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
            "fixes": [] if self.shortfall is None else list(self.shortfall.fixes),
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

    `expert_hit_rate`: of the experts that decoding wants, the share that is there. Raises ValueError when no
    method is as wanted.
    """
    spread = spread or Spread()
    hardware = replace(hardware, devices=spread.ranks)  # those that are not used share nothing
    considered = options(model, work, spread, hardware, overlap, disk, wanted)
    run = best_run(model, work, spread, hardware, considered)
    decoding = None
    if run is not None:
        decoding = decoding_of(model, work, spread, run.method, hardware, run.tiers, expert_hit_rate)
    return RunPlan(
        model=model,
        work=work,
        spread=spread,
        hardware=hardware,
        run=run,
        options=tuple(considered),
        helps=() if run is None else tuple(helps(model, work, spread, hardware, run, overlap)),
        orders={} if run is None else orders(model, work, spread, hardware, run),
        shortfall=shortfall(hardware, work, considered) if run is None else None,
        decoding=decoding,
    )


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """Enums by their values."""
    return {key: getattr(value, "value", value) for key, value in fields.items()}
