"""With which update rules does a run train? One of headrace.optim, or PyTorch's own in a plain run."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import headrace.optim
from headrace.errors import TrainInputError
from headrace.optim.optimizer import HostOptimizer
from headrace.train.checks import named_values
from headrace.train.config import DTYPES, TrainConfig

__all__ = ["Optimizers"]

_OURS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": headrace.optim.AdamW,
    "adam": headrace.optim.Adam,
    "sgd": headrace.optim.SGD,
    "lion": headrace.optim.Lion,
    "adafactor": headrace.optim.Adafactor,
    "muon": headrace.optim.Muon,
}
# Which the same rules of headrace equal bit for bit, for float32 weights.
_STOCK: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


class Optimizers:
    """The optimizer of all trainable parameters; with Muon, which is for matrices, and AdamW for the others."""

    def __init__(self, model: nn.Module, config: TrainConfig, *, plain: bool) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._max_grad_norm = config.max_grad_norm
        if config.optimizer == "muon":
            matrices = _matrices(model)
            others = [parameter for parameter in self._parameters if parameter not in matrices]
            self.all = [_make("muon", list(matrices), config, plain=plain)]
            if others:
                self.all.append(_make("adamw", others, config, plain=plain))
        else:
            self.all = [_make(config.optimizer, self._parameters, config, plain=plain)]

    def step(self) -> None:
        """Clips, where the one optimizer does not do so itself, and updates."""
        if self._max_grad_norm and not (len(self.all) == 1 and isinstance(self.all[0], HostOptimizer)):
            nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        for optimizer in self.all:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad()

    def consolidate(self) -> None:
        """The first rank gets the state of all, where it is dealt out to ranks. They all call this."""
        for optimizer in self.all:
            if isinstance(optimizer, HostOptimizer):
                optimizer.consolidate_state_dict(to=0)

    def held_bytes(self) -> int:
        """Bytes of host memory for the state of headrace's."""
        return sum(optimizer.held_bytes() for optimizer in self.all if isinstance(optimizer, HostOptimizer))


def _make(rule: str, parameters: Sequence[nn.Parameter], config: TrainConfig, *, plain: bool) -> torch.optim.Optimizer:
    own = named_values("optimizer_options", config.optimizer_options) if rule == config.optimizer else {}
    settings: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay, **own}
    exact = config.state_dtype == "float32" and all(parameter.dtype is torch.float32 for parameter in parameters)
    try:
        if plain and exact and rule in _STOCK:
            return _STOCK[rule](parameters, **settings, fused=True)
        if rule == "muon":
            settings = {"adjust_lr_fn": "match_rms_adamw", **settings}  # one learning rate then suits both
        state_dtype = DTYPES.get(config.state_dtype, config.state_dtype)
        settings["state_dtype"] = torch.float32 if rule != config.optimizer else state_dtype
        settings["master_form"] = config.master_form
        if config.optimizer != "muon":
            settings["max_grad_norm"] = config.max_grad_norm or None
        if not plain:
            settings |= _placement(rule, config)
        return _OURS[rule](parameters, **settings)
    except (TypeError, ValueError) as error:
        if own and not isinstance(error, headrace.HeadraceError):
            named = [
                one for one in inspect.signature(_OURS[rule]).parameters.values() if one.kind is not one.VAR_KEYWORD
            ]
            raise TrainInputError(
                f"--optimizer {rule} with {' '.join(config.optimizer_options)}: {error}; options are"
                f" {', '.join(one.name for one in named if one.name != 'params')}"
            ) from error
        raise


def _placement(rule: str, config: TrainConfig) -> dict[str, Any]:
    """What changes where and when updates run, and no result."""
    settings: dict[str, Any] = {"overlap": config.overlap, "tier": config.state_tier}
    if config.state_tier == "disk" and config.disk is not None:
        settings["disk"] = config.disk / ("optimizer" if rule == config.optimizer else f"optimizer-{rule}")
    if config.device_fraction is not None and config.compute_device().type != "cpu":
        settings |= {"device_fraction": config.device_fraction, "overlap_d2h_h2d": config.overlap_d2h_h2d}
    return settings


def _matrices(model: nn.Module) -> dict[nn.Parameter, None]:
    """The trainable matrices that Muon is for: not those of embeddings, nor of the head that gives logits."""
    outside = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    get_head = getattr(model, "get_output_embeddings", None)
    if get_head is not None and (head := get_head()) is not None:
        outside.append(head.weight)
    tables = {id(weight) for weight in outside}
    return {
        parameter: None
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dim() == 2 and id(parameter) not in tables
    }
