"""Which models cannot be offloaded? Those whose modules somebody else manages, or that have no Python to be called."""

import torch
from torch import nn

from millrace.activations.watched import watcher_of
from millrace.engine.managed import site_of
from millrace.errors import StateError

__all__ = ["refuse_unmanageable"]


def refuse_unmanageable(model: nn.Module) -> None:
    """Raises StateError for a model that something else manages already, or that cannot be; names the module."""
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise StateError(
                f"{where} is compiled by TorchScript, which millrace cannot manage; offload it before that"
            )
        if watcher_of(module) is not None:
            raise StateError(
                f"the activations of {where} are offloaded already; call remove() on that handle, and pass"
                " activations=True here"
            )
        if site_of(module) is not None:
            raise StateError(f"{where} is offloaded already; use that handle, or call remove() on it first")
        if hasattr(module, "_hf_hook"):
            raise StateError(
                f"{where} carries an accelerate hook, which moves weights too; call"
                " accelerate.hooks.remove_hook_from_submodules(model) first, and load without device_map"
            )
        if getattr(module, "_diffusers_hook", None) is not None:
            raise StateError(
                f"{where} carries a diffusers hook, which moves weights too; disable group offloading first"
            )
