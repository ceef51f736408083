"""How does a module announce its visits? Its class becomes a subclass of itself that goes through the engine.

A subclass made at run time (as FSDP2 does) instead of forward hooks: an exception cannot skip the end of a visit,
checkpointing that wraps `forward` stays inside, and PyTorch's fast paths, which refuse modules with hooks, stay on.
"""

import copyreg
import itertools
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from millrace.engine.home import Home
from millrace.engine.stray import homes_as_they_are
from millrace.errors import StateError

if TYPE_CHECKING:
    from millrace.engine.site import Site

__all__ = ["Managed", "make_managed", "make_plain", "site_of"]

_SITE = "_millrace_site"
_classes: "weakref.WeakKeyDictionary[type, weakref.ref[type]]" = weakref.WeakKeyDictionary()  # by the user's class


class Managed:
    """What an offloaded model's modules do differently. Mixed in front of their own class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module that is made of a managed one's class (`layers[1:3]`) is nobody's site: an ordinary one."""
        return _plain_class(cls)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if not self.__dict__[_SITE].engine.busy:
                torch.compiler.disable(_refuse_compilation_of_all)()  # here: that loads the compiler
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # inside a compiled block, inside its visit
        return self.__dict__[_SITE].call(super().__call__, args, kwargs)  # type: ignore[misc]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """`.to(device)`, `.cuda()`, `.cpu()`: managed parameters and buffers are where they belong, and stay there."""
        module: nn.Module = self  # type: ignore[assignment]
        if recurse:
            for child in module.children():
                child._apply(fn)
        site: Site = self.__dict__[_SITE]
        for name, parameter in module._parameters.items():
            if isinstance(parameter, Home):
                _check_same_dtype(name, parameter, fn)
            elif parameter is not None:
                parameter.data = fn(parameter.data)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                _check_same_dtype(name, buffer, fn)
                site.keep_buffer(module, name)
        return module

    def _named_members(self, *args: Any, **kwargs: Any) -> Any:
        """Behind `parameters()`, `zero_grad()` and their like: homes, also right after a backward that raised."""
        self.__dict__[_SITE].engine.settle()
        return super()._named_members(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As nn.Module has it; without waiting for updates under way, which keep the gradients that they read."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)  # type: ignore[misc]
            return
        self.__dict__[_SITE].engine.settle(updates=False)
        module: nn.Module = self  # type: ignore[assignment]
        for part in module.modules():
            for parameter in part._parameters.values():
                if parameter is not None:
                    parameter.grad = None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.__dict__[_SITE].engine.settle()
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        if not keep_vars:  # a checkpoint is a host's: buffers rest on the device, parameters on the host
            for name, buffer in self._buffers.items():  # type: ignore[attr-defined]
                if buffer is not None and prefix + name in destination:
                    destination[prefix + name] = destination[prefix + name].to("cpu")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__[_SITE].engine.wait_until_free()  # homes are about to be written
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = object.__new__(_plain_class(type(self)))
        memo[id(self)] = copied
        copied.__dict__.update(deepcopy(_plain_state(self), memo))  # type: ignore[arg-type]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # not copyreg.__newobj__: pickle wants the object's own class there
        plain = _plain_class(type(self))
        return copyreg._reconstructor, (plain, object, None), _plain_state(self)  # type: ignore[attr-defined, arg-type]


class _HasDevice:
    """For classes that have a `device` property (transformers, diffusers): where the model computes."""

    @property
    def device(self) -> torch.device:
        return self.__dict__[_SITE].device  # type: ignore[no-any-return]


class _LooksAtChildren:
    """For nn.TransformerEncoder: it looks at its first layer's weights, to choose how to compute, and uses none."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with homes_as_they_are():
            return super().forward(*args, **kwargs)  # type: ignore[misc]


_MIXINS = (Managed, _HasDevice, _LooksAtChildren)


def _refuse_compilation_of_all() -> None:
    raise StateError(
        "torch.compile around an offloaded model would compile the visits away; compile its blocks instead: "
        "for layer in model.layers: layer.compile()"
    )


def make_managed(module: nn.Module, site: "Site") -> None:
    """Puts the managed class on a module, in place."""
    module.__class__ = _managed_class(type(module))
    module.__dict__[_SITE] = site


def make_plain(module: nn.Module) -> None:
    """The inverse of `make_managed`."""
    module.__class__ = _plain_class(type(module))
    module.__dict__.pop(_SITE, None)


def site_of(module: nn.Module) -> "Site | None":
    """The site of a managed module; None for any other."""
    return module.__dict__.get(_SITE)


def _managed_class(own: type) -> type:
    """The managed class of a user's class: made once, and gone with its last module, as the user's class may be."""
    known = _classes[own]() if own in _classes else None
    if known is not None:
        return known
    wanted = (True, isinstance(getattr(own, "device", None), property), issubclass(own, nn.TransformerEncoder))
    mixins = itertools.compress(_MIXINS, wanted)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    managed = type(own.__name__, (*mixins, own), names)
    _classes[own] = weakref.ref(managed)
    return managed


def _plain_class(managed: type) -> type:
    behind = managed.__mro__[managed.__mro__.index(Managed) :]
    return next(kind for kind in behind if kind not in _MIXINS)


def _plain_state(module: nn.Module) -> dict[str, Any]:
    """The module's attributes as they would be on a CPU, were it not offloaded."""
    state = {name: value for name, value in module.__dict__.items() if name != _SITE}
    state["_buffers"] = {
        name: buffer if buffer is None else buffer.to("cpu") for name, buffer in module._buffers.items()
    }
    return state


def _check_same_dtype(name: str, tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    dtype = fn(torch.empty(0, dtype=tensor.dtype)).dtype
    if dtype != tensor.dtype:
        raise StateError(
            f"an offloaded model cannot change {name!r} from {tensor.dtype} to {dtype}; call remove() on the handle,"
            " convert the model, and offload it again (or pass param_dtype to compute in another dtype)"
        )
