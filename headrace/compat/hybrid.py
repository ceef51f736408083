"""How does code written for Megatron-Core's HybridDeviceOptimizer run on headrace? With the import changed.

What differs is in docs/coming_from/megatron.md.
"""

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

    _corrects = True  # whether moments are corrected for their beginning at zero

    def __new__(
        cls,
        params: Any = (),
        offload_fraction: float = 0.5,
        cpu_optimizer_cls: Any = None,
        gpu_optimizer_cls: Any = None,
        *others: Any,
        use_torch_optimizer: bool = False,
        **settings: Any,
    ) -> Any:
        if cls is HybridDeviceOptimizer:
            cls, _ = _choose(cpu_optimizer_cls, gpu_optimizer_cls, settings, by_torch=use_torch_optimizer)
        return super().__new__(cls)

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
        _, settings = _choose(cpu_optimizer_cls, gpu_optimizer_cls, settings, by_torch=use_torch_optimizer)
        groups = _as_groups(params)
        tensors = [one[1] if isinstance(one, tuple) else one for group in groups for one in group["params"]]
        if isinstance(self, Adam | AdamW):
            self._corrects = settings.pop("bias_correction", True)
        super().__init__(
            groups,
            device_fraction=0.0 if all(tensor.device.type == "cpu" for tensor in tensors) else 1 - offload_fraction,
            pin=_PINNED[pin_cpu_params, pin_cpu_grads],
            overlap_d2h_h2d=overlap_cpu_optimizer_d2h_h2d,
            **(settings if isinstance(self, TorchSteps) else our_arguments(settings, tensors)),
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
        parameters = parameters_of(self)
        gradients = [parameter.grad for parameter in parameters]
        kept = [{name: group[name] for name in ("lr", "weight_decay")} for group in self.param_groups]
        for group in self.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        fresh = [parameter for parameter in parameters if self._local_shards.to_local(parameter) not in self.entries]
        for parameter in parameters:
            parameter.grad = None
        for parameter in fresh:
            parameter.grad = torch.zeros_like(parameter)
        try:
            self.step()
        finally:
            for group, settings in zip(self.param_groups, kept, strict=True):
                group.update(settings)
            for parameter, gradient in zip(parameters, gradients, strict=True):
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


_KINDS: dict[str, type] = {"AdamW": _HybridAdamW, "Adam": _HybridAdam, "SGD": _HybridSGD, "Muon": _HybridMuon}
_PINNED: dict[tuple[bool, bool], Any] = {
    (True, True): True,
    (True, False): "weights",
    (False, True): "gradients",
    (False, False): False,
}


def _choose(cpu: Any, gpu: Any, settings: dict[str, Any], *, by_torch: bool) -> tuple[type, dict[str, Any]]:
    """The class that does the updates for these two classes, and its settings."""
    cpu, gpu = cpu or gpu or torch.optim.AdamW, gpu or cpu or torch.optim.AdamW
    rule, arguments = shared_rule(cpu, gpu, settings)
    if rule is not None and not by_torch:
        return _KINDS[rule], arguments
    return _HybridTorch, {**settings, "on_host": cpu, "on_device": gpu}


def _as_groups(params: Any) -> list[dict[str, Any]]:
    """`params` as param groups, each with a list of parameters."""
    params = list(params)
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    held = [group["params"] for group in groups]
    lists = [[one] if isinstance(one, torch.Tensor) else list(one) for one in held]
    return [{**group, "params": one} for group, one in zip(groups, lists, strict=True)]
