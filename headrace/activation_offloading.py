"""How are a model's activations offloaded? `offload_activations()` sets it up; the handle shows what was done."""

import os
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from torch import nn

from headrace.activations.calls import Calls, refuse_watched
from headrace.activations.decisions import Basis
from headrace.activations.passes import Passes
from headrace.activations.selection import Selection
from headrace.activations.selective import kept_values_go_to_hooks, offloaded_values_are_kept
from headrace.activations.stash import PURPOSE
from headrace.activations.targets import find_targets, named_layers
from headrace.config import ActivationConfig, Size, directory_of
from headrace.errors import StateError
from headrace.live import Handle
from headrace.memory.disk import DiskStore
from headrace.memory.ledger import Ledger, Tier
from headrace.memory.shared_budget import Share, current_budget
from headrace.planning import ActivationPlan
from headrace.report import ActivationStats, Report, Row, RunRecord, choice_rows, plan_rows
from headrace.runtime.device import resolve_device
from headrace.runtime.host import spare_host_bytes
from headrace.runtime.lanes import Lanes, open_lanes
from headrace.runtime.link import LaneUse
from headrace.runtime.spans import Moved, Waited
from headrace.runtime.threads import keeps_interrupts
from headrace.weights.passes.managed import site_of


def offload_activations(
    model: nn.Module,
    *,
    layers: int | Sequence[nn.Module | str] | None = None,
    fraction: float = 1.0,
    min_bytes: Size = "1MiB",
    modules: Sequence[nn.Module | str] | None = None,
    tier: Literal["host", "disk"] = "host",
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    disk: str | os.PathLike[str] | None = None,
    most_in_flight: int | None = None,
    all_leave: bool = False,
) -> "ActivationOffloading":
    """Offloads what autograd saves in forward to the host until backward. The model must be on its device.

    Results stay the same bit for bit. Copies begin when a tensor is saved, and the first step is recorded; from then on
    a plan says what leaves and when it comes back, so that compute waits as little as possible. Steps with inputs of
    other shapes keep to that plan's limit, and get a plan of their own when they recur. With gradient checkpointing,
    what the checkpoints keep is offloaded. Parameters and buffers never leave.

    - `layers`: offloads only what these save. Give an int N for the first N of the model's lists of layers, or modules
      and name patterns (fnmatch, such as "model.layers.*"). Default: whatever the model saves.
    - `fraction`: at most this share of the bytes leaves, 0 to 1: those that are saved first.
    - `min_bytes`: smaller tensors stay.
    - `modules`: only what is saved inside these modules or name patterns (such as "*.mlp") leaves. Calls inside
      compiled code are not seen, so name the module that was compiled.
    - `tier`: "host"; or "disk": tensors pass through a little host memory and rest in a file in the directory `disk`.
    - `device_memory`: ceiling in bytes for the saved tensors on the device, from the second step on, kept even if
      compute has to wait; only a computation under way may exceed it. Forwards that wait for their backwards together,
      as in a pipeline, share it. Default: as few bytes as possible without making compute wait.
    - `host_memory`: ceiling in bytes for the host memory. Default: what a `headrace.budget()` around this call leaves,
      or else the memory that is free on the machine and in the cgroup, less 15%.
    - `most_in_flight`: how many copies to the host may be under way at once. A tensor beyond that stays; if it has to
      leave to keep to `device_memory`, it waits. Default: the plan decides.
    - `all_leave`: offloads all that may leave, however slow the link is. Not together with `device_memory`.

    Returns the handle; as a context manager it calls `remove()` at the end. To offload weights and activations
    together, call `headrace.offload(model, activations=True)`.

    Raises ValueError and TypeError for invalid settings, StateError for a model whose activations or weights are
    offloaded already or a directory that is in use, and DiskError for a directory that cannot be used. The first
    forward that needs more than `host_memory` raises BudgetError.
    """
    config = ActivationConfig.of(
        layers=layers,
        fraction=fraction,
        min_bytes=min_bytes,
        modules=modules,
        device_memory=device_memory,
        host_memory=host_memory,
        most_in_flight=most_in_flight,
        tier=tier,
        all_leave=all_leave,
    )
    directory = directory_of(disk)
    if (tier == "disk") != (directory is not None):
        raise ValueError(f'tier={tier!r}, disk={disk!r}: with tier="disk", and only then, give a directory as disk')
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    for module in model.modules():
        if site_of(module) is not None:
            raise StateError(
                "the model's weights are offloaded already; offload both together:"
                " headrace.offload(model, activations=True)"
            )
    refuse_watched(model, " first")
    first = next(iter(model.parameters()), None)
    lanes = open_lanes(resolve_device(None if first is None else first.device))
    ledger = _ledger(lanes.device)
    find_targets(model, config)
    store = None if directory is None else DiskStore(directory, ledger, device=lanes.device)
    return ActivationOffloading(model, config, lanes, ledger, store)


def _ledger(device: torch.device) -> Ledger:
    """What counts the activations; within `headrace.budget(host_memory=...)`, as a part of that."""
    shared = current_budget()
    if shared is None or shared.host_bytes is None:
        return Ledger(host_budget_bytes=spare_host_bytes())
    ledger = Ledger(host_budget_bytes=shared.host_bytes)
    ledger.share = Share(shared, device, ledger)
    return ledger


class ActivationOffloading(Handle):
    """The handle on a model whose activations are offloaded. As a context manager it calls `remove()` at the end."""

    def __init__(
        self,
        model: nn.Module,
        config: ActivationConfig,
        lanes: Lanes,
        ledger: Ledger,
        store: DiskStore | None = None,
        shared: LaneUse | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._lanes = lanes
        self._shares = shared is not None  # lanes, ledger and store, with the weights
        self._removed = False
        self._ledger = ledger
        self._store = store
        self._passes = Passes(config, lanes, ledger, store, shared)
        self._meter, self._stash, self._plans = self._passes.meter, self._passes.stash, self._passes.plans
        if self._shares:
            self._stash.pool.reserve()
        layers, modules = find_targets(model, config)
        self._ends = [change.use(self) for change in (kept_values_go_to_hooks, offloaded_values_are_kept)]
        self._selection = Selection(model, lanes.device, config.min_bytes, layers, modules)
        watched = (*named_layers(model), *(layers or ()), *(modules or ()))
        self._calls = Calls(model, watched, self._passes, self._selection, self._check_device)

    # what it did ------------------------------------------------------------------------------------------------------
    @property
    def plan(self) -> ActivationPlan | None:
        """The plan that is being followed, or was followed last; None before the first backward is over."""
        return self._plans.last_plan

    def stats(self) -> ActivationStats:
        """What was moved and held since the beginning or the last `reset_stats()`. Waits for what is under way."""
        stall_seconds = self.stall_seconds()
        meter = self._meter
        return ActivationStats(
            host_held_bytes=self._stash.pool.held_bytes,
            host_bytes=self._ledger.held_bytes(Tier.HOST, PURPOSE),
            host_peak_bytes=self._ledger.peak_bytes(Tier.HOST, PURPOSE),
            host_locked_bytes=self._stash.pool.locked_bytes,
            device_peak_bytes=self._ledger.peak_bytes(Tier.DEVICE, PURPOSE),
            offload_bytes=meter.offload_bytes,
            onload_bytes=meter.onload_bytes,
            offloads=meter.offloads,
            onloads=meter.onloads,
            hits=meter.hits,
            demand_onloads=meter.demand_onloads,
            stall_seconds=stall_seconds,
            spill_bytes=meter.spill_bytes,
            fetch_bytes=meter.fetch_bytes,
            skipped=self._selection.skipped_kinds,
            pool_growths=self._stash.pool.grown,
            planned_forwards=meter.forwards[Basis.PLAN],
            similar_forwards=meter.forwards[Basis.SIMILAR],
            recorded_forwards=meter.forwards[Basis.NOTHING],
        )

    def stall_seconds(self) -> float:
        """How long compute waited, as in the stats. Waits for what is under way."""
        self._stash.guard(self._stash.settle, True)
        return self._meter.stall_seconds()

    def moved(self) -> list[Moved]:
        """The last copies in each direction, for a timeline."""
        return self._meter.moved()

    def waited(self) -> list[Waited]:
        """The last waits for copies, for a timeline."""
        return self._meter.last_waits()

    def reset_stats(self) -> None:
        """Resets counters and peaks."""
        self._meter.reset()
        self._ledger.reset_peaks()

    def summary(self) -> tuple[Row, ...]:
        """The stats by name, what the plan does with each kind of saved tensor and why, and what it advises."""
        rows, plan = self.stats().rows(), self.plan
        rows += [] if plan is None else plan_rows(plan)
        rows += choice_rows(self._passes.choices.fates)
        if plan is not None and plan.beyond_bytes:
            rows.append(("advice", ActivationStats.advice(plan.beyond_bytes, plan.recompute)))
        return tuple(rows)

    def report(self) -> Report:
        """The summary, and the last forwards with their backwards lane by lane: `print` it, or use its `to_html`,
        `to_png` or `to_trace` (Perfetto). If weights are offloaded, too, `report()` of their handle shows both."""
        return Report(
            RunRecord(
                device=str(self._lanes.device),
                made_at=time.strftime("%Y-%m-%d %H:%M"),
                stats=None,
                spans=tuple(self._meter.spans()),
                samples=(),
                planned=None,
                rates={},
                activations=self.summary(),
            )
        )

    # control ----------------------------------------------------------------------------------------------------------
    def remove(self) -> None:
        """Makes the model what it was before. A backward can still use what its forward has saved already."""
        self._calls.end()
        if self._removed:
            return
        self._removed = True
        for end in self._ends:
            end()
        closing = ExitStack()  # runs in reverse order; none of it refers to the stash itself
        if not self._shares:
            closing.callback(self._lanes.close, wait=False)
            if self._store is not None:
                closing.callback(self._store.close)
        if self._stash.sender is not None:
            closing.callback(self._stash.sender.shutdown, wait=self._shares)
        try:
            self._stash.guard(self._stash.settle)
        finally:
            if self._shares:
                closing.close()
            else:  # a backward may still come: the stash ends when nothing can ask for an activation any more
                weakref.finalize(self._stash, keeps_interrupts(closing.close))

    # calls ------------------------------------------------------------------------------------------------------------
    def forward(self) -> AbstractContextManager[None]:
        """A context that counts as one forward: what a loss function outside the model saves may leave, too.

        Write `with handle.forward(): loss = loss_function(model(inputs), targets)`, then `loss.backward()`. The forward
        begins with the first call of the model inside the context. It ends with the context, or when backward begins
        inside it; the next call of the model then begins the next forward. With `layers` or `modules`, only what is
        saved there leaves. Raises StateError inside another such context or inside a call of the model.
        """
        return self._calls.block()

    def together(self, inputs: Any) -> AbstractContextManager[None]:
        """A context for one forward of several calls of the model, which take turns; `inputs` are those of all."""
        return self._calls.together(inputs)

    def one_backward(self) -> AbstractContextManager[None]:
        """A context for one backward: backwards nested in it are parts of it."""
        return self._passes.one_backward()

    def _check_device(self) -> None:
        model = self._model()
        if model is None or self._shares:  # homes are on the host
            return
        devices = {parameter.device for parameter in model.parameters()}
        if devices and self._lanes.device not in devices:
            raise StateError(
                f"the model is on {devices.pop()}, but was on {self._lanes.device} when its activations were"
                " offloaded; call offload_activations() when the model is on its device"
            )
