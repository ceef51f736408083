"""How do optimizers of PyTorch and of TransformerEngine run as shares of a hybrid one? By their class and arguments."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from headrace.optim.optimizer import HostOptimizer
from headrace.optim.options import Given, Options, snapshot
from headrace.optim.rules import MatrixRule
from headrace.optim.weights import FULL, REMAINDER

__all__ = ["TorchSteps", "our_arguments", "shared_rule"]

_RULES = {"adamw": "AdamW", "fusedadam": "AdamW", "cpuadam": "AdamW", "adam": "Adam", "sgd": "SGD", "fusedsgd": "SGD"}
_RULES["muon"] = "Muon"
_HOW_IT_IS_COMPUTED = ("fused", "foreach", "capturable", "differentiable")  # settings that change no result
_NOT_BY_PARAMETER = {"LBFGS": "it needs the closure many times in a step", "SparseAdam": "its gradients are sparse"}


def shared_rule(one: Any, other: Any, settings: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The optimizer of headrace that updates both shares as these two classes would, and its settings; or None."""
    (kind, given), (other_kind, also_given) = _unwrapped(one), _unwrapped(other)
    rules = {_rule_of(kind, {**given, **settings}), _rule_of(other_kind, {**also_given, **settings})}
    alike = kind is other_kind or not given or not also_given or _telling(given) == _telling(also_given)
    both = {**given, **also_given, **settings}
    return (rules.pop() if len(rules) == 1 and alike else None), both


def _telling(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in ("adam_w_mode", *_HOW_IT_IS_COMPUTED)}


def _unwrapped(kind: Any) -> tuple[Any, dict[str, Any]]:
    """The class, and the arguments that `functools.partial` has put around it."""
    if isinstance(kind, functools.partial):
        inner, arguments = _unwrapped(kind.func)
        return inner, {**arguments, **kind.keywords}
    return kind, {}


def _rule_of(kind: Any, arguments: dict[str, Any]) -> str | None:
    """The optimizer of headrace with the rule of a class of this name, if there is one."""
    rule = _RULES.get(kind.__name__.lower())
    return "Adam" if rule == "AdamW" and not arguments.get("adam_w_mode", True) else rule


# TransformerEngine's arguments ---------------------------------------------------------------------------------------
def our_arguments(settings: dict[str, Any], tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    """What FusedAdam and FusedSGD are told, in our words. Raises ValueError, by name, for what does not exist here."""
    settings = {name: value for name, value in settings.items() if name not in _HOW_IT_IS_COMPUTED}
    for name in ("adam_w_mode", "materialize_master_grads"):  # the first has chosen the rule
        settings.pop(name, None)
    for name, (allowed, instead) in _ONE_VALUE.items():
        if name in settings and settings.pop(name) not in allowed:
            raise ValueError(f"{name} is available as {allowed[0]} only: {instead}")
    if not settings.pop("master_weights", True):
        for index, tensor in enumerate(tensors):
            if tensor.dtype in (torch.bfloat16, torch.float16):
                raise ValueError(
                    f"master_weights=False, and parameter {index} is {tensor.dtype}: low-precision weights have float32"
                    " masters here; leave it out"
                )
    if "store_param_remainders" in settings:
        settings["master_form"] = "split" if settings.pop("store_param_remainders") else "full"
    moments: dict[str, torch.dtype] = {
        name: settings.pop(name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if name in settings
    }
    if moments:
        settings["state_dtype"] = _moment_dtype(moments)
    return settings


_ONE_VALUE: dict[str, tuple[tuple[Any, ...], str]] = {
    "master_weight_dtype": ((torch.float32,), "masters are float32"),
    "use_decoupled_grad": ((False,), "gradients are read from .grad, which may have a dtype of its own (grad_dtype)"),
    "set_grad_none": ((None, True), "call zero_grad(set_to_none=False)"),
    "wd_after_momentum": ((False,), "weight decay is added before the momentum, as in torch.optim.SGD"),
}


def _moment_dtype(given: dict[str, torch.dtype]) -> torch.dtype:
    wanted = {"exp_avg_dtype": torch.float32, "exp_avg_sq_dtype": torch.float32, **given}
    dtypes = set(wanted.values())
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        raise ValueError(
            f"exp_avg_dtype={wanted['exp_avg_dtype']} with exp_avg_sq_dtype={wanted['exp_avg_sq_dtype']} is not"
            ' available; both may be torch.float32, or both torch.bfloat16; state_dtype="8bit" takes less'
        )
    return dtypes.pop()


# any class of PyTorch ------------------------------------------------------------------------------------------------
class TorchSteps(HostOptimizer):
    """Runs optimizers of PyTorch: one class for the parameters on the host, and one for those that stay on the device.

    The arithmetic is that of the class itself, on whole parameters: float32 (or float64) weights get its bits, and
    low-precision ones have a float32 master that it updates.
    """

    _updates_whole = True

    def __init__(self, params: Any, *, on_host: Any, on_device: Any, **settings: Any) -> None:
        settings = {name: value for name, value in settings.items() if name not in ("capturable", "differentiable")}
        own = {name: settings.pop(name) for name in Given.__annotations__ if name in settings}
        self._kinds = {"host": (*_unwrapped(on_host), settings), "device": (*_unwrapped(on_device), settings)}
        super().__init__(
            params,
            options=Options(**own),
            defaults={**self._defaults("device"), **self._defaults("host")},
        )

    def _defaults(self, where: str) -> dict[str, Any]:
        """The settings of a class, and those that it was not given. It raises for what it does not take."""
        kind, arguments, settings = self._kinds[where]
        reason = _NOT_BY_PARAMETER.get(kind.__name__)
        if reason is not None:
            raise ValueError(f"{kind.__name__} cannot run as a share of a hybrid optimizer: {reason}")
        probe = kind([nn.Parameter(torch.zeros(1, device="cpu"))], **{**arguments, **settings})
        return dict(probe.defaults)

    def _rule(self, group: dict[str, Any], step: float) -> MatrixRule:
        return MatrixRule(functools.partial(_torch_step, self._kinds, snapshot(group)))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kinds": self._kinds}


def _torch_step(
    kinds: dict[str, Any],
    group: dict[str, Any],
    state: dict[str, Any],
    weight: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    kind, arguments, settings = kinds["host" if weight.device.type == "cpu" else "device"]
    parameter = nn.Parameter(weight)
    parameter.grad = gradient
    own = {name: value for name, value in group.items() if name != "param_names"}
    inner = kind([{"params": [parameter], **own}], **{**arguments, **settings})
    inner.state[parameter] = {name: value for name, value in state.items() if name not in (REMAINDER, FULL)}
    _plain_step(kind)(inner)
    state.update(inner.state[parameter])


def _plain_step(kind: Any) -> Callable[[Any], Any]:
    """`step` without the hooks on any optimizer's step: this one is a part of another, which has called them."""
    step = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]
