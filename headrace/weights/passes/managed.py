"""What do an offloaded model's modules do differently? They are moved, read, written and copied as if on a CPU.

Their classes stay what they are: see runtime/module_calls.py. Their parameters are in a dict that lends leaves while
the model computes.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from multiprocessing.context import get_spawning_popen
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from headrace.errors import StateError
from headrace.runtime.module_calls import (
    Method,
    compile_calls,
    computing_methods,
    participant_of,
    take_part,
    withdraw,
)
from headrace.runtime.tensors import map_tensors
from headrace.weights.model.compound import is_compound, shown_for
from headrace.weights.model.home import Home, Leaf, WatchedBuffer, home_of
from headrace.weights.model.inventory import OF_MODULES, is_left_to_user
from headrace.weights.model.module_buffers import HostBuffer, plain_buffer
from headrace.weights.passes.call import Site
from headrace.weights.passes.compiling import compile_blocks, note_not_compiled
from headrace.weights.passes.engine import Engine
from headrace.weights.passes.parameter_access import (
    borrow,
    borrow_compound,
    homes_as_they_are,
    pass_begins,
)


class LendingDict(dict[str, Any]):
    """A module's `_buffers` or `_parameters`. While the model computes, gives the leaf for a home."""

    def __getitem__(self, name: str) -> Any:
        held = super().__getitem__(name)  # so that the compiler can follow
        if type(held) is Home or type(held) is WatchedBuffer:
            return borrow(held)
        if isinstance(held, HostBuffer):  # it rests on the host, as outside of passes
            return super().__getitem__(name) if pass_begins() else held
        return borrow_compound(held) if held is not None and is_compound(held) else held


class Parameters(LendingDict):
    """A module's `_parameters`. When a parameter is put here, or taken from here, the leaf that hides it as an
    attribute of the instance goes (weights/model/places.py), so that the module shows the change. Iteration gives
    homes, as `parameters()` does.
    """

    def __init__(self, held: Mapping[str, Any], module: nn.Module) -> None:
        super().__init__(held)
        self._module = weakref.ref(module)

    def __setitem__(self, name: str, held: Any) -> None:
        self._reveal(name)
        super().__setitem__(name, home_of(held) if isinstance(held, Leaf) else held)

    def __delitem__(self, name: str) -> None:
        self._reveal(name)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        self._reveal(name)
        return super().pop(name, *default)

    def clear(self) -> None:
        for name in list(self):
            del self[name]

    get = MutableMapping.get  # type: ignore[assignment]  # by __getitem__
    update = MutableMapping.update  # by __setitem__

    def __ior__(self, others: Any) -> "Parameters":  # type: ignore[override,misc]
        self.update(others)
        return self

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return dict, (dict(self.items()),)

    def _reveal(self, name: str) -> None:
        module = self._module()
        if module is not None and isinstance(module.__dict__.get(name), Leaf):
            del module.__dict__[name]


def lend_parameters(module: nn.Module) -> None:
    """Makes the module give leaves when it is asked for parameters during a pass."""
    if module._parameters and not isinstance(module._parameters, Parameters):
        module.__dict__["_parameters"] = Parameters(module._parameters, module)
    if module._buffers and not isinstance(module._buffers, LendingDict):
        module.__dict__["_buffers"] = LendingDict(module._buffers)


class Managed:
    """Takes part in what one managed module does."""

    outer = False

    def __init__(self, module: nn.Module, site: Site, engine: Engine) -> None:
        self.site = site
        self._engine = engine
        self._looks_at_homes = isinstance(module, nn.TransformerEncoder)
        self._others: dict[str, Method] = {name: partial(self._call, name) for name in computing_methods(type(module))}
        self.leaves_out = (lambda: False) if self._looks_at_homes else site.is_inside

    @property
    def methods(self) -> dict[str, Method]:
        """What takes the place of methods of the instance."""
        forward = {"forward": self._compute_with_parts} if self._takes_parts else {}
        return {
            **self._others,
            **forward,
            "_apply": self._apply,
            "_named_members": self._named_members,
            "zero_grad": self._zero_grad,
            "_save_to_state_dict": self._save_to_state_dict,
            "_load_from_state_dict": self._load_from_state_dict,
        }

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The module is called."""
        site, engine = self.site, self._engine
        if self._looks_at_homes:
            forward = _looking_at_homes(forward)
            if site.is_inside():
                return forward(*args, **kwargs)
        if engine.passes.straight_for == get_ident() and site.needs_no_visit():
            output = forward(*args, **kwargs)
            engine.backward.watch_output(site, output)
            return output
        return engine.call(site, module, forward, args, kwargs)

    def _call(self, name: str, module: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # within a pass
            return own(*args, **kwargs)
        return self._engine.call_method(self.site, module, name, own, args, kwargs)

    def _compute_with_parts(self, module: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
        """The `forward` of a module that computes with rows of its weight, or experts, or adapts experts."""
        engine, table, whole = self._engine, self.site.table, self.site.all_experts
        if self.site.adapts:
            base: Any = module.get_base_layer()
            adapted = site_of(base)
            if adapted is None or adapted.all_experts is None:
                return own(*args, **kwargs)
            return engine.experts.adapt(module, adapted.all_experts, base, own, args, kwargs)
        if whole is not None:
            engine.note_use(*whole.blocks)
            return engine.experts.compute(whole, module, own, args, kwargs)
        if table is None:
            return own(*args, **kwargs)
        engine.note_use(table)
        return engine.lookups.look_up(table, module, own, *args, **kwargs)

    def stops_compiler(self, module: nn.Module) -> bool:
        """A compiled block may be compiled through while a visit has it bound; a model around blocks may not."""
        if self.site.encloses or self._takes_parts or not self._engine.passes.computes:
            return True
        return not all(block.users for block in self.site.blocks)

    def compile(self, module: nn.Module, compiler: Callable[[Any], Any]) -> bool:
        """Blocks are compiled in the place of a module around them."""
        if self._takes_parts:
            return True  # nothing is gained by it, and the compiler cannot follow it
        if not self.site.encloses:
            return False
        compile_blocks(self._engine, _layers(module), compiler)
        return True

    def stopped(self, module: nn.Module) -> None:
        """The compiler has come to a call of the module. If torch.compile was given the module, it compiles the
        module's blocks from now on, or what another participant that stopped it leaves of the call.
        """
        wrapper, self.site.compiled_by = self.site.compiled_by, None
        given: Any = None if wrapper is None else wrapper()
        if given is not None:
            compile_calls(module, given.dynamo_ctx)
        elif self.stops_compiler(module):
            note_not_compiled(self._engine)

    @property
    def _takes_parts(self) -> bool:
        """Whether the module's `forward` is ours, because rows of its weight, or experts, come when they are used."""
        return self.site.table is not None or self.site.all_experts is not None or self.site.adapts

    @contextlib.contextmanager
    def plain(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module's attributes are those of a plain model on the CPU."""
        if self.site.companion is not None and get_spawning_popen() is not None:
            warnings.warn(
                "an offloaded model is on its way to a spawned process, where it is a plain model on the CPU, with a"
                " copy of all weights; call headrace.offload() in that process",
                RuntimeWarning,
                stacklevel=2,
            )
        attributes = module.__dict__
        parameters, buffers = attributes["_parameters"], attributes["_buffers"]
        plain_parameters = {
            name: _on_host(parameter) if parameter is not None and is_left_to_user(parameter) else parameter
            for name, parameter in parameters.items()
        }
        plain_buffers = {name: plain_buffer(buffer) for name, buffer in buffers.items()}
        leaves = {name: attributes[name] for name in parameters if isinstance(attributes.get(name), Leaf)}
        made = _attributes_on_host(module, self.site.passes.device, {})
        kept = {name: attributes[name] for name in made}
        try:
            for name in leaves:
                del attributes[name]
            attributes.update(made)
            attributes["_parameters"], attributes["_buffers"] = plain_parameters, plain_buffers
            yield
        finally:
            attributes["_parameters"], attributes["_buffers"] = parameters, buffers
            attributes.update({**leaves, **kept})

    def _apply(
        self, module: nn.Module, _own: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> nn.Module:
        """Serves `.to(device)`, `.cuda()` and `.cpu()`: managed parameters and buffers stay where they are; so do
        parameters that are left to the user.

        `.to(dtype)` of the whole model is carried out, and the model is offloaded anew.
        """
        owner = self.site.companion
        if owner is not None and recurse and any(_dtype_by(fn, home) != home.dtype for home in module.parameters()):
            owner.convert(module, lambda: module._apply(_where_it_is(fn)))
            return module
        if recurse:
            for child in module.children():
                child._apply(fn)
        for name, parameter in module._parameters.items():
            if isinstance(parameter, Home) or (parameter is not None and is_compound(parameter)):
                _check_same_dtype(name, parameter, fn)
            elif parameter is not None:
                convert = _where_it_is(fn) if is_left_to_user(parameter) else fn
                parameter.data = convert(parameter.data)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                _check_same_dtype(name, buffer, fn)
        return module

    def _named_members(self, _module: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
        """Gives homes to `parameters()`, `zero_grad()` and their like, also right after a backward that raised."""
        self._engine.quiesce()
        return ((name, _home_or_own(member)) for name, member in own(*args, **kwargs))

    def _zero_grad(self, module: nn.Module, own: Any, set_to_none: bool = True) -> None:
        """Does as in nn.Module, but does not wait for updates under way, which keep the gradients that they read."""
        if set_to_none:
            self._engine.quiesce(updates=False)
            for part in module.modules():
                for parameter in part._parameters.values():
                    if parameter is not None:
                        _home_or_own(parameter).grad = None
        else:
            own(set_to_none=False)
        if (common := self._engine.passes.common) is not None:
            common.discard(module.parameters())

    def _save_to_state_dict(
        self, module: nn.Module, own: Any, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self._engine.quiesce()
        own(destination, prefix, keep_vars)
        if not keep_vars:  # a checkpoint is a host's: buffers rest on the device, parameters on the host
            for name, buffer in module._buffers.items():
                if buffer is not None and prefix + name in destination:
                    destination[prefix + name] = destination[prefix + name].to("cpu")

    def _load_from_state_dict(self, _module: nn.Module, own: Any, *args: Any, **kwargs: Any) -> None:
        self._engine.wait_until_free()  # homes are about to be written
        own(*args, **kwargs)


def bring_attributes_back(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Moves to the host the tensors that modules made on the device and kept in attributes."""
    known: dict[int, torch.Tensor] = {}
    for module in modules:
        module.__dict__.update(_attributes_on_host(module, device, known))


def _attributes_on_host(module: nn.Module, device: torch.device, known: dict[int, torch.Tensor]) -> dict[str, Any]:
    """The attributes that have tensors on the device, with copies on the host; `known`: copies made before, by id."""

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.device != device:
            return tensor
        if id(tensor) not in known:
            known[id(tensor)] = tensor.to("cpu")
        return known[id(tensor)]

    if device.type == "cpu":
        return {}
    own = {name: value for name, value in module.__dict__.items() if name not in OF_MODULES}
    found = {name: map_tensors(value, on_host) for name, value in own.items()}
    return {name: value for name, value in found.items() if value is not own[name]}


def _home_or_own(member: Any) -> Any:
    if isinstance(member, WatchedBuffer):  # in a pass, buffers are where the model computes
        return borrow(member)
    return member if isinstance(member, Leaf) else shown_for(member)  # a Leaf is a buffer here


_copies_on_host: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()  # weakly, of parameters left to the user


def _on_host(parameter: nn.Parameter) -> nn.Parameter:
    """What copies and pickles of a model have in place of a parameter that is left to the user: its values, in host
    memory, and in all its places the same object.
    """
    known = _copies_on_host.get(parameter)
    copied: nn.Parameter | None = None if known is None else known()
    if copied is None:
        copied = nn.Parameter(parameter.detach().cpu(), parameter.requires_grad)
        _copies_on_host[parameter] = weakref.ref(copied)
    else:
        copied.data = parameter.detach().cpu()
    return copied


def _looking_at_homes(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For nn.TransformerEncoder, which looks at its first layer's weights to choose how to compute, and uses none."""

    def looking(*args: Any, **kwargs: Any) -> Any:
        with homes_as_they_are():
            return forward(*args, **kwargs)

    return looking


def _layers(module: nn.Module) -> list[nn.Module]:
    """The modules in `module` whose calls bring blocks, and that have no such modules inside. Modules without children
    are left out: one operation alone gains nothing by being compiled.
    """
    composed = [inner for inner in module.modules() if next(inner.children(), None) is not None]
    sites = ((inner, site_of(inner)) for inner in composed)
    return [inner for inner, site in sites if site is not None and site.main and not site.encloses]


def make_managed(module: nn.Module, site: Site, engine: Engine) -> None:
    """Makes the module a managed one."""
    take_part(module, Managed(module, site, engine))
    _tell_device(module, site.passes.device)


def make_plain(module: nn.Module) -> None:
    """The inverse of `make_managed` and `lend_parameters`."""
    managed = participant_of(module, Managed)
    if managed is not None:
        _tell_device(module, None)
        withdraw(module, managed)
    if isinstance(module._parameters, Parameters):
        module.__dict__["_parameters"] = dict(module._parameters.items())
    if isinstance(module._buffers, LendingDict):
        module.__dict__["_buffers"] = dict(module._buffers.items())


def site_of(module: nn.Module) -> Site | None:
    """The site of a managed module; None for any other."""
    managed = participant_of(module, Managed)
    return None if managed is None else managed.site


# `model.device`: where the model computes -----------------------------------------------------------------------------
class _Device(property):
    """The `device` property of a class (transformers, diffusers), which for offloaded modules tells where they compute.

    Properties belong to classes, so the class has it while any of its modules is offloaded.
    """

    def __init__(self, own: property) -> None:
        super().__init__(self._answer, own.fset, own.fdel, own.__doc__)
        self.own = own
        self.devices: weakref.WeakKeyDictionary[nn.Module, torch.device] = weakref.WeakKeyDictionary()

    def _answer(self, module: nn.Module) -> Any:
        device = self.devices.get(module)
        return device if device is not None else self.own.__get__(module)


def _tell_device(module: nn.Module, device: torch.device | None) -> None:
    """Makes the module's `device` this one, if its class has such a property; with None, what the class says."""
    owner = _owner_of_device(type(module))
    if owner is None:
        return
    held = owner.__dict__["device"]
    told = held if isinstance(held, _Device) else _Device(held)
    told.devices.pop(module, None)
    if device is not None:
        told.devices[module] = device
    owner.device = told if told.devices else told.own


def _owner_of_device(kind: Any) -> Any:
    """The class that has the property `device`; None if there is none, or `device` is another kind of attribute."""
    for owner in kind.__mro__:
        if "device" in owner.__dict__:
            return owner if isinstance(owner.__dict__["device"], property) else None
    return None


def _dtype_by(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.dtype:
    """The dtype that `fn` gives a tensor."""
    return fn(torch.empty(0, dtype=tensor.dtype)).dtype


def _where_it_is(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What `fn` makes of a tensor, on the tensor's device: `.to(device, dtype)` changes the dtype alone."""
    return lambda tensor: tensor.to(_dtype_by(fn, tensor))


def _check_same_dtype(name: str, tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    if (dtype := _dtype_by(fn, tensor)) != tensor.dtype:
        raise StateError(
            f"a part of an offloaded model cannot change {name!r} from {tensor.dtype} to {dtype}; convert the whole"
            " model, or call remove() on the handle, convert the part (or the pipeline), and offload again (or pass"
            " param_dtype to compute in another dtype)"
        )
