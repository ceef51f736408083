"""How do caches of transformers rest on the host? For each update, a layer gets its tensors, and sends them back."""

import copy
import weakref
from collections.abc import Callable
from functools import cache as once
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from headrace.api import Offloaded
from headrace.errors import StateError
from headrace.weights.movement.caches import CachedLayer, Caches

if TYPE_CHECKING:
    from transformers import Cache

    CacheT = TypeVar("CacheT", bound=Cache)

_LAYER = "headrace_layer"  # attribute of a layer: what moves its tensors
# Attributes that models read and write without a call of `update`; they are small and stay on the device.
_STAY = {"conv_states", "recurrent_states", "indexer_keys", "indexer_position_ids"}
_AT_REST = ("reset", "reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices")


def offload_cache(cache: "CacheT", handle: Offloaded, *, tier: Literal["host", "disk"] = "host") -> "CacheT":
    """Lets `cache` rest in host memory between its uses, layer by layer; returns it, for `past_key_values`.

    `cache` is any cache of transformers (`DynamicCache(config=model.config)`, Static, quantised, ...), new or filled;
    `handle` that of the model which uses it. A layer comes to the device while the one before it computes, within
    `device_memory`: plans leave room for three layers. Only the tokens that a layer appends go back to the host;
    layers that rewrite their tensors (static, sliding, quantised) go back whole. Results have the same bits.

    - `tier`: "disk" lets it rest in the handle's `disk` directory; a few layers at once pass through host memory.

    Raises ValueError for a cache with `offloading=True` or one that rests elsewhere already, and for a tier that the
    handle lacks, TypeError for what is no cache of transformers, StateError after `handle.remove()`. When the cache is
    used, StateError within a pass with gradients, BudgetError if one of its layers does not fit in `device_memory`
    beside the blocks in use, or the cache in `host_memory`, and DiskError if the drive is full.
    """
    from transformers import Cache, EncoderDecoderCache
    from transformers.cache_utils import CacheLayerMixin

    if not isinstance(cache, Cache):
        raise TypeError(f"cache is a {type(cache).__name__}; give a cache of transformers, such as DynamicCache()")
    if isinstance(cache, EncoderDecoderCache):  # what the encoder gave is read without a call
        offload_cache(cache.self_attention_cache, handle, tier=tier)
        return cache
    if cache.offloading:
        raise ValueError("this cache has offloading=True, which is transformers' own; make it without")
    if tier not in ("host", "disk"):
        raise ValueError(f'tier={tier!r} is neither "host" nor "disk"')
    if tier == "disk" and handle.caches.disk is None:
        raise ValueError('tier="disk" needs a directory; give headrace.offload(model, disk="/path/on/a/local/drive")')
    caches, on_disk = weakref.ref(handle.caches), tier == "disk"
    make = cache.layer_class_to_replicate
    if make is not None:
        cache.layer_class_to_replicate = lambda: _moved_in(make(), caches, on_disk)
    for layer in cache.layers:
        if isinstance(layer, CacheLayerMixin):
            _moved_in(layer, caches, on_disk)
    return cache


def _moved_in(layer: Any, caches: "weakref.ref[Caches]", on_disk: bool) -> Any:
    """The layer, whose tensors rest on the host from now on."""
    from transformers.cache_utils import DynamicLayer

    if not hasattr(layer, _LAYER):
        kind: Any = type(layer)
        known = kind.__module__ == DynamicLayer.__module__  # others may do what they like to their tensors
        appends = known and isinstance(layer, DynamicLayer)
        setattr(layer, _LAYER, CachedLayer(caches, appends=appends, on_disk=on_disk))
        layer.__class__ = _offloaded(kind)
        _show(layer, getattr(layer, _LAYER).go({}, _tensors(layer), 0))
    elif not getattr(layer, _LAYER).rests_with(caches, on_disk=on_disk):
        raise ValueError("this cache rests in another tier or with another handle already; begin a new cache")
    return layer


@once
def _offloaded(kind: Any) -> Any:
    """The class of a layer of that kind whose tensors rest on the host."""

    def update(self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise StateError(
                "an offloaded cache was used in a pass with gradients; pass use_cache=False to train, or call the model"
                " under torch.no_grad()"
            )
        layer = getattr(self, _LAYER)
        came = layer.come(_tensors(self))
        empty = {path: one.to(key_states.device) for path, one in _tensors(self, empty=True).items()}
        _show(self, came | empty)  # cropped to nothing on the host, a tensor does not travel
        try:
            return kind.update(self, key_states, value_states, *args, **kwargs)
        finally:
            _show(self, layer.go(came, _tensors(self), key_states.shape[-2]))

    def deep_copied(self: Any, memo: dict[int, Any]) -> Any:
        getattr(self, _LAYER).settle()
        memo[id(self)] = copied = kind.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(vars(self), memo))
        return copied

    def pickled(self: Any, protocol: Any) -> Any:
        raise TypeError(
            "an offloaded cache can be copied by copy.deepcopy, but not pickled; save its tensors, as in"
            " [(layer.keys, layer.values) for layer in cache.layers], which DynamicCache takes"
        )

    methods = {name: _at_rest(getattr(kind, name)) for name in _AT_REST if hasattr(kind, name)}
    shown = {name: _shown(name) for name in ("keys", "values")}
    own = {"update": update, "__deepcopy__": deep_copied, "__reduce_ex__": pickled, "_layer_type": None}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods, **shown, **own})


def _at_rest(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a layer, called on the host's tensors."""

    def on_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(self, _LAYER)
        layer.settle()
        here = [argument.cpu() if isinstance(argument, torch.Tensor) else argument for argument in args]
        try:
            return method(self, *here, **kwargs)
        finally:
            _show(self, layer.adopt(_tensors(self)))

    return on_host


def _shown(name: str) -> property:
    """The attribute `name` of a layer. Who reads it waits until the host has the tensor, and may write to it."""

    def get(self: Any) -> Any:
        if name not in self.__dict__:  # layers of linear attention have neither keys nor values
            raise AttributeError(name)
        value = self.__dict__[name]
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and _LAYER in self.__dict__:
            self.__dict__[_LAYER].wait_for_copies()
        return value

    def put(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    return property(get, put)


def _tensors(layer: Any, *, empty: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a layer that travel, by their paths; or, of the same kind, the empty ones. Lengths, scales and the
    like stay on the device.
    """
    found: dict[str, torch.Tensor] = {}

    def note(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() > 1 and (tensor.numel() == 0) == empty:
            found[path] = tensor
        return tensor

    for name, value in vars(layer).items():
        if name not in _STAY:
            _mapped(value, name, note)
    return found


def _show(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Sets the tensors at these paths."""
    if tensors:
        names = {path.partition(".")[0] for path in tensors}
        for name in names:
            layer.__dict__[name] = _mapped(vars(layer)[name], name, lambda path, tensor: tensors.get(path, tensor))


def _mapped(value: Any, path: str, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """The value with its tensors changed; also those in tuples, lists and dicts, and what tensor subclasses hold."""
    if type(value) in (tuple, list):
        return type(value)(_mapped(one, f"{path}.{index}", change) for index, one in enumerate(value))
    if type(value) is dict:
        return {key: _mapped(one, f"{path}.{key}", change) for key, one in value.items()}
    if type(value) is torch.Tensor:
        return change(path, value)
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        parts = {name: getattr(value, name) for name in names}
        changed = {name: _mapped(part, f"{path}.{name}", change) for name, part in parts.items()}
        if any(changed[name] is not parts[name] for name in names):
            return type(value).__tensor_unflatten__(changed, context, value.size(), value.stride())  # type: ignore[attr-defined]
    return value
