"""In which dtypes do a model's parts travel and compute? In one, or as policies for single modules say (FSDP2)."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from headrace.config import Policy
from headrace.runtime.module_calls import Participant, participant_of, take_part, withdraw
from headrace.runtime.tensors import map_tensors


class _Held(NamedTuple):
    """A parameter in one of its places; the policy that it belongs to, and the name of that policy's module."""

    name: str
    parameter: nn.Parameter
    policy: Policy
    module_name: str


class Precision:
    """The policies of a model's modules. A parameter belongs to the nearest module around it that has one."""

    def __init__(self, model: nn.Module, given: Mapping[str, Policy]) -> None:
        """Raises ValueError for names without a module, and for shared parameters whose policies disagree."""
        self._policies = weakref.WeakKeyDictionary(_policies(model, given))
        self.follow(model)

    def of(self, parameter: nn.Parameter) -> torch.dtype | None:
        """The dtype in which the parameter is to travel; None: its own."""
        return self._dtypes.get(id(parameter))

    def follow(self, model: nn.Module) -> None:
        """Looks up the parameters that the model holds now."""
        first: dict[int, _Held] = {}
        for held in self._held(model):
            other = first.setdefault(id(held.parameter), held)
            one, two = (cast_dtype(held.parameter, each.policy.param_dtype) for each in (other, held))
            if one != two:
                raise ValueError(
                    f"param_dtype gives the parameter that is both {other.name!r} and {held.name!r} two dtypes, {one}"
                    f" and {two}; give both modules the same"
                )
        self._dtypes = {key: held.policy.param_dtype for key, held in first.items()}  # by the id of the parameter

    def grad_dtype(self, model: nn.Module, given: torch.dtype | None) -> torch.dtype | None:
        """The dtype of all gradients: `given`, or the reduce_dtype of the model's own policy; None: the parameters'.

        Raises ValueError where a policy says another one.
        """
        found = given or self._policies.get(model, Policy()).reduce_dtype
        for name, parameter, policy, module_name in self._held(model):
            dtype = found or parameter.dtype
            if parameter.requires_grad and policy.reduce_dtype not in (None, dtype):
                raise ValueError(
                    f"param_dtype gives module {module_name!r} reduce_dtype={policy.reduce_dtype}, and the gradient of"
                    f" {name!r} is to be in {dtype}: gradients have one dtype in the whole model; give"
                    f" grad_dtype={policy.reduce_dtype}, or reduce_dtype={dtype} here"
                )
        return found

    def _held(self, model: nn.Module) -> Iterator[_Held]:
        nearest: dict[str, tuple[Policy, str]] = {}
        for module_name, module in model.named_modules(remove_duplicate=False):
            around = nearest.get(module_name.rpartition(".")[0], (Policy(), ""))
            own = self._policies.get(module)
            nearest[module_name] = around if own is None else (own, module_name)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield _Held(f"{module_name}.{name}".lstrip("."), parameter, *nearest[module_name])

    def take_part(self) -> None:
        """Inputs and outputs are cast from now on. To be called when the modules are managed: casts come within."""
        for module, policy in self._policies.items():
            casts = _Casts(policy)
            if casts.inputs or casts.outputs:
                take_part(module, casts)

    def withdraw(self) -> None:
        """The inverse of `take_part`."""
        for module in list(self._policies):
            casts = participant_of(module, _Casts)
            if casts is not None:
                withdraw(module, casts)


def cast_dtype(parameter: nn.Parameter, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a parameter has as `dtype`; None: its own."""
    wide = parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1  # float8 weights are left as they are
    return dtype if dtype is not None and wide else parameter.dtype


ParamDtype = torch.dtype | Precision | None  # of a whole model, or looked up for each parameter; None: their own


def precision_of(
    model: nn.Module, param_dtype: torch.dtype | Mapping[str, Policy] | None, grad_dtype: torch.dtype | None
) -> tuple[ParamDtype, torch.dtype | None]:
    """In which dtype parameters travel, and that of gradients. Raises ValueError, as `Precision` does."""
    if not isinstance(param_dtype, Mapping):
        return param_dtype, grad_dtype
    precision = Precision(model, param_dtype)
    return precision, precision.grad_dtype(model, grad_dtype)


class _Casts(Participant):
    """Takes part in the calls of a module with a policy."""

    outer = False

    def __init__(self, policy: Policy) -> None:
        self.inputs = policy.param_dtype if policy.cast_forward_inputs else None
        self.outputs = policy.output_dtype

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        args, kwargs = _cast(self.inputs, args), _cast(self.inputs, kwargs)
        return _cast(self.outputs, forward(*args, **kwargs))

    def stops_compiler(self, module: nn.Module) -> bool:
        """The compiler does not see the casts of a module within what it compiles."""
        return True


def _cast(dtype: torch.dtype | None, value: Any) -> Any:
    return value if dtype is None else map_tensors(value, partial(_to, dtype))


def _to(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _policies(model: nn.Module, given: Mapping[str, Policy]) -> dict[nn.Module, Policy]:
    """The policy of each module that is named. A name counts more than a pattern, and a later one than an earlier."""
    names = {module: name for name, module in model.named_modules()}
    exact = dict(model.named_modules(remove_duplicate=False))
    found: dict[nn.Module, Policy] = {}
    for name, policy in given.items():
        if name not in exact:
            matches = matching(name, names)
            if not matches:
                raise ValueError(
                    f"param_dtype[{name!r}] matches no module; give names or patterns of model.named_modules()"
                )
            found |= dict.fromkeys(matches, policy)
    found |= {exact[name]: policy for name, policy in given.items() if name in exact}
    for module in names:
        if module in found and type(module).forward is nn.Module.forward:  # a list or dict, which is never called
            for child in module.children():
                found.setdefault(child, found[module])
    return found


def matching(pattern: str, names: Mapping[nn.Module, str]) -> list[nn.Module]:
    """The modules whose names match. "*" matches dots, too: the outermost count."""
    found = [module for module, name in names.items() if fnmatchcase(name, pattern)]
    inner = {below for module in found for below in module.modules() if below is not module}
    return [module for module in found if module not in inner]
