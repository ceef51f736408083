"""What does PyTorch's GradScaler leave out? It does not wait for a copy of its scale, and its writes leave no trace.

`torch.amp.GradScaler` keeps its scale on the loss's device and unscales gradients where they are. For gradients on the
CPU, such as those of homes, it copies the scale from an accelerator with `non_blocking=True` and uses it at once, when
the memory may still hold something else. Here, the copy is waited for. It also unscales gradients in place without a
new `_version`; here, they get one. And where each rank has gradients that the others lack (`zero_stage=2`), the
optimizer has each rank unscale its own, and all ranks skip a step that one of them cannot take.
"""

from functools import partial
from typing import Any

import torch
from torch.amp import grad_scaler

from headrace.runtime.process_wide import Method, patched
from headrace.runtime.tensors import parameters_of


@patched(lambda: grad_scaler._MultiDeviceReplicator, "get")
def grad_scaler_waits(get: Method) -> Method:
    """Relies on `get` copying `master` to a device, and handing out the copy before it is complete."""

    def get_arrived(self: Any, device: torch.device) -> torch.Tensor:
        copied: torch.Tensor = get(self, device)
        if copied.device.type == "cpu" and self.master.device.type != "cpu":
            torch.accelerator.current_stream(self.master.device).synchronize()
        return copied

    return get_arrived


@patched(lambda: grad_scaler.GradScaler, "_unscale_grads_")
def grad_scaler_leaves_traces(unscale: Method) -> Method:
    """Relies on `unscale` being the method that writes gradients in place, with the optimizer as first argument."""

    def unscale_with_traces(self: Any, optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
        alone, together = partial(unscale, self, optimizer, *arguments), getattr(optimizer, "_unscale_together", None)
        found = alone() if together is None else together(alone)
        held = [parameter.grad for parameter in parameters_of(optimizer)]
        torch.autograd.graph.increment_version([gradient for gradient in held if gradient is not None])
        return found

    return unscale_with_traces
