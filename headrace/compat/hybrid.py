"""How does code written for Megatron-Core's HybridDeviceOptimizer run on headrace? With the import changed.

| Megatron-Core | here |
|---|---|
| `offload_fraction`: whole parameters, the first ones | the same; checked to be in [0, 1] |
| `cpu_optimizer_cls`, `gpu_optimizer_cls`: the classes that step | one rule of `headrace.optim` by its name, in one |
| | pass over memory; any others of PyTorch, or two rules, step by themselves, as there |
| arguments of TransformerEngine's FusedAdam and FusedSGD | the same (`sub_optimizers.py` says what is refused) |
| `param_update_in_fp32` | always so: low-precision weights have float32 masters |
| `pin_cpu_grads`, `pin_cpu_params` | the same (`pin`) |
| `overlap_cpu_optimizer_d2h_h2d` | `overlap_d2h_h2d` |
| `sub_optimizers` | one: this optimizer |
| CPU results within 1e-3 of the GPU's | for the share on the CPU, bit for bit those of `torch.optim` on the CPU |
| | (AdamW, Adam and SGD with `fused=True`; float32 weights) |

Other keyword arguments are the update rule's own (`lr`, `betas`, ...), as are keys of param groups.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from headrace.compat.sub_optimizers import TorchSteps, our_arguments, shared_rule
from headrace.optim import SGD, Adam, AdamW, Muon
from headrace.optim.optimizer import HostOptimizer
from headrace.optim.rules import AdamRule
from headrace.runtime.tensors import parameters_of

__all__ = ["HybridDeviceOptimizer"]


class HybridDeviceOptimizer(HostOptimizer):
    """An optimizer with `offload_fraction` of its state in host memory and the rest on the parameters' accelerator.

    `cpu_optimizer_cls` and `gpu_optimizer_cls` are classes, or `functools.partial` of them; None means the same as the
    other one, and AdamW if both are None. If both name the same of Adam, AdamW, FusedAdam, SGD, FusedSGD and Muon, the
    rule of `headrace.optim` by that name updates. Any other classes (with `use_torch_optimizer`, these too) step by
    themselves, on whole parameters. Parameters on the
    CPU are updated there, whatever the fraction.

    Raises ValueError for a fraction outside [0, 1], for LBFGS and SparseAdam, and for arguments that do not exist here.
    """

    _corrects = True  # whether moments are corrected for their beginning at zero

    def __new__(cls, params: Any = (), offload_fraction: float = 0.5, *classes: Any, **settings: Any) -> Any:
        if cls is not HybridDeviceOptimizer:
            return super().__new__(cls)
        given = {**dict(zip(("cpu_optimizer_cls", "gpu_optimizer_cls"), classes, strict=False)), **settings}
        return super().__new__(_choose(given)[0])

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
        chosen = {"cpu_optimizer_cls": cpu_optimizer_cls, "gpu_optimizer_cls": gpu_optimizer_cls}
        _, settings = _choose({**settings, **chosen, "use_torch_optimizer": use_torch_optimizer})
        params = _as_groups(params)
        tensors = [tensor for group in params for tensor in _tensors(group)]
        if isinstance(self, Adam | AdamW):
            self._corrects = settings.pop("bias_correction", True)
        super().__init__(
            params,
            device_fraction=0.0 if all(tensor.device.type == "cpu" for tensor in tensors) else 1 - offload_fraction,
            pin=_PINNED[pin_cpu_params, pin_cpu_grads],
            overlap_d2h_h2d=overlap_cpu_optimizer_d2h_h2d,
            **(settings if isinstance(self, TorchSteps) else our_arguments(settings, tensors)),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_corrects": self._corrects}

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose settings and state count: this one."""
        return [self]

    def dummy_step(self) -> None:
        """Creates the state of every parameter, as a step would, but changes no weight; steps are counted from 0."""
        parameters = parameters_of(self)
        gradients = [parameter.grad for parameter in parameters]
        kept = [{name: group[name] for name in ("lr", "weight_decay")} for group in self.param_groups]
        for group in self.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        for parameter in parameters:
            parameter.grad = (
                torch.zeros_like(parameter) if self._local_shards.to_local(parameter) not in self.entries else None
            )
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
        """Copies weights to their masters, after they were written in a way that leaves no trace (`p.data.copy_`)."""
        self.refresh()


class _HybridAdamW(HybridDeviceOptimizer, AdamW):
    def _rule(self, group: dict[str, Any], step: float) -> AdamRule:
        return replace(super()._rule(group, step), bias_correction=self._corrects)


class _HybridAdam(HybridDeviceOptimizer, Adam):
    def _rule(self, group: dict[str, Any], step: float) -> AdamRule:
        return replace(super()._rule(group, step), bias_correction=self._corrects)


class _HybridSGD(HybridDeviceOptimizer, SGD):
    pass


class _HybridMuon(HybridDeviceOptimizer, Muon):
    pass


class _HybridTorch(HybridDeviceOptimizer, TorchSteps):
    def dummy_step(self) -> None:
        """Raises ValueError: not every class can take a step that leaves no trace."""
        raise ValueError(
            "dummy_step() is there for Adam, AdamW, SGD and Muon; state can be loaded without it, by load_state_dict()"
        )


_KINDS: dict[str, type] = {"AdamW": _HybridAdamW, "Adam": _HybridAdam, "SGD": _HybridSGD, "Muon": _HybridMuon}
_PINNED: dict[tuple[bool, bool], Any] = {
    (True, True): True,
    (True, False): "weights",
    (False, True): "gradients",
    (False, False): False,
}


def _choose(given: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    """The kind of optimizer for two classes, and its settings."""
    settings = dict(given)
    cpu, gpu = settings.pop("cpu_optimizer_cls", None), settings.pop("gpu_optimizer_cls", None)
    by_torch = settings.pop("use_torch_optimizer", False)
    cpu, gpu = cpu or gpu or torch.optim.AdamW, gpu or cpu or torch.optim.AdamW
    rule, arguments = shared_rule(cpu, gpu, settings)
    if rule is not None and not by_torch:
        return _KINDS[rule], arguments
    return _HybridTorch, {**settings, "on_host": cpu, "on_device": gpu}


def _as_groups(params: Any) -> list[dict[str, Any]]:
    params = list(params)
    return params if params and isinstance(params[0], dict) else [{"params": params}]


def _tensors(group: dict[str, Any]) -> Iterable[torch.Tensor]:
    held = group["params"]
    held = [held] if isinstance(held, torch.Tensor) else held
    return [entry[1] if isinstance(entry, tuple) else entry for entry in held]
