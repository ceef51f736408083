"""What did a run move and hold, in numbers?"""

from dataclasses import dataclass

from headrace.config import counted, format_bytes
from headrace.report.rows import Row, rows_text


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What was measured since the model was offloaded or since `reset_stats()`, in bytes and seconds.

    Device and host:

    - `device_peak_bytes`: the peak of what `device_budget_bytes` limits: managed weights on the device (resident,
      visiting and arriving), managed buffers, and the memory of an optimizer's updates (`update="device"`).
    - `device_gradient_peak_bytes`: the peak of gradients on their way out.
    - `host_bytes`, `host_peak_bytes`: all that the model's handle holds in host memory, now and at most, without what
      optimizers hold (`optimizer.held_bytes()`).
    - `host_locked_bytes`: the part of it that is page-locked now. `host_refused_bytes`: the part that the system
      refused to lock, so compute waits for its copies.
    - `disk_bytes`: the bytes held in headrace's own files on disk.

    Loads and waits:

    - `onload_bytes`: the bytes that went to the device, weights in `onloads` transfers. It includes gradients to which
      `forward_backward` adds.
    - `row_bytes`, `expert_bytes`: the parts of it that went as single rows of embedding tables, and as single experts.
    - `onload_packed_bytes`: the part of it that crossed the link packed, and became `onload_unpacked_bytes`.
    - `offload_bytes`: the gradients that left the device.
    - `fetch_bytes`, `spill_bytes`: the bytes read from disk, and written to disk.
    - `packed_bytes`: the part of `fetch_bytes` that was packed, and became `unpacked_bytes` of weights.
    - `demand_onloads`: the loads that were not planned, and came too late to be hidden.
    - `stall_seconds`: how long compute waited for blocks and activations. `compute_seconds`: the rest of the visits'
      time.

    Experts:

    - `expert_uses`: how often forward and backward used an expert. `expert_loads`: how many of these had to load it.
    - `expert_host_loads`: of the loads of experts that rest on disk, how many found the expert in host memory.
    - `expert_kept_bytes`: the bytes of such experts that went back to host memory when the device had no room for them.

    Caches of `offload_cache()` (in the bytes above, `device_peak_bytes` has the layers that are on the device):

    - `cache_bytes`, `cache_peak_bytes`: what they hold in host memory, now and at most.
    - `cache_onload_bytes`, `cache_offload_bytes`: the bytes that went to the device, and to the host.

    Steps, micro-batches and checkpoints:

    - `steps`: the optimizer steps over managed parameters.
    - `skipped_steps`: those that changed nothing because gradients were not finite (with `max_grad_norm` of one of
      headrace's optimizers).
    - `not_finite_steps`: those in which such an optimizer updated weights although gradients were not finite.
      `stats(wait_for_updates=False)` counts only updates that are over.
    - `micro_batches_together`, `micro_batches_in_turn`: the micro-batches of `forward_backward()` that went through the
      model together, and one after the other, as a warning says.
    - `saved_bytes`: the bytes of checkpoints written. `save_seconds`: the time that this took; with `wait=False` most
      of it overlaps with training. `save_wait_seconds`: how long training waited for it.
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
    cache_bytes: int = 0
    cache_peak_bytes: int = 0
    cache_onload_bytes: int = 0
    cache_offload_bytes: int = 0
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

    @property
    def expert_hit_share(self) -> float:
        """The share of expert uses for which the expert was on the device already; 0 when there were none."""
        return 1 - self.expert_loads / self.expert_uses if self.expert_uses else 0.0

    def rows(self) -> list[Row]:
        """Each number, with its name and its limit; without those of what did not happen."""
        size = format_bytes
        locked = size(self.host_locked_bytes)
        if self.host_refused_bytes:
            locked += f", {size(self.host_refused_bytes)} refused: compute waits for their copies"
        loads = f"{size(self.onload_bytes)} in {counted(self.onloads, 'load')}, {self.demand_onloads} on demand"
        if self.row_bytes:
            loads += f"; {size(self.row_bytes)} of it tables, by rows"
        if self.onload_packed_bytes:
            loads += (
                f"; {size(self.onload_packed_bytes)} of it packed, of {size(self.onload_unpacked_bytes)} of weights"
            )
        if self.expert_uses:
            loads += f"; {size(self.expert_bytes)} of it {counted(self.expert_loads, 'expert')}"
        kept = f"{self.expert_host_loads} of {counted(self.expert_loads, 'load')}; {size(self.expert_kept_bytes)}"
        packed = f"{size(self.packed_bytes)} of it were {size(self.unpacked_bytes)} of weights"
        steps = str(self.steps)
        if self.skipped_steps:
            steps += f", {self.skipped_steps} skipped: gradients were not finite"
        if self.not_finite_steps:
            steps += f", {self.not_finite_steps} took gradients that were not finite"
        ways = {"together": self.micro_batches_together, "one after the other": self.micro_batches_in_turn}
        saved = f"{size(self.saved_bytes)} in {self.save_seconds:.3f} s, updates waited {self.save_wait_seconds:.3f} s"
        moved_caches = self.cache_onload_bytes or self.cache_offload_bytes
        kept_any, moved = self.expert_kept_bytes or self.expert_host_loads, self.fetch_bytes or self.spill_bytes
        rows = [
            ("device weights, peak", f"{size(self.device_peak_bytes)} of {size(self.device_budget_bytes)}", True),
            ("device gradients, peak", size(self.device_gradient_peak_bytes), True),
            ("host memory, peak", size(self.host_peak_bytes), True),
            ("page-locked", locked, self.host_locked_bytes or self.host_refused_bytes),
            ("onloaded", loads, True),
            ("experts found there", f"{self.expert_hit_share:.1%} of {self.expert_uses} uses", self.expert_uses),
            ("  kept on the host", f"{kept} brought back for that", self.expert_uses and kept_any),
            ("offloaded", size(self.offload_bytes), True),
            ("caches in host memory, peak", size(self.cache_peak_bytes), self.cache_peak_bytes),
            (
                "caches moved",
                f"{size(self.cache_onload_bytes)} onloaded, {size(self.cache_offload_bytes)} offloaded",
                moved_caches,
            ),
            ("on disk", size(self.disk_bytes), self.disk_bytes),  # a checkpoint's files are not ours
            (
                "from and to disk",
                f"{size(self.fetch_bytes)} read, {size(self.spill_bytes)} written",
                self.disk_bytes or moved,
            ),
            ("packed on disk", packed, self.packed_bytes),
            ("compute", f"{self.compute_seconds:.3f} s", True),
            ("stall", f"{self.stall_seconds:.3f} s ({self.stall_share:.1%})", True),
            ("optimizer steps", steps, True),
            ("micro-batches", ", ".join(f"{count} {how}" for how, count in ways.items() if count), any(ways.values())),
            ("checkpoints", f"{saved} for it", self.saved_bytes),
        ]
        return [(name, text) for name, text, has_happened in rows if has_happened]

    def to_text(self) -> str:
        """The numbers as a small table, each measured number beside its limit."""
        return rows_text(self.rows())
