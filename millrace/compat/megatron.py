"""How does code written for Megatron-Core's HybridDeviceOptimizer run on millrace? With the import changed.

| Megatron-Core | here |
|---|---|
| `offload_fraction`: whole parameters, the first ones | the first ones, split inside a tensor: exact to 128 elements; |
| | checked to be in [0, 1] |
| `cpu_optimizer_cls`, `gpu_optimizer_cls`: the classes that step | names of an update rule of `millrace.optim` |
| `param_update_in_fp32` | always so: low-precision weights have float32 masters |
| `pin_cpu_grads`, `pin_cpu_params` | `pin`: both or neither |
| `overlap_cpu_optimizer_d2h_h2d` | `overlap_d2h_h2d` |
| `sub_optimizers` | one: this optimizer |
| CPU results within 1e-3 of the GPU's | for the share that is there, bit for bit those of `torch.optim` on the CPU |
| | (AdamW, Adam and SGD with `fused=True`; float32 weights) |

Other keyword arguments are the update rule's own (`lr`, `betas`, ...), as are keys of param groups.
"""

from collections.abc import Iterable
from typing import Any

import torch

from millrace.optim import SGD, Adam, AdamW, Muon
from millrace.optim.optimizer import HostOptimizer
from millrace.runtime.tensors import parameters_of

__all__ = ["HybridDeviceOptimizer"]

_RULES = {"adamw": "AdamW", "fusedadam": "AdamW", "cpuadam": "AdamW", "adam": "Adam", "sgd": "SGD", "fusedsgd": "SGD"}
_RULES["muon"] = "Muon"
_HOW_IT_IS_COMPUTED = ("fused", "foreach", "capturable", "differentiable")  # settings that change no result


class HybridDeviceOptimizer(HostOptimizer):
    """An optimizer with `offload_fraction` of its state in host memory and the rest on the parameters' accelerator.

    `cpu_optimizer_cls` and `gpu_optimizer_cls` are classes named Adam, AdamW, FusedAdam, SGD, FusedSGD or Muon; None
    takes the other one's rule, or AdamW. Parameters on the CPU are updated there, whatever the fraction.

    Raises ValueError for a fraction outside [0, 1], for classes of two different rules or of one that is not known,
    and for pinning of gradients without weights or the other way round.
    """

    def __new__(cls, params: Any = (), offload_fraction: float = 0.5, *classes: Any, **settings: Any) -> Any:
        if cls is not HybridDeviceOptimizer:
            return super().__new__(cls)
        names = ("cpu_optimizer_cls", "gpu_optimizer_cls")
        given = {**dict(zip(names, classes, strict=False)), **settings}
        return super().__new__(_KINDS[_rule(*(given.get(name) for name in names))])

    def __init__(
        self,
        params: Any,
        offload_fraction: float = 0.5,
        cpu_optimizer_cls: type | None = None,
        gpu_optimizer_cls: type | None = None,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        **settings: Any,
    ) -> None:
        if isinstance(offload_fraction, bool) or not 0 <= offload_fraction <= 1:
            raise ValueError(f"offload_fraction={offload_fraction!r} is outside [0, 1]")
        if pin_cpu_grads != pin_cpu_params:
            raise ValueError(
                f"pin_cpu_grads={pin_cpu_grads} with pin_cpu_params={pin_cpu_params}: gradients and weights share their"
                " memory here; pin both or neither"
            )
        params = _as_groups(params)
        on_host = all(parameter.device.type == "cpu" for group in params for parameter in _tensors(group))
        super().__init__(
            params,
            device_fraction=0.0 if on_host else 1 - offload_fraction,
            pin=pin_cpu_params,
            overlap_d2h_h2d=overlap_cpu_optimizer_d2h_h2d,
            **{name: value for name, value in settings.items() if name not in _HOW_IT_IS_COMPUTED},
        )

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        """Those whose settings and state count: this one."""
        return [self]

    def dummy_step(self) -> None:
        """Makes the state of every parameter, as a step would, and changes no weight; steps are counted from 0."""
        parameters = parameters_of(self)
        gradients = [parameter.grad for parameter in parameters]
        kept = [{name: group[name] for name in ("lr", "weight_decay")} for group in self.param_groups]
        for group in self.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter not in self.entries else None
        try:
            self.step()
        finally:
            for group, settings in zip(self.param_groups, kept, strict=True):
                group.update(settings)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                fresh = parameter.grad is not None
                parameter.grad = gradient
                if fresh and "step" in self.state[parameter]:
                    self.state[parameter]["step"].zero_()

    def update_fp32_param_by_new_param(self) -> None:
        """Masters follow weights that were written without a trace (`p.data.copy_`)."""
        self.refresh()


class _HybridAdamW(HybridDeviceOptimizer, AdamW):
    pass


class _HybridAdam(HybridDeviceOptimizer, Adam):
    pass


class _HybridSGD(HybridDeviceOptimizer, SGD):
    pass


class _HybridMuon(HybridDeviceOptimizer, Muon):
    pass


_KINDS: dict[str, type] = {"AdamW": _HybridAdamW, "Adam": _HybridAdam, "SGD": _HybridSGD, "Muon": _HybridMuon}


def _rule(cpu: type | None, gpu: type | None) -> str:
    rules = {}
    for name, kind in (("cpu_optimizer_cls", cpu), ("gpu_optimizer_cls", gpu)):
        if kind is not None:
            rule = _RULES.get(kind.__name__.lower())
            if rule is None:
                raise ValueError(f"{name}={kind.__name__} is none of {', '.join(sorted(set(_RULES.values())))}")
            rules[name] = rule
    if len(set(rules.values())) > 1:
        raise ValueError(f"the two shares need one update rule, and these are two: {rules}")
    return next(iter(rules.values()), "AdamW")


def _as_groups(params: Any) -> list[dict[str, Any]]:
    params = list(params)
    return params if params and isinstance(params[0], dict) else [{"params": params}]


def _tensors(group: dict[str, Any]) -> Iterable[torch.Tensor]:
    held = group["params"]
    held = [held] if isinstance(held, torch.Tensor) else held
    return [entry[1] if isinstance(entry, tuple) else entry for entry in held]
