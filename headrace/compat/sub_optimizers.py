"""How do PyTorch's and TransformerEngine's optimizers run as shares of a hybrid one? By their class and arguments."""

import functools
from collections.abc import Iterable
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
    """The headrace optimizer that updates both shares as the two classes would (None: there is none), and settings."""
    kinds = functools.partial(one, **settings), functools.partial(other, **settings)
    given = [_telling(functools.partial(kind).keywords) for kind in (one, other)]
    rules = {_rule_of(kind.func, kind.keywords) for kind in kinds}
    alike = not all(given) or given[0] == given[1]
    return (rules.pop() if len(rules) == 1 and alike else None), {**kinds[0].keywords, **kinds[1].keywords}


def _telling(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in ("adam_w_mode", *_HOW_IT_IS_COMPUTED)}


def _rule_of(kind: Any, arguments: dict[str, Any]) -> str | None:
    """The name of the headrace optimizer with the same rule as `kind`, found by its class name; None if none has it."""
    rule = _RULES.get(kind.__name__.lower())
    return "Adam" if rule == "AdamW" and not arguments.get("adam_w_mode", True) else rule


# TransformerEngine's arguments ---------------------------------------------------------------------------------------
_ONE_VALUE: dict[str, tuple[tuple[Any, ...], str]] = {
    "master_weight_dtype": ((torch.float32,), "masters are float32"),
    "use_decoupled_grad": ((False,), "gradients are read from .grad, which may have a dtype of its own (grad_dtype)"),
    "set_grad_none": ((None, True), "call zero_grad(set_to_none=False)"),
    "wd_after_momentum": ((False,), "weight decay is added before the momentum, as in torch.optim.SGD"),
}


def our_arguments(settings: dict[str, Any], tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Arguments of FusedAdam and FusedSGD under headrace's names. Raises ValueError for those that headrace lacks."""
    says_nothing = ("adam_w_mode", "materialize_master_grads", *_HOW_IT_IS_COMPUTED)  # the first has chosen the rule
    settings = {name: value for name, value in settings.items() if name not in says_nothing}
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
    if "exp_avg_dtype" in settings or "exp_avg_sq_dtype" in settings:
        first, second = (settings.pop(name, torch.float32) for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
        if first != second or first not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"exp_avg_dtype={first} with exp_avg_sq_dtype={second} is not available; both may be torch.float32, or"
                ' both torch.bfloat16; state_dtype="8bit" takes less'
            )
        settings["state_dtype"] = first
    return settings


# any class of PyTorch ------------------------------------------------------------------------------------------------
_EACH_ITS_OWN = "of_each_class"  # the key in a param group for settings it was not given whose defaults differ


class TorchSteps(HostOptimizer):
    """Runs optimizers of PyTorch: one class for the parameters on the host, and one for those that stay on the device.

    The arithmetic is that of the class itself, on whole parameters: float32 (or float64) weights get its bits, and
    low-precision ones have a float32 master that it updates.
    """

    _updates_whole = True

    def __init__(self, params: Any, *, on_host: Any, on_device: Any, **settings: Any) -> None:
        settings = {name: value for name, value in settings.items() if name not in ("capturable", "differentiable")}
        own = {name: settings.pop(name) for name in Given.__annotations__ if name in settings}
        self._kinds = {
            "host": functools.partial(on_host, **settings),
            "device": functools.partial(on_device, **settings),
        }
        defaults = {**self._defaults("device"), **self._defaults("host")}
        self._differ = [name for name, value in self._defaults("device").items() if value != defaults[name]]
        super().__init__(params, options=Options(**own), defaults=defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        not_given = [name for name in self._differ if name not in param_group]
        super().add_param_group({**param_group, _EACH_ITS_OWN: not_given} if not_given else param_group)

    def _defaults(self, where: str) -> dict[str, Any]:
        """All settings of the class, its defaults included. The class raises for settings that it does not take."""
        kind = self._kinds[where]
        reason = _NOT_BY_PARAMETER.get(kind.func.__name__)
        if reason is not None:
            raise ValueError(f"{kind.func.__name__} cannot run as a share of a hybrid optimizer: {reason}")
        return dict(kind([nn.Parameter(torch.zeros(1, device="cpu"))]).defaults)

    def _rule(self, group: dict[str, Any], step: float) -> MatrixRule:
        unchanged = [name for name in group.get(_EACH_ITS_OWN, ()) if group[name] == self.defaults[name]]
        others = ("param_names", _EACH_ITS_OWN, *unchanged)
        settings = {name: value for name, value in snapshot(group).items() if name not in others}
        return MatrixRule(functools.partial(_torch_step, self._kinds, settings))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kinds": self._kinds, "_differ": self._differ}


def _torch_step(
    kinds: dict[str, Any],
    settings: dict[str, Any],
    state: dict[str, Any],
    weight: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    kind: Any = kinds["host" if weight.device.type == "cpu" else "device"]
    parameter = nn.Parameter(weight)
    parameter.grad = gradient
    inner = kind([{"params": [parameter], **settings}])
    inner.state[parameter] = {name: value for name, value in state.items() if name not in (REMAINDER, FULL)}
    # Without the hooks on all optimizers' steps: the optimizer that this is a part of has called them.
    step = kind.func.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(inner)
    state.update(inner.state[parameter])
