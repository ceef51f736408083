"""What does PyTorch's GradScaler leave out? It does not wait for a copy of its scale, and its writes leave no trace.

`torch.amp.GradScaler` keeps its scale on the loss's device and unscales gradients where they are. For gradients on the
CPU, as those of homes, it copies the scale with `non_blocking=True` and computes with it at once: on an accelerator
that is what the memory held before. The copy is waited for here. And it unscales gradients in place without a new
`_version`; here they get one. The rest is PyTorch's own, and
all of it when nobody needs these two any more.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.amp import grad_scaler

from headrace.runtime.process_wide import Method, patched
from headrace.runtime.tensors import parameters_of

__all__ = ["make_grad_scaler_leave_traces", "make_grad_scaler_wait"]


def make_grad_scaler_wait(user: object) -> Callable[[], None]:
    """Scales that a GradScaler copies to the CPU have arrived when it reads them.

    Until what this returns is called; at the latest until `user` is gone.
    """
    return _waiting.use(user)


def make_grad_scaler_leave_traces(user: object) -> Callable[[], None]:
    """Gradients that a GradScaler unscales get a new `_version`; so long as above."""
    return _traces.use(user)


def _arrived(get: Method) -> Method:
    """Relies on `get` copying `master` to a device, and handing out the copy before it is complete."""

    def get_arrived(self: Any, device: torch.device) -> torch.Tensor:
        copied: torch.Tensor = get(self, device)
        if copied.device.type == "cpu" and self.master.device.type != "cpu":
            torch.accelerator.current_stream(self.master.device).synchronize()
        return copied

    return get_arrived


def _with_traces(unscale: Method) -> Method:
    """Relies on this being what writes gradients in place, given the optimizer first."""

    def unscale_with_traces(self: Any, optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
        found = unscale(self, optimizer, *arguments)
        held = [parameter.grad for parameter in parameters_of(optimizer)]
        torch.autograd.graph.increment_version([gradient for gradient in held if gradient is not None])
        return found

    return unscale_with_traces


_waiting = patched(lambda: grad_scaler._MultiDeviceReplicator, "get", _arrived)
_traces = patched(lambda: grad_scaler.GradScaler, "_unscale_grads_", _with_traces)
