"""What does the handle on an offloaded model tell of it? Stats, reports and timelines, from what was measured."""

import dataclasses
import os

import torch

from headrace.activation_offloading import ActivationOffloading
from headrace.ahead import probed_rates
from headrace.errors import StateError
from headrace.memory.ledger import Ledger, Tier
from headrace.planning import Plan
from headrace.report import Planned, Report, RunRecord, Stats
from headrace.runtime.ways import Way
from headrace.weights.meter import Meter
from headrace.weights.passes.steps import OptimizerSteps
from headrace.weights.rest.budgets import Budgets

__all__ = ["Observed"]


class Observed:
    """The part of the handle that tells what was moved and held."""

    activations: ActivationOffloading | None
    _device: torch.device
    _budgets: Budgets
    _ledger: Ledger
    _meter: Meter
    _steps: OptimizerSteps
    _way: Way | None  # None: one process

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed now, or was last; None before the first pass is over."""
        raise NotImplementedError

    def stats(self, *, wait_for_updates: bool = True) -> Stats:
        """What was moved and held since the beginning or the last `reset_stats()`. Waits for passes and updates."""
        stall_seconds, compute_seconds = self._meter.seconds()
        if self.activations is not None:  # whose waits are within the visits
            waited = min(compute_seconds, self.activations.stall_seconds())
            stall_seconds, compute_seconds = stall_seconds + waited, compute_seconds - waited
        return Stats(
            device_peak_bytes=self._ledger.budgeted_peak_bytes,
            device_budget_bytes=self._budgets.device_bytes,
            device_gradient_peak_bytes=self._ledger.peak_bytes(Tier.DEVICE, "gradients"),
            host_bytes=self._ledger.held_bytes(Tier.HOST),
            host_peak_bytes=self._ledger.peak_bytes(Tier.HOST),
            disk_bytes=self._ledger.held_bytes(Tier.DISK),
            onload_bytes=self._meter.onload_bytes,
            offload_bytes=self._meter.offload_bytes,
            fetch_bytes=self._meter.fetch_bytes,
            spill_bytes=self._meter.spill_bytes,
            onloads=self._meter.onloads,
            demand_onloads=self._meter.demand_onloads,
            stall_seconds=stall_seconds,
            compute_seconds=compute_seconds,
            steps=self._meter.steps,
            skipped_steps=self._meter.skipped_steps,
            not_finite_steps=self._steps.not_finite_steps(wait=wait_for_updates),
            **self._meter.others() | self._ledger.locked(),
        )

    def reset_stats(self) -> None:
        """Resets counters and peaks."""
        self._meter.reset()
        self._steps.reset()
        self._ledger.reset_peaks()
        if self.activations is not None:
            self.activations.reset_stats()

    def report(self) -> Report:
        """The stats, and the last step against the plan: `print` it, or see its `to_html`, `to_png` and `to_trace`."""
        activations = self.activations
        moved, waited = ([], []) if activations is None else (activations.moved(), activations.waited())
        return Report(
            RunRecord(
                device=str(self._device),
                stats=self.stats(),
                spans=tuple(self._meter.spans(moved, waited)),
                samples=tuple(self._meter.samples()),
                planned=None if self.plan is None else Planned(**dataclasses.asdict(self.plan.predicted)),
                rates=probed_rates(self._device),
                activations=() if activations is None else activations.summary(),
                ranks=() if self._way is None else (self._way.row,),
            )
        )

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Writes the last cycle as a Chrome trace (chrome://tracing, Perfetto): visits, stalls and copies by lane.

        Raises StateError before the first cycle is over, OSError when the file cannot be written.
        """
        report = self.report()
        if not report.record.spans:
            raise StateError("no pass over the model is complete yet, so there is no timeline; run a step first")
        report.to_trace(path)
