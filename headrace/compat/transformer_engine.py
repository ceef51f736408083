"""How does code for TransformerEngine's or Megatron's CPU offloading of layers run here? With the import changed.

| TransformerEngine, Megatron | here |
|---|---|
| `context, sync = get_cpu_offload_context(enabled, num_layers, model_layers, ...)` | the same |
| `with context: x = layer(x)`, then `x = sync(x)`, for each layer in turn | the same |
| layers 0 to `num_layers` - 1 leave; `num_layers` is 0 to `model_layers` - 1, and 0 means off | the same |
| they leave, however slow the link is | the same, or as `device_memory=` says |
| `double_buffering`: how deep reloads go | accepted: the plan chooses the depth |
| `retain_pinned_cpu_buffers` | accepted: host memory is kept in any case, and shapes may change |
| `offload_weights` has no effect any more | with `model=`, weights of these layers visit the device; the rest stays |
| no recomputation, one pipeline stage | any; several forwards may come before their backwards |
| CUDA graphs refused | refused, and capturing raises StateError |
| `manual_synchronization`, `offload_stream` | refused: plan and lanes are headrace's |
| `fine_grained_activation_offloading`: what the modules `offload_modules` save leaves | modules whose names have one |
| | of these in them, such as "mlp" |
| pinned memory per tensor, and copies on one stream for both directions | one arena, and a lane for each direction |
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn

import headrace
from headrace.activations.passes import Forward, Passes
from headrace.activations.saving import may_save, pop_left_over
from headrace.activations.selection import Selection
from headrace.activations.targets import named_layers
from headrace.compat.settings import Settings
from headrace.compat.sizes import module_bytes, parameter_pattern, tensor_bytes
from headrace.config import ActivationConfig, Size
from headrace.memory.ledger import Ledger
from headrace.runtime.autograd import in_backward
from headrace.runtime.device import resolve_device
from headrace.runtime.host import available_host_bytes
from headrace.runtime.lanes import open_lanes

__all__ = ["CPUOffloadConfig", "get_cpu_offload_context"]

_MIN_BYTES = "512KiB"  # TransformerEngine: 256 Ki elements, here of bfloat16
_HOST_SHARE = 0.85  # of what is available
_VISITING_LAYERS = 3  # one that computes, one that arrives, one whose turn comes

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
    """A context for each layer's call, and a function for its output; what the first layers save leaves the device.

    `model`: offloading is hooked into the model instead, and the context does nothing; `offload_weights` needs this,
    with the model on the CPU. `device_memory`: ceiling in bytes for saved tensors on the device; by default all that
    these layers save leaves. `min_bytes`: smaller tensors stay.

    Raises ValueError for settings as listed above, and what `headrace.offload` and `offload_activations` raise.
    """
    if not enabled or (num_layers == 0 and model_layers >= 0):
        return contextlib.nullcontext(), _unchanged
    if not offload_activations and not offload_weights:
        raise ValueError("nothing is to be offloaded; set offload_activations or offload_weights")
    if not 0 <= num_layers < model_layers:
        raise ValueError(
            f"num_layers={num_layers} of {model_layers}: backward begins with the last layer, so that one stays; give 0"
            f" to {model_layers - 1}"
        )
    for name, given in (("manual_synchronization", manual_synchronization), ("offload_stream", offload_stream)):
        if given:
            raise ValueError(f"{name} is not supported: headrace plans the copies, and has a lane for each direction")
    settings = {"device_memory": device_memory, "min_bytes": min_bytes, "all_leave": device_memory is None}
    if model is not None:
        _offload_model(model, num_layers, settings, activations=offload_activations, weights=offload_weights)
        return contextlib.nullcontext(), _unchanged
    if offload_weights:
        raise ValueError("offload_weights needs the model whose weights are to visit the device; pass model=")
    context = _LayerContext(num_layers, model_layers, ActivationConfig.of(**settings))  # type: ignore[arg-type]
    return context, context.sync


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _offload_model(
    model: nn.Module, num_layers: int, settings: dict[str, Any], *, activations: bool, weights: bool
) -> headrace.Offloaded | headrace.ActivationOffloading:
    settings = {**settings, "layers": num_layers}
    if not weights:
        return headrace.offload_activations(model, **settings)
    travelling = list(named_layers(model))[:num_layers]
    inside = {id(parameter) for layer in travelling for parameter in layer.parameters()}
    staying = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in inside}
    visiting_bytes = min(_VISITING_LAYERS, num_layers) * max(map(module_bytes, travelling))
    return headrace.offload(
        model,
        device_memory=tensor_bytes(staying.values()) + tensor_bytes(model.buffers()) + visiting_bytes,
        blocks=travelling,
        resident=[parameter_pattern(name) for name in staying],
        activations=settings if activations else False,
    )


class _LayerContext:
    """Entered around each layer in turn. A forward ends with its last layer, or when autograd has dropped it."""

    def __init__(self, num_layers: int, model_layers: int, config: ActivationConfig) -> None:
        self._num_layers = num_layers
        self._model_layers = model_layers
        self._config = config
        self._passes: Passes | None = None  # made when there is a device to ask for
        self._selection: Selection | None = None
        self._forward: Forward | None = None
        self._layer = 0  # how many layers of the forward were entered
        self._inside: list[bool] = []  # for each context that is entered: whether it has put hooks on top

    def __enter__(self) -> "_LayerContext":
        if self._passes is not None and not in_backward():
            pop_left_over(self._passes.stash)
            if self._inside:  # an interrupt kept it from being left
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
        """To be called with a layer's output, after its context. Raises RuntimeError inside the context."""
        if self._inside:
            raise RuntimeError("sync is called inside of the context; call it behind the with block of the layer")
        return tensor

    def _begin(self) -> Forward:
        if self._passes is None or self._selection is None:
            device = resolve_device(None)
            ledger = Ledger(host_budget_bytes=int(available_host_bytes() * _HOST_SHARE))
            self._passes = Passes(self._config, open_lanes(device), ledger)
            self._selection = Selection(None, device, self._config.min_bytes)
        self._layer = 0
        self._forward = self._passes.begin((), self._selection)
        return self._forward

    def _end(self, *, completed: bool) -> None:
        forward, self._forward = self._forward, None
        self._layer = 0
        if forward is not None:
            forward.end(completed=completed)


@dataclass(kw_only=True)
class CPUOffloadConfig(Settings):
    """Megatron's settings of layer-level CPU offloading, validated as listed above. `num_layers`: of the model.

    They may be changed one after another: `validate()` checks them again, and so does whatever uses them. Raises
    ValueError for settings that cannot work. Recomputation and pipeline stages may be set as one likes.
    """

    num_layers: int
    cpu_offloading: bool = False
    cpu_offloading_num_layers: int = 0
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = False
    cpu_offloading_double_buffering: bool = False
    cpu_offloading_retain_pinned_cpu_buffers: bool = False
    pipeline_model_parallel_size: int = 1
    recompute_granularity: str | None = None
    cuda_graph_impl: str = "none"
    fine_grained_activation_offloading: bool = False
    offload_modules: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises ValueError for settings that cannot work."""
        if self.fine_grained_activation_offloading and self.cpu_offloading:
            raise ValueError(
                "fine_grained_activation_offloading=True with cpu_offloading=True says for a second time what leaves;"
                " set one of them to False (headrace.offload_activations(model, layers=N, modules=[...]) takes both)"
            )
        if self.fine_grained_activation_offloading and not self.offload_modules:
            raise ValueError(
                "fine_grained_activation_offloading=True names no modules; give parts of their names in the model, such"
                ' as offload_modules=["mlp"]'
            )
        if not self.cpu_offloading:
            return
        if not 0 <= self.cpu_offloading_num_layers < self.num_layers:
            raise ValueError(
                f"cpu_offloading_num_layers={self.cpu_offloading_num_layers}: CPU offloading can be done only for fewer"
                f" than the {self.num_layers} layers; give 0 to {self.num_layers - 1}"
            )
        if self.cuda_graph_impl != "none":
            raise ValueError(
                f"cuda_graph_impl={self.cuda_graph_impl!r}: a graph would replay copies into memory of another step;"
                ' set "none", or cpu_offloading=False'
            )
        if not (self.cpu_offloading_activations or self.cpu_offloading_weights):
            raise ValueError("cpu_offloading has nothing to do; set cpu_offloading_activations or _weights")

    def _offload(
        self, model: nn.Module, device_memory: Size | None, min_bytes: Size | None
    ) -> headrace.Offloaded | headrace.ActivationOffloading | None:
        self.validate()
        settings: dict[str, Any] = {
            "device_memory": device_memory,
            "min_bytes": _MIN_BYTES if min_bytes is None else min_bytes,
            "all_leave": device_memory is None,
        }
        if self.fine_grained_activation_offloading:
            modules = [f"*{name}*" for name in self.offload_modules]
            return headrace.offload_activations(model, modules=modules, **settings)
        if not self.cpu_offloading or self.cpu_offloading_num_layers == 0:
            return None
        return _offload_model(
            model,
            self.cpu_offloading_num_layers,
            settings,
            activations=self.cpu_offloading_activations,
            weights=self.cpu_offloading_weights,
        )
