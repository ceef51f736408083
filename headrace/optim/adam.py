"""Which settings do Adam and AdamW have? Those of torch.optim, and where state and update live."""

from typing import Any, Unpack

import torch

from headrace.optim.optimizer import HostOptimizer
from headrace.optim.options import Given, Options
from headrace.optim.rules import AdamRule


class AdamW(HostOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW with its state in host memory, where all cores update it in one pass.

    float32 parameters change bit for bit as with `torch.optim.AdamW(fused=True)` on the CPU. bfloat16 and float16
    parameters have float32 masters: these are updated, and the weight is the rounded master (see `master_form`).

    Parameters may belong to a model given to `headrace.offload`, to a plain model on an accelerator (weights stay
    there; gradients come to the host and updated weights go back), or to a model on the CPU.

    - `master_dtype`: dtype of the masters of low-precision weights. Only torch.float32.
    - `master_form`: "split" keeps the 16 bits that a bfloat16 weight lacks (2 bytes per parameter; ties round up);
      "full" keeps a float32 tensor beside it (4 bytes; ties round to even). "none" keeps nothing: a step computes in
      float32 from the bfloat16 weight and rounds the result stochastically, so that small updates are not lost on
      average. Which way depends only on the step, the parameter's number and the element's place in it (of a shard that
      is cut along the first dimension: in the whole parameter), so threads, tiers, ranks and a resume change no bit.
      The state then counts steps; masters in a loaded state are dropped. With any form, float16 weights are "full", and
      float32 weights are their own masters.
    - `state_dtype`: dtype of the moments: torch.float32, torch.bfloat16 with stochastic rounding, or "8bit". "8bit"
      means codes relative to the largest of each 128 elements, also rounded stochastically: 1.03 bytes per moment and
      element. In the state these are "exp_avg_8bit" and so on, of shape (runs, 132) and dtype torch.uint8. Tensors of
      fewer than 4096 elements and tensors that are not contiguous keep float32. A state dict can be loaded into
      optimizers of headrace with any `state_dtype`; one with float32 moments can also be loaded into `torch.optim`.
    - `tier`: where the state rests: "host", or "disk", in a file without a name in `disk`. It disappears with the
      process, so save checkpoints. Host memory then holds only a ring buffer of 192 MiB. `state_dict()` returns tensors
      that are read from disk when they are accessed. With a `device_fraction`, the rest of the state is on disk.
    - `update`: what updates parameters: the "host", or the "device", the accelerator on which the model computes. With
      "device", state still rests in host memory or on disk. It goes to the accelerator and back piece by piece, as do
      the weights and gradients of an offloaded model. The bits are those of state that stays on the accelerator. The
      pieces take up to 48 MiB of device memory, or as much as the largest matrix of Muon and Adafactor needs; for an
      offloaded model, this is part of its `device_memory`, and BudgetError is raised if there is no room. Beside it,
      kernels take at most the size of the piece. `step()` raises ValueError if everything is on the CPU. Cannot be used
      together with `device_fraction`.
    - `device_fraction`: the share, in [0, 1], of the state that is kept and updated on the accelerator. It applies to
      parameters that live there, and is exact to a parameter. "auto" takes the memory that is free after the first
      backward, less a tenth. For an offloaded model, or one on the CPU, "auto" means 0.
    - `pin`: page-locks the host memory for parameters on an accelerator (or only that for their "weights", or for their
      "gradients"). `overlap_d2h_h2d`: gradients and weights of these parameters travel while others are updated.
      Neither has an effect on an offloaded model, whose host memory `headrace.offload` allocates, on a model on the
      CPU, or on state that the device updates (`update="device"`), which is always page-locked.
    - `overlap`: what the updates of an offloaded model's parameters overlap with. "none": `step()` returns when all is
      done. "forward": `step()` returns at once; each block's next onload, and any code that reads its parameters, waits
      for that block's update. This is always exact, even with clipping. "backward": a block's update begins when its
      last gradient has reached the host; `step()` raises StateError if gradients have changed since (by clipping,
      GradScaler or accumulation), or weights have been written (by hand, or by another optimizer's step before this
      one's). docs/design/optimizers.md says what waits for what. With a plain model on an accelerator, the first
      `step()` raises an error; with one on the CPU, updates are done when `step()` returns.
    - `max_grad_norm`: gradients are scaled so that their global norm is at most this, with the arithmetic of
      `torch.nn.utils.clip_grad_norm_` but without writing them; if the norm is not finite, the step is skipped, nothing
      changes, and `skipped_steps` goes up by one (in the stats of an offloaded model, too). With `math.inf`, nothing is
      clipped, but steps with a norm that is not finite are still skipped.
    - `mesh`: a `DeviceMesh` of one dimension (ZeRO-1). Gradients must be averaged over its ranks before `step()`, as
      DistributedDataParallel does. Each parameter is assigned to one rank, which updates it and alone keeps its state;
      all ranks get the updated weights. `step()` and `consolidate_state_dict()` are collectives. `state_dict()` has
      only this rank's state: save it with torch.distributed.checkpoint, or consolidate it first, as with
      torch.distributed.optim.ZeroRedundancyOptimizer. `load_state_dict()` takes the state of all ranks and keeps this
      rank's part. Cannot be used together with `overlap`.
    - `zero_stage`: 1 or 2. With 2 (ZeRO-2), this optimizer averages gradients itself during backward, without
      DistributedDataParallel. Only the rank that owns a parameter keeps its average; on other ranks `.grad` is then a
      NaN placeholder of the parameter's shape. Every backward averages over all ranks; the averages of micro-batches
      are added up. All ranks get the first rank's weights when the optimizer is made. Clip with `max_grad_norm`, and
      set gradients to None. Raises ValueError without `mesh` and for offloaded models. Raises StateError for models in
      DistributedDataParallel, and at `step()` for gradients that no backward has averaged. Once a backward has raised,
      every `step()` raises StateError.

    Raises ValueError for settings that are not available and for parameters of two offloaded models, LayoutError for
    parameters that are not plain bytes (tensor subclasses, sparse, on meta), and RuntimeError at `step()` for sparse or
    complex gradients.

    DTensors (FSDP2's `fully_shard`, tensor parallel) are accepted, without `mesh`: each rank updates its shards. The
    state is sharded in the same way, and saved with torch.distributed.checkpoint. `max_grad_norm` limits the norm over
    all ranks.
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
        own = Options.of(self, options)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=False, options=own)

    def _rule(self, group: dict[str, Any], step: float) -> AdamRule:
        return AdamRule.of(group, step, decoupled=True)


class Adam(HostOptimizer, torch.optim.Adam):
    """torch.optim.Adam with state and update in host memory. Other settings are those of `headrace.optim.AdamW`."""

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
        own = Options.of(self, options)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=False, options=own)

    def _rule(self, group: dict[str, Any], step: float) -> AdamRule:
        return AdamRule.of(group, step, decoupled=False)
