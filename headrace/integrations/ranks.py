"""How do frameworks that start several ranks leave a model unwrapped, because headrace averages its gradients?

accelerate, and with it transformers' Trainer and TRL: `leave_unwrapped`. Lightning: the strategies in lightning.py.
"""

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from headrace.api import Offloaded
from headrace.errors import StateError
from headrace.live import handles_of
from headrace.optim.optimizer import HostOptimizer
from headrace.runtime.ranks import Ranks

__all__ = ["leave_unwrapped"]


def leave_unwrapped(trainer: Any) -> None:
    """Makes a Trainer, or an Accelerator, leave models unwrapped that were offloaded with `mesh=`.

    Call it on all ranks, before `trainer.train()` or `accelerator.prepare(...)`. Accumulation then averages once for
    each step, as with DistributedDataParallel. Checkpoints of the trainer, and those of `accelerator.save_state`, have
    the state of headrace's optimizers from all ranks.

    A model with parameters to train that were not offloaded with `mesh=` raises StateError when it is prepared.
    """
    accelerator = getattr(trainer, "accelerator", trainer)
    accelerator.prepare_model = partial(_prepare_model, accelerator.prepare_model)
    accelerator.no_sync = partial(_no_sync, accelerator.no_sync)
    if accelerator is trainer:
        accelerator.register_save_state_pre_hook(lambda *_: consolidate(accelerator._optimizers))
    else:
        trainer.save_model = partial(_save_model, trainer, trainer.save_model)
        own = trainer._save_optimizer_and_scheduler
        trainer._save_optimizer_and_scheduler = partial(_save_optimizer, trainer, own)


def _prepare_model(
    own: Any, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
) -> nn.Module:
    """`own` prepares all but the wrapper for a model that is evaluated."""
    prepared: nn.Module = own(model, device_placement, evaluation_mode or is_averaged(model))
    return prepared


def _no_sync(own: Any, model: nn.Module) -> Any:
    return no_sync(model) if is_averaged(model) else own(model)


def _save_model(trainer: Any, own: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
    """With `_internal_call`, all ranks begin a checkpoint."""
    with as_one(f"save {output_dir}", trainer.args) if _internal_call else contextlib.nullcontext():
        own(output_dir, _internal_call=_internal_call)


def _save_optimizer(trainer: Any, own: Any, output_dir: str) -> None:
    consolidate([trainer.optimizer])
    with as_one(f"save {output_dir}", trainer.args):
        own(output_dir)


def as_one(what: str, args: Any) -> contextlib.AbstractContextManager[None]:
    """Encloses what the first rank of a Trainer does alone. If it raises, all ranks do; see `Ranks.as_one`."""
    if args.world_size == 1:
        return contextlib.nullcontext()
    return Ranks(torch.distributed.group.WORLD, args.device.type).as_one(what)


def consolidate(optimizers: Iterable[Any]) -> None:
    """The first rank's `state_dict()` has the state of all ranks, for headrace's optimizers. A collective."""
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if isinstance(inner, HostOptimizer):
            inner.consolidate_state_dict(to=0)


def is_averaged(model: nn.Module) -> bool:
    """Whether headrace averages the model's gradients over ranks.

    Raises StateError if it does so for a part of the parameters to train.
    """
    handles = [handle for handle in handles_of(model) if isinstance(handle, Offloaded) and handle.averages]
    for name, parameter in model.named_parameters():
        if handles and parameter.requires_grad and not any(handle.manages(parameter) for handle in handles):
            raise StateError(
                f"parameter {name!r} was not offloaded with mesh=, as others of the {type(model).__name__} were, so its"
                " gradient would be averaged by nobody; offload the whole model, with its adapters:"
                " headrace.offload(model, mesh=mesh)"
            )
    return bool(handles)


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """What `Offloaded.no_sync` is for all models that are parts of this one."""
    with contextlib.ExitStack() as stack:
        for handle in handles_of(model):
            if isinstance(handle, Offloaded) and handle.averages:
                stack.enter_context(handle.no_sync())
        yield
