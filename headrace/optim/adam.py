"""Which settings do Adam and AdamW have? Those of torch.optim, and where state and update live."""

from typing import Any, Unpack

import torch

from headrace.optim.optimizer import HostOptimizer
from headrace.optim.options import Given, Options
from headrace.optim.rules import AdamRule, adam_rule

__all__ = ["Adam", "AdamW"]


class AdamW(HostOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW with state and update in host memory, in one pass over it on every core.

    float32 parameters change bit for bit as with `torch.optim.AdamW(fused=True)` on the CPU. For bfloat16 and float16
    parameters, their float32 masters are updated, and the weight is the rounded master.

    Parameters may be those of a model given to `headrace.offload`, of a plain model on an accelerator (weights stay
    there; gradients come to the host and updated weights go back), or of a model on the CPU.

    - `master_dtype`: dtype of the masters of low-precision weights; torch.float32.
    - `master_form`: "split" keeps the 16 bits that a bfloat16 weight lacks (2 bytes per parameter; ties round up);
      "full" keeps a float32 tensor beside it (4 bytes, ties round to even). float16 weights are always "full",
      float32 weights are their own masters, with either.
    - `state_dtype`: dtype of the moments: torch.float32, or torch.bfloat16 with stochastic rounding, or "8bit": codes
      relative to the largest of each 128 elements, also rounded stochastically, 1.03 bytes per moment and element. In
      the state these are "exp_avg_8bit" and so on, of shape (runs, 132) and dtype torch.uint8. Tensors of fewer than
      4096 elements and those that are not contiguous keep float32. A state dict can be loaded into optimizers of
      headrace with any `state_dtype`, and from one with float32 into `torch.optim`.
    - `tier`: where the state rests: "host", or "disk", in a directory of its own inside `disk`; its files disappear
      with the process, so save checkpoints. Host memory then holds only a ring buffer of 192 MiB. `state_dict()`
      returns tensors that are read from disk when they are accessed. With a `device_fraction`, the rest of the state is
      on disk.
    - `device_fraction`: share of the state that lives and is updated on the accelerator of parameters that live there,
      in [0, 1], exact to a parameter; "auto" takes what is free after the first backward, less a tenth; nothing of an
      offloaded model, and of one on the CPU, where it means 0.
    - `pin`: host memory for such parameters is page-locked (or only that for their "weights", or for their
      "gradients"). `overlap_d2h_h2d`: their gradients and weights travel while others are updated. Neither says
      anything of an offloaded model, whose homes `headrace.offload` makes, or of one on the CPU.
    - `overlap`: what the updates of an offloaded model's parameters overlap with. "none": `step()` returns when all is
      done. "forward": `step()` returns at once; each block's next onload, and any code that reads its parameters, waits
      for that block's update. Always exact, clipping included. "backward": a block's update begins when its last
      gradient has reached the host; `step()` raises StateError if gradients were changed since (clipping, GradScaler,
      accumulation), or weights were written (by hand, by another optimizer's step before this one's). See
      docs/design/optimizers.md for what is waited for. A plain model on an accelerator is refused at the first
      `step()`; on the CPU its updates are done when that returns.
    - `max_grad_norm`: gradients are scaled so that their global norm is at most this, with the arithmetic of
      `torch.nn.utils.clip_grad_norm_` but without writing them; if the norm is not finite, the step is skipped, nothing
      changes, and `skipped_steps` goes up by one (in the stats of an offloaded model, too). With `math.inf` nothing is
      clipped, and only such steps are skipped.
    - `mesh`: a `DeviceMesh` of one dimension, over whose ranks gradients are averaged before `step()`, as by
      DistributedDataParallel (ZeRO-1). Whole parameters are dealt out to its ranks; each rank updates its own and keeps
      only their state, and all ranks get the updated weights. `step()` and `consolidate_state_dict()` are collectives;
      `state_dict()` has only this rank's state: save it with torch.distributed.checkpoint, or consolidate it first, as
      with torch.distributed.optim.ZeroRedundancyOptimizer. `load_state_dict()` takes the state of all ranks and keeps
      its own part. Not together with `overlap`.
    - `zero_stage`: 1, or 2: this optimizer averages gradients itself, without DistributedDataParallel, into those of
      their owners as backward goes on; the other ranks let go of theirs, whose `.grad` is one NaN in the parameter's
      shape then (ZeRO-2). Each backward averages, on all ranks; micro-batches are added up after that. All ranks get
      the first one's weights when the optimizer is made. Clip with `max_grad_norm`, and set gradients to None. Raises
      ValueError without `mesh` and for offloaded models, StateError for models in DistributedDataParallel, at `step()`
      for gradients that no backward has averaged, and for good after a backward that raised.

    Raises ValueError for settings that are not available and for parameters of two offloaded models, LayoutError for
    parameters that are not plain bytes (tensor subclasses, sparse, on meta), RuntimeError at `step()` for sparse or
    complex gradients.

    DTensors (FSDP2's `fully_shard`, tensor parallel) are accepted, without `mesh`: each rank updates its shards, state
    is sharded in the same way and saved with torch.distributed.checkpoint; `max_grad_norm` is the norm over all ranks.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[Given],
    ) -> None:
        super().__init__(
            params,
            options=Options.of(self, options),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=False,
        )

    def _rule(self, group: dict[str, Any], step: float) -> AdamRule:
        return adam_rule(group, step, decoupled=True)


class Adam(HostOptimizer, torch.optim.Adam):
    """torch.optim.Adam with state and update in host memory; the other settings are those of `headrace.optim.AdamW`."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[Given],
    ) -> None:
        super().__init__(
            params,
            options=Options.of(self, options),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=False,
        )

    def _rule(self, group: dict[str, Any], step: float) -> AdamRule:
        return adam_rule(group, step, decoupled=False)
