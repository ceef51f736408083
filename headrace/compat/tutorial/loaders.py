"""How does one layer's memory fill while another's is in use? Two or three buffers, lanes, and events between them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from headrace.errors import StateError
from headrace.runtime.device import resolve_device
from headrace.runtime.lanes import Event, Lane, Transfer, open_lanes

__all__ = ["DoubleBufferedLoader", "OverlappedOffloader", "TripleBufferedLoader"]


class DoubleBufferedLoader:
    """Two buffers on `device`: `get_current_buffer()` is in use, `start_next_load` fills the other, `swap_buffers()`.

    A load starts once compute has finished with its buffer; the host never waits. The load after the next swap
    overwrites the tensor that `get_current_buffer` returned.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = resolve_device(device)
        self.buffers: list[torch.Tensor | None] = [None, None]
        self.current_buffer = 0
        self.pending_load: Transfer | None = None
        self._lanes = open_lanes(self.device)

    def get_current_buffer(self) -> torch.Tensor:
        """The tensor that the last swap made current. Raises StateError before the first swap."""
        buffer = self.buffers[self.current_buffer]
        if buffer is None:
            raise StateError("nothing was loaded yet; call start_next_load and swap_buffers first")
        return buffer

    def start_next_load(self, cpu_tensor: torch.Tensor, shape: Sequence[int] | None = None) -> None:
        """Begins to copy `cpu_tensor`, viewed as `shape`, to the buffer that is not in use. The tensor must not change
        until the swap. Raises ValueError for a shape of another size, StateError while a load waits for its swap."""
        if self.pending_load is not None:
            raise StateError("a load waits for swap_buffers(); call that before the next load")
        shape = tuple(cpu_tensor.shape if shape is None else shape)
        if torch.Size(shape).numel() != cpu_tensor.numel():
            raise ValueError(f"a tensor of shape {tuple(cpu_tensor.shape)} has not the elements of shape {shape}")
        following = 1 - self.current_buffer
        buffer = self.buffers[following]
        if buffer is None or buffer.shape != shape or buffer.dtype != cpu_tensor.dtype:
            buffer = self.buffers[following] = None  # frees its memory before the next line allocates
            buffer = self.buffers[following] = torch.empty(shape, dtype=cpu_tensor.dtype, device=self.device)
        copies = [(buffer, cpu_tensor.detach().view(shape))]
        self.pending_load = self._lanes.copy(Lane.ONLOAD, copies, self._lanes.mark())

    def swap_buffers(self) -> None:
        """Makes the loaded buffer the current one; compute waits for its load. StateError if no load was started."""
        if self.pending_load is None:
            raise StateError("no load was started since the last swap; call start_next_load first")
        self._lanes.wait(self.pending_load.done)
        self.pending_load = None
        self.current_buffer = 1 - self.current_buffer


class TripleBufferedLoader:
    """Three buffers of `layer_size` elements on `device`: one in use, one ready, one that fills. For inference.

    One lane carries all loads, because two copies at once would share the link's bandwidth.
    """

    def __init__(
        self, layer_size: int, dtype: torch.dtype = torch.float16, device: torch.device | str | None = None
    ) -> None:
        self.device = resolve_device(device)
        self.buffers = [torch.empty(layer_size, dtype=dtype, device=self.device) for _ in range(3)]
        self._lanes = open_lanes(self.device)
        self._loads: list[Transfer | None] = [None, None, None]

    @property
    def buffer_ready(self) -> list[bool]:
        """Whether the load of each buffer is over."""
        return [load is not None and bool(load.done.query()) for load in self._loads]

    def prefetch_layer(self, layer_idx: int, buffer_idx: int, source_tensor: torch.Tensor) -> Event:
        """Loads a layer once compute has finished with the buffer. Returns, at once, an event to `synchronize()` on.

        Raises ValueError for another dtype, and for more elements than the buffer has.
        """
        buffer = self.buffers[buffer_idx]
        if source_tensor.numel() > buffer.numel() or source_tensor.dtype != buffer.dtype:
            raise ValueError(
                f"layer {layer_idx} has {source_tensor.numel()} elements of {source_tensor.dtype}; the buffers have"
                f" {buffer.numel()} of {buffer.dtype}: make the loader for the largest layer, and in its dtype"
            )
        copies = [(self._view(buffer_idx, source_tensor), source_tensor.detach())]
        load = self._loads[buffer_idx] = self._lanes.copy(Lane.ONLOAD, copies, self._lanes.mark())
        event: Event = load.done
        return event

    def forward_with_triple_buffer(
        self, layers: Sequence[Callable[..., Any]], cpu_params: Sequence[torch.Tensor], input_tensor: Any
    ) -> Any:
        """`x = layers[i](x, parameters of layer i)` for each layer in turn; two layers are loaded ahead.

        Parameters have the shape of their source. Outputs may be used like those of any computation on the device.
        """
        if len(layers) != len(cpu_params):
            raise ValueError(f"{len(layers)} layers with parameters for {len(cpu_params)}: give one tensor for each")
        x = input_tensor
        for index, source in enumerate(cpu_params[:2]):
            self.prefetch_layer(index, index, source)
        for index, layer in enumerate(layers):
            if index + 2 < len(layers):
                self.prefetch_layer(index + 2, (index + 2) % 3, cpu_params[index + 2])
            load = self._loads[index % 3]
            if load is not None:
                self._lanes.wait(load.done)
            x = layer(x, self._view(index % 3, cpu_params[index]))
        return x

    def _view(self, buffer_idx: int, source: torch.Tensor) -> torch.Tensor:
        return self.buffers[buffer_idx][: source.numel()].view(source.shape)


class OverlappedOffloader:
    """Runs the layers of `model` on `device`, one `step` for each, while the next one's parameters arrive.

    The layers are `model.layers`, or else the model's children. Their parameters stay where they are. A subclass may
    override `load_layer` and `forward_layer`. Gradients do not reach the model: `headrace.offload` is for training.
    """

    def __init__(self, model: nn.Module, device: torch.device | str | None = None) -> None:
        self.device = resolve_device(device)
        layers = getattr(model, "layers", None)
        self.layers = list(layers if isinstance(layers, nn.ModuleList | nn.Sequential) else model.children())
        if not self.layers:
            raise ValueError(f"this {type(model).__name__} has no layers; give a model with `layers` or children")
        self.buffers: list[tuple[int, Any] | None] = [None, None]
        self._lanes = open_lanes(self.device)
        self._loads: dict[int, Transfer] = {}

    def load_layer(self, layer_idx: int) -> Any:
        """Begins to load the layer. Returns its parameters and buffers on the device, by name."""
        layer = self.layers[layer_idx]
        homes = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        there = {name: torch.empty_like(home, device=self.device, requires_grad=False) for name, home in homes.items()}
        copies = [(there[name], home.detach()) for name, home in homes.items()]
        self._loads[layer_idx] = self._lanes.copy(Lane.ONLOAD, copies, self._lanes.mark())
        return there

    def forward_layer(self, layer_idx: int, input_tensor: Any, buffer: Any) -> Any:
        """The layer's output, computed with the parameters in `buffer`."""
        return torch.func.functional_call(self.layers[layer_idx], buffer, (input_tensor,))

    def step(self, layer_idx: int, input_tensor: Any) -> Any:
        """The output of that layer; the next one is loaded meanwhile. Steps may come in any order."""
        if not 0 <= layer_idx < len(self.layers):
            raise IndexError(f"layer {layer_idx} of {len(self.layers)}: give 0 to {len(self.layers) - 1}")
        buffer = self._buffer_of(layer_idx)
        if layer_idx + 1 < len(self.layers):
            self._buffer_of(layer_idx + 1)
        load = self._loads.pop(layer_idx, None)
        if load is not None:
            self._lanes.wait(load.done)
        self.buffers[layer_idx % 2] = None  # not kept: weights may have changed by the next run
        return self.forward_layer(layer_idx, input_tensor, buffer)

    def _buffer_of(self, layer_idx: int) -> Any:
        held = self.buffers[layer_idx % 2]
        if held is None or held[0] != layer_idx:
            if held is not None and held[0] in self._loads:
                self._lanes.wait(self._loads.pop(held[0]).done)  # before its memory is freed
            held = self.buffers[layer_idx % 2] = None
            held = self.buffers[layer_idx % 2] = (layer_idx, self.load_layer(layer_idx))
        return held[1]
