"""How does an optimizer keep masters, moments and update in host memory? As `headrace.optim.AdamW` does."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import headrace
from headrace.compat.tutorial.configs import OffloadConfig
from headrace.optim import AdamW, threads
from headrace.runtime.device import is_accelerator

__all__ = ["CPUOffloadOptimizer"]


def _of_all_groups(name: str) -> Any:
    """A property for the setting `name`. It reads the first parameter group's value, and sets that of all groups."""

    def get(optimizer: AdamW) -> Any:
        return optimizer.param_groups[0][name]

    def set_for_all(optimizer: AdamW, value: Any) -> None:
        for group in optimizer.param_groups:
            group[name] = value

    return property(get, set_for_all)


class CPUOffloadOptimizer(AdamW):
    """`headrace.optim.AdamW` over the trainable parameters of `model`, with a float32 master where they are narrower.

    It is a `torch.optim.Optimizer`: schedules, GradScaler and `state_dict()` work. Parameters without a gradient are
    not updated. Weights that are loaded later take effect. `lr`, `betas`, `eps` and `weight_decay` may be set at any
    time, as in the tutorial, or in `param_groups`. `handle` is what `headrace.offload` returned (`offload_parameters`).
    """

    lr = _of_all_groups("lr")
    betas = _of_all_groups("betas")
    eps = _of_all_groups("eps")
    weight_decay = _of_all_groups("weight_decay")

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        config: OffloadConfig | None = None,
    ) -> None:
        config = config or OffloadConfig()
        if config.num_threads < 1:
            raise ValueError(f"num_threads={config.num_threads}: the update needs at least 1 thread")
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError(f"no parameter of this {type(model).__name__} is trained; set requires_grad of some")
        self.model, self.config, self.gpu_params = model, config, named
        self.handle = headrace.offload(model) if config.offload_parameters else None
        try:
            on_device = any(is_accelerator(p.device) for p in named.values())
            if not config.offload_optimizer and not on_device and self.handle is not None:
                raise ValueError(
                    "offload_parameters=True with offload_optimizer=False: the weights are updated where they rest, on"
                    " the host; set offload_optimizer=True"
                )
            super().__init__(
                list(named.values()),
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                master_form="full",
                device_fraction=0.0 if config.offload_optimizer or not on_device else 1.0,
                pin=config.pin_memory,
                overlap_d2h_h2d=config.overlap_comm,
                overlap="forward" if config.overlap_comm and self.handle is not None else "none",
            )
        except BaseException:
            if self.handle is not None:
                self.handle.remove()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step, as `headrace.optim.AdamW` does. With `offload_gradients`, frees gradients on an accelerator."""
        with threads.limited_to(min(self.config.num_threads, threads.count())):
            loss = super().step(closure)
        if self.config.offload_gradients:
            for parameter in self.gpu_params.values():
                if is_accelerator(parameter.device):
                    parameter.grad = None
        return loss

    @property
    def step_count(self) -> int:
        """The number of steps taken, with those before a checkpoint was loaded."""
        return max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)

    @property
    def cpu_params(self) -> dict[str, torch.Tensor]:
        """The exact weights in float32 on the host (masters or copies), for reading only. Write to `gpu_params`."""
        return {
            name: (self.state[p]["master"] if "master" in self.state.get(p, {}) else p.detach().float()).cpu()
            for name, p in self.gpu_params.items()
        }

    @property
    def cpu_m(self) -> dict[str, torch.Tensor]:
        """First moments, on the host, of the parameters that were updated."""
        return self._of_state("exp_avg")

    @property
    def cpu_v(self) -> dict[str, torch.Tensor]:
        """Second moments, on the host, of the parameters that were updated."""
        return self._of_state("exp_avg_sq")

    def _of_state(self, kind: str) -> dict[str, torch.Tensor]:
        states = {name: self.state.get(p, {}) for name, p in self.gpu_params.items()}
        return {name: state[kind].cpu() for name, state in states.items() if kind in state}
