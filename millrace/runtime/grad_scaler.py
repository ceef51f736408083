"""What does PyTorch's GradScaler leave out? It does not wait for a copy of its scale, and its writes leave no trace.

`torch.amp.GradScaler` keeps its scale on the loss's device and unscales gradients where they are. For gradients on the
CPU, as those of homes, it copies the scale with `non_blocking=True` and computes with it at once: on an accelerator
that is what the memory held before. The copy is waited for here. And it unscales gradients in place without a new
`_version`; here they get one. The rest is PyTorch's own.
"""

from typing import Any

import torch
from torch.amp import grad_scaler

__all__ = ["make_grad_scaler_leave_traces", "make_grad_scaler_wait"]

_replicator: Any = grad_scaler._MultiDeviceReplicator
_get = _replicator.get
_scaler: Any = grad_scaler.GradScaler
_unscale = _scaler._unscale_grads_


def make_grad_scaler_wait() -> None:
    """From now on scales that a GradScaler copies to the CPU have arrived when it reads them."""
    _replicator.get = _get_arrived


def make_grad_scaler_leave_traces() -> None:
    """From now on gradients that a GradScaler unscales get a new `_version`."""
    _scaler._unscale_grads_ = _unscale_with_traces


def _unscale_with_traces(self: Any, optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
    found = _unscale(self, optimizer, *arguments)
    held = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    torch.autograd.graph.increment_version([gradient for gradient in held if gradient is not None])
    return found


def _get_arrived(self: Any, device: torch.device) -> torch.Tensor:
    copied: torch.Tensor = _get(self, device)
    if copied.device.type == "cpu" and self.master.device.type != "cpu":
        torch.accelerator.current_stream(self.master.device).synchronize()
    return copied
