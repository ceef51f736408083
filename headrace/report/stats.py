"""What did a run move and hold, in numbers?"""

from dataclasses import dataclass

from headrace.config import counted, format_bytes
from headrace.report.rows import Row, rows_text

__all__ = ["Stats"]


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What was measured since the model was offloaded or since `reset_stats()`, in bytes and seconds.

    `device_peak_bytes` counts what `device_budget_bytes` limits: managed weights on the device (resident, visiting and
    arriving), managed buffers, and the memory of an optimizer's updates (`update="device"`).
    `device_gradient_peak_bytes` is the peak of gradients on their way out. `host_bytes` is all that the model's handle
    holds in host memory, without what optimizers hold (`optimizer.held_bytes()`). Of these, `host_locked_bytes` are
    page-locked now. `host_refused_bytes` should be, too, but the system refused, so compute waits for their copies.
    `demand_onloads` counts loads that were not planned, and came too late to be hidden. `stall_seconds` is how long
    compute waited for blocks and activations, and `compute_seconds` is the rest of the visits' time. `onload_bytes`
    went to the device, weights in `onloads` transfers: `row_bytes` of them as single rows of embedding tables, and
    `expert_bytes` as single experts. Gradients to which `forward_backward` adds more on the device count, too. Forward
    and backward used experts `expert_uses` times, and had to load the expert in `expert_loads` of these. For experts
    that rest on disk, `expert_host_loads` of the loads found the expert in host memory; `expert_kept_bytes` went back
    there from the device, which had no room for them any more. `offload_bytes` are gradients that left the device.
    `fetch_bytes` were read from disk, and `spill_bytes` were written there. Of the bytes read, `packed_bytes` were
    packed, and became `unpacked_bytes` of weights; of the bytes that crossed the link, `onload_packed_bytes` were
    packed, and became `onload_unpacked_bytes`. `steps` counts optimizer steps over managed parameters. `skipped_steps`
    of them changed nothing because gradients were not finite (with `max_grad_norm` of one of headrace's optimizers). In
    `not_finite_steps` of them, such an optimizer updated weights although gradients were not finite
    (`stats(wait_for_updates=False)` counts only updates that are over). In `forward_backward()`,
    `micro_batches_together` went through the model together, and `micro_batches_in_turn` one after the other, as a
    warning says. Checkpoints of `saved_bytes` were written in `save_seconds`. With `wait=False` most of that time
    overlaps with training; training waited `save_wait_seconds` for it.
    """

    device_peak_bytes: int
    device_budget_bytes: int
    device_gradient_peak_bytes: int
    host_bytes: int
    host_peak_bytes: int
    disk_bytes: int
    onload_bytes: int
    offload_bytes: int
    fetch_bytes: int
    spill_bytes: int
    onloads: int
    demand_onloads: int
    stall_seconds: float
    compute_seconds: float
    steps: int
    skipped_steps: int
    not_finite_steps: int
    host_locked_bytes: int = 0
    host_refused_bytes: int = 0
    packed_bytes: int = 0
    unpacked_bytes: int = 0
    onload_packed_bytes: int = 0
    onload_unpacked_bytes: int = 0
    row_bytes: int = 0
    expert_bytes: int = 0
    expert_loads: int = 0
    expert_uses: int = 0
    expert_host_loads: int = 0
    expert_kept_bytes: int = 0
    micro_batches_together: int = 0
    micro_batches_in_turn: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0
    save_wait_seconds: float = 0.0

    @property
    def stall_share(self) -> float:
        """Stall time as a share of stall and compute time; 0 when nothing was measured."""
        total = self.stall_seconds + self.compute_seconds
        return self.stall_seconds / total if total else 0.0

    def rows(self) -> list[Row]:
        """Each number, with its name and its limit."""
        loads = f"{counted(self.onloads, 'load')}, {self.demand_onloads} on demand"
        if self.row_bytes:
            loads += f"; {format_bytes(self.row_bytes)} of it tables, by rows"
        if self.onload_packed_bytes:
            weights = format_bytes(self.onload_unpacked_bytes)
            loads += f"; {format_bytes(self.onload_packed_bytes)} of it packed, of {weights} of weights"
        if self.expert_uses:
            loads += f"; {format_bytes(self.expert_bytes)} of it {counted(self.expert_loads, 'expert')}"
        return [
            (
                "device weights, peak",
                f"{format_bytes(self.device_peak_bytes)} of {format_bytes(self.device_budget_bytes)}",
            ),
            ("device gradients, peak", format_bytes(self.device_gradient_peak_bytes)),
            ("host memory, peak", format_bytes(self.host_peak_bytes)),
            *self._locked_rows(),
            ("onloaded", f"{format_bytes(self.onload_bytes)} in {loads}"),
            *self._expert_rows(),
            ("offloaded", format_bytes(self.offload_bytes)),
            *self._disk_rows(),
            ("compute", f"{self.compute_seconds:.3f} s"),
            ("stall", f"{self.stall_seconds:.3f} s ({self.stall_share:.1%})"),
            ("optimizer steps", str(self.steps) + self._skips()),
            *self._micro_batch_rows(),
            *self._save_rows(),
        ]

    @property
    def expert_hit_share(self) -> float:
        """The share of expert uses for which the expert was on the device already; 0 when there were none."""
        return 1 - self.expert_loads / self.expert_uses if self.expert_uses else 0.0

    def _expert_rows(self) -> list[Row]:
        if not self.expert_uses:
            return []
        rows = [("experts found there", f"{self.expert_hit_share:.1%} of {self.expert_uses} uses")]
        if self.expert_kept_bytes or self.expert_host_loads:
            found = f"{self.expert_host_loads} of {counted(self.expert_loads, 'load')}"
            rows.append(
                ("  kept on the host", f"{found}; {format_bytes(self.expert_kept_bytes)} brought back for that")
            )
        return rows

    def _locked_rows(self) -> list[Row]:
        refused = f", {format_bytes(self.host_refused_bytes)} refused: compute waits for their copies"
        locked = format_bytes(self.host_locked_bytes) + (refused if self.host_refused_bytes else "")
        return [("page-locked", locked)] if self.host_locked_bytes or self.host_refused_bytes else []

    def _micro_batch_rows(self) -> list[Row]:
        together, in_turn = self.micro_batches_together, self.micro_batches_in_turn
        found = [f"{together} together"] * bool(together)
        found += [f"{in_turn} one after the other"] * bool(in_turn)
        return [("micro-batches", ", ".join(found))] if found else []

    def _save_rows(self) -> list[Row]:
        waited = f"in {self.save_seconds:.3f} s, updates waited {self.save_wait_seconds:.3f} s for it"
        return [("checkpoints", f"{format_bytes(self.saved_bytes)} {waited}")] if self.saved_bytes else []

    def _disk_rows(self) -> list[Row]:
        moved = f"{format_bytes(self.fetch_bytes)} read, {format_bytes(self.spill_bytes)} written"
        if not (self.disk_bytes or self.fetch_bytes or self.spill_bytes):
            return []
        share = f"{format_bytes(self.packed_bytes)} of it were {format_bytes(self.unpacked_bytes)} of weights"
        packed = [("packed on disk", share)] if self.packed_bytes else []
        held = (
            [("on disk", format_bytes(self.disk_bytes))] if self.disk_bytes else []
        )  # a checkpoint's files are not ours
        return [*held, ("from and to disk", moved), *packed]

    def _skips(self) -> str:
        skipped = f", {self.skipped_steps} skipped: gradients were not finite" if self.skipped_steps else ""
        taken = f", {self.not_finite_steps} took gradients that were not finite" if self.not_finite_steps else ""
        return skipped + taken

    def to_text(self) -> str:
        """The numbers as a small table, each measured number beside its limit."""
        return rows_text(self.rows())
