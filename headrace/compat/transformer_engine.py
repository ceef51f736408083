"""How does code for TransformerEngine's or Megatron's CPU offloading of layers run here? With the import changed.

`with context: x = layer(x)`, then `x = sync(x)`, for each layer in turn. What differs is in
docs/coming_from/megatron.md.
"""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

import headrace
from headrace.activations.passes import Passes
from headrace.activations.saving import Forward, may_save, pop_left_over
from headrace.activations.selection import Selection
from headrace.activations.targets import named_layers
from headrace.compat.visiting import BLOCKS_ON_DEVICE, offload_some
from headrace.config import ActivationConfig, Size
from headrace.memory.ledger import Ledger
from headrace.runtime.autograd import in_backward
from headrace.runtime.device import resolve_device
from headrace.runtime.host import spare_host_bytes
from headrace.runtime.lanes import open_lanes

__all__ = ["get_cpu_offload_context", "offload_layers", "saving_settings"]

_MIN_BYTES = "512KiB"  # TransformerEngine has 256 Ki elements, counted here as bfloat16

Context = contextlib.AbstractContextManager[Any]
Sync = Callable[[torch.Tensor], torch.Tensor]


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: object = None,
    *,
    model: nn.Module | None = None,
    device_memory: Size | None = None,
    min_bytes: Size = _MIN_BYTES,
) -> tuple[Context, Sync]:
    """Returns a context for each layer's call and a function for its output. What the first layers save is offloaded.

    The first layers are 0 to `num_layers` - 1 of `model_layers`; 0 means off, and the last layer always stays. Several
    forwards may come before their backwards, and layers may be recomputed. If `model` is given, offloading is hooked
    into the model, and the context does nothing. `offload_weights` needs `model`, on the CPU: weights of the first
    layers then visit the device, and the others go there to stay. `device_memory` is a ceiling in bytes for saved
    tensors on the device; by default all that the first layers save leaves, however slow the link is. Tensors smaller
    than `min_bytes` stay. `double_buffering` and `retain_pinned_cpu_buffers` change nothing: the plan chooses the
    depth, and host memory is kept in any case.

    Raises ValueError for other numbers of layers, if there is nothing to offload, and for `manual_synchronization` and
    `offload_stream`. Also raises what `headrace.offload` and `offload_activations` raise.
    """
    if not enabled or (num_layers == 0 and model_layers >= 0):
        return contextlib.nullcontext(), _unchanged
    if not offload_activations and not offload_weights:
        raise ValueError("nothing is to be offloaded; set offload_activations or offload_weights")
    check_layers(num_layers, model_layers, "num_layers")
    for name, given in (("manual_synchronization", manual_synchronization), ("offload_stream", offload_stream)):
        if given:
            raise ValueError(f"{name} is not supported: headrace plans the copies, and has a lane for each direction")
    settings = saving_settings(device_memory, min_bytes)
    if model is not None:
        offload_layers(model, num_layers, settings, activations=offload_activations, weights=offload_weights)
        return contextlib.nullcontext(), _unchanged
    if offload_weights:
        raise ValueError("offload_weights needs the model whose weights are to visit the device; pass model=")
    context = _LayerContext(num_layers, model_layers, ActivationConfig.of(**settings))
    return context, context.sync


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def check_layers(num_layers: int, model_layers: int, setting: str) -> None:
    """Raises ValueError for a number of layers that cannot leave."""
    if not 0 <= num_layers < model_layers:
        raise ValueError(
            f"{setting}={num_layers} of {model_layers}: backward begins with the last layer, so that one stays; give 0"
            f" to {model_layers - 1}"
        )


def saving_settings(device_memory: Size | None, min_bytes: Size | None) -> dict[str, Any]:
    """Settings of `headrace.offload_activations` with which all saved tensors leave, unless there is a ceiling."""
    least = _MIN_BYTES if min_bytes is None else min_bytes
    return {"device_memory": device_memory, "min_bytes": least, "all_leave": device_memory is None}


def offload_layers(
    model: nn.Module, num_layers: int, settings: dict[str, Any], *, activations: bool, weights: bool
) -> headrace.Offloaded | headrace.ActivationOffloading:
    """Offloads what the first layers of `model` save, or their weights, or both."""
    settings = {**settings, "layers": num_layers}
    if not weights:
        return headrace.offload_activations(model, **settings)
    travelling = list(named_layers(model))[:num_layers]
    visiting = min(BLOCKS_ON_DEVICE, num_layers)
    return offload_some(model, travelling, visiting, activations=settings if activations else False)


class _LayerContext:
    """The context around each layer in turn. A forward ends after the last layer, or when autograd has dropped it."""

    def __init__(self, num_layers: int, model_layers: int, config: ActivationConfig) -> None:
        self._num_layers = num_layers
        self._model_layers = model_layers
        self._config = config
        self._passes: Passes | None = None  # made with the first forward, which resolves the device
        self._selection: Selection | None = None
        self._forward: Forward | None = None
        self._layer = 0  # the number of layers that this forward has entered
        self._inside: list[bool] = []  # for each entered context, whether it has pushed hooks

    def __enter__(self) -> "_LayerContext":
        if self._passes is not None and not in_backward():
            pop_left_over(self._passes.stash)
            if self._inside:  # an interrupt kept a context from being left
                self._inside.clear()
                self._end(completed=False)
        if not torch.is_grad_enabled() or in_backward() or not may_save():
            self._inside.append(False)
            return self
        if self._forward is not None and self._forward.is_gone:
            self._end(completed=False)
        forward = self._forward or self._begin()
        saves = self._layer < self._num_layers
        self._layer += 1
        if saves:
            forward.push()
        self._inside.append(saves)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._inside and self._inside.pop() and self._forward is not None:
            self._forward.pop()
        if self._forward is not None and not self._inside and (error is not None or self._layer == self._model_layers):
            self._end(completed=error is None)

    def sync(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a layer's output. Callers pass it after the layer's context; inside, this raises RuntimeError."""
        if self._inside:
            raise RuntimeError("sync is called inside of the context; call it behind the with block of the layer")
        return tensor

    def _begin(self) -> Forward:
        if self._passes is None or self._selection is None:
            device = resolve_device(None)
            self._passes = Passes(self._config, open_lanes(device), Ledger(host_budget_bytes=spare_host_bytes()))
            self._selection = Selection(None, device, self._config.min_bytes)
        self._layer = 0
        self._forward = self._passes.begin((), self._selection)
        return self._forward

    def _end(self, *, completed: bool) -> None:
        forward, self._forward = self._forward, None
        self._layer = 0
        if forward is not None:
            forward.end(completed=completed)
