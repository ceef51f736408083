"""How does code written for Megatron-Core's HybridDeviceOptimizer run on headrace? With the import changed.

Classes of PyTorch and of TransformerEngine that update the shares are known by their names and arguments. What differs
is in docs/coming_from/megatron.md.
"""

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headrace.optim import SGD, Adam, AdamW, Muon
from headrace.optim.optimizer import HostOptimizer
from headrace.optim.options import Given, Options, snapshot
from headrace.optim.rules import AdamRule, MatrixRule
from headrace.optim.weights import FULL, REMAINDER
from headrace.runtime.tensors import parameters_of

__all__ = ["HybridDeviceOptimizer", "TorchSteps", "tensor_of"]

# Arguments that change no result: they say how it is computed, or (adam_w_mode) have already chosen the rule.
_SAY_NOTHING = ("adam_w_mode", "fused", "foreach", "capturable", "differentiable")
_NOT_BY_PARAMETER = {"LBFGS": "it needs the closure many times in a step", "SparseAdam": "its gradients are sparse"}


# TransformerEngine's arguments ---------------------------------------------------------------------------------------
_ONE_VALUE: dict[str, tuple[tuple[Any, ...], str]] = {
    "master_weight_dtype": ((torch.float32,), "masters are float32"),
    "use_decoupled_grad": ((False,), "gradients are read from .grad, which may have a dtype of its own (grad_dtype)"),
    "set_grad_none": ((None, True), "call zero_grad(set_to_none=False)"),
    "wd_after_momentum": ((False,), "weight decay is added before the momentum, as in torch.optim.SGD"),
}


def _our_arguments(settings: dict[str, Any], tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Arguments of FusedAdam and FusedSGD under headrace's names. Raises ValueError for those that headrace lacks."""
    says_nothing = ("materialize_master_grads", *_SAY_NOTHING)
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
_EACH_ITS_OWN = "of_each_class"  # a group's key for settings not given, whose defaults differ by class


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
    # Without the hooks on all optimizers' steps: the hybrid optimizer, which runs this, has called them.
    step = kind.func.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(inner)
    state.update(inner.state[parameter])


# the hybrid -----------------------------------------------------------------------------------------------------------
class HybridDeviceOptimizer(HostOptimizer):
    """An optimizer with `offload_fraction` of its state in host memory and the rest on the parameters' accelerator.

    As in Megatron, the first parameters are those on the host, each as a whole. `cpu_optimizer_cls` and
    `gpu_optimizer_cls` are classes, or `functools.partial` of them. None means the same as the other one, or AdamW if
    both are None. If both name the same one of Adam, AdamW, FusedAdam, SGD, FusedSGD and Muon, the optimizer of that
    name in `headrace.optim` does the updates, with float32 masters of low-precision weights, whatever
    `param_update_in_fp32` says. Any other classes (and with `use_torch_optimizer`, these too) take their own steps, on
    whole parameters. Parameters on the CPU are updated there, whatever the fraction. `pin_cpu_grads` and
    `pin_cpu_params` are `pin` of `headrace.optim.AdamW`, and `overlap_cpu_optimizer_d2h_h2d` is its `overlap_d2h_h2d`.
    Other settings, and keys of param groups, are those of the classes (of TransformerEngine's, too) and of
    `headrace.optim`.

    Raises ValueError for a fraction outside [0, 1], for LBFGS and SparseAdam, and for arguments that do not exist here.
    """

    _corrects = True  # whether moments are corrected for starting at zero

    def __init__(
        self,
        params: Any,
        offload_fraction: float = 0.5,
        cpu_optimizer_cls: Any = None,
        gpu_optimizer_cls: Any = None,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        *,
        use_torch_optimizer: bool = False,
        **settings: Any,
    ) -> None:
        if isinstance(offload_fraction, bool) or not 0 <= offload_fraction <= 1:
            raise ValueError(f"offload_fraction={offload_fraction!r} is outside [0, 1]")
        kind, settings = _choose(cpu_optimizer_cls, gpu_optimizer_cls, settings, by_torch=use_torch_optimizer)
        if type(self) is HybridDeviceOptimizer:
            self.__class__ = kind  # which has the rule, too
        groups = _as_groups(params)
        tensors = [tensor_of(one) for group in groups for one in group["params"]]
        if isinstance(self, Adam | AdamW):
            self._corrects = settings.pop("bias_correction", True)
        super().__init__(
            groups,
            device_fraction=0.0 if all(tensor.device.type == "cpu" for tensor in tensors) else 1 - offload_fraction,
            pin=_PINNED[pin_cpu_params, pin_cpu_grads],
            overlap_d2h_h2d=overlap_cpu_optimizer_d2h_h2d,
            **(settings if isinstance(self, TorchSteps) else _our_arguments(settings, tensors)),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_corrects": self._corrects}

    def _rule(self, group: dict[str, Any], step: float) -> Any:
        rule = super()._rule(group, step)
        return replace(rule, bias_correction=self._corrects) if isinstance(rule, AdamRule) else rule

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose settings and state count. There is only this one."""
        return [self]

    def dummy_step(self) -> None:
        """Creates the state of every parameter, as a step would, but changes no weight; steps are counted from 0.

        Raises ValueError if the classes take their own steps, because not every class can take a step that leaves no
        trace.
        """
        if isinstance(self, TorchSteps):
            raise ValueError(
                "dummy_step() is there for Adam, AdamW, SGD and Muon; state can be loaded without it, by"
                " load_state_dict()"
            )
        groups = [(group, dict(group)) for group in self.param_groups]
        gradients = [(parameter, parameter.grad) for parameter in parameters_of(self)]
        fresh = {parameter for parameter, _ in gradients if self._local_shards.to_local(parameter) not in self.entries}
        try:
            for group, _ in groups:
                group.update(lr=0.0, weight_decay=0.0)
            for parameter, _ in gradients:
                parameter.grad = torch.zeros_like(parameter) if parameter in fresh else None
            self.step()
        finally:
            for group, before in groups:
                group.update(before)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for parameter in fresh:
                if "step" in self.state[parameter]:
                    self.state[parameter]["step"].zero_()

    def update_fp32_param_by_new_param(self) -> None:
        """Copies weights to their masters. Needed after writes to weights that leave no trace (`p.data.copy_`)."""
        self.refresh()


class _HybridAdamW(HybridDeviceOptimizer, AdamW):
    pass


class _HybridAdam(HybridDeviceOptimizer, Adam):
    pass


class _HybridSGD(HybridDeviceOptimizer, SGD):
    pass


class _HybridMuon(HybridDeviceOptimizer, Muon):
    pass


class _HybridTorch(HybridDeviceOptimizer, TorchSteps):
    pass


_BY_NAME: dict[str, type] = {  # the optimizer of the same rule, by a class's name in lower case
    **dict.fromkeys(("adamw", "fusedadam", "cpuadam"), _HybridAdamW),
    **dict.fromkeys(("sgd", "fusedsgd"), _HybridSGD),
    "adam": _HybridAdam,
    "muon": _HybridMuon,
}
_PINNED: dict[tuple[bool, bool], Any] = {
    (True, True): True,
    (True, False): "weights",
    (False, True): "gradients",
    (False, False): False,
}


def _choose(cpu: Any, gpu: Any, settings: dict[str, Any], *, by_torch: bool) -> tuple[Any, dict[str, Any]]:
    """The class that does the updates for these two classes, and its settings."""
    pair = cpu or gpu or torch.optim.AdamW, gpu or cpu or torch.optim.AdamW
    kinds = {_kind_of(functools.partial(one, **settings)) for one in pair}
    own = [functools.partial(one).keywords for one in pair]
    telling = [{name: value for name, value in each.items() if name not in _SAY_NOTHING} for each in own]
    if by_torch or len(kinds) > 1 or None in kinds or (all(telling) and telling[0] != telling[1]):
        return _HybridTorch, {**settings, "on_host": pair[0], "on_device": pair[1]}
    return kinds.pop(), {**own[0], **own[1], **settings}


def _kind_of(kind: "functools.partial[Any]") -> Any:
    """The class with the rule of `kind`, which is known by its name; None if there is none."""
    found = _BY_NAME.get(kind.func.__name__.lower())
    return _HybridAdam if found is _HybridAdamW and not kind.keywords.get("adam_w_mode", True) else found


def tensor_of(parameter: Any) -> torch.Tensor:
    """The tensor of a parameter that is given alone, or after its name."""
    tensor: torch.Tensor = parameter[1] if isinstance(parameter, tuple) else parameter
    return tensor


def _as_groups(params: Any) -> list[dict[str, Any]]:
    """`params` as param groups, each with a list of parameters."""
    params = list(params)
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    lists = ([one] if isinstance(one := group["params"], torch.Tensor) else list(one) for group in groups)
    return [{**group, "params": held} for group, held in zip(groups, lists, strict=True)]
