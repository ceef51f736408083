"""Why may a GradScaler not read its scale at once? Because PyTorch copies it to the CPU without waiting for the copy.

`torch.amp.GradScaler` keeps its scale on the loss's device and unscales gradients where they are. For gradients on the
CPU, as those of homes, it copies the scale with `non_blocking=True` and computes with it at once: on an accelerator
that is what the memory held before. The copy is waited for here; the rest is PyTorch's own.
"""

from typing import Any

import torch
from torch.amp import grad_scaler

__all__ = ["make_grad_scaler_wait"]

_replicator: Any = grad_scaler._MultiDeviceReplicator
_get = _replicator.get


def make_grad_scaler_wait() -> None:
    """From now on scales that a GradScaler copies to the CPU have arrived when it reads them."""
    _replicator.get = _get_arrived


def _get_arrived(self: Any, device: torch.device) -> torch.Tensor:
    copied: torch.Tensor = _get(self, device)
    if copied.device.type == "cpu" and self.master.device.type != "cpu":
        torch.accelerator.current_stream(self.master.device).synchronize()
    return copied
