"""Where do the weights of a run live? They visit the device, or stay there with only optimizer state on the host."""

import torch
from torch import nn

import headrace
from headrace.config import BlocksSpec
from headrace.errors import TrainInputError
from headrace.train.config import DTYPES, TrainConfig
from headrace.train.model import LoadedModel
from headrace.train.ranks import World


def place(loaded: LoadedModel, config: TrainConfig, world: World) -> headrace.Offloaded | None:
    """Offloads the model as `config` says, and returns its handle; None if all weights stay on the device."""
    try:
        if config.device_fraction is not None:
            _stay(loaded.model, config, world.device)
            return None
        return headrace.offload(
            loaded.model,
            device=world.device,
            device_memory=config.budget_bytes("device_memory", weight_bytes=loaded.weight_bytes),
            host_memory=config.budget_bytes("host_memory", weight_bytes=loaded.weight_bytes),
            disk=config.disk and config.disk / "weights",
            checkpoint=loaded.weight_files,
            blocks=_blocks(config.blocks),
            resident=config.resident,
            prefetch=config.prefetch,
            param_dtype=None if config.param_dtype is None else DTYPES[config.param_dtype],
            grad_dtype=None if config.grad_dtype is None else DTYPES[config.grad_dtype],
            activations=config.activation_settings() or config.offload_activations is not None,
            mesh=world.mesh,
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, headrace.HeadraceError):
            raise
        raise TrainInputError(str(error)) from error  # such as a pattern that matches nothing


def _stay(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    model.to(device)
    settings = config.activation_settings()
    if settings is not None:
        disk = config.disk / "activations" if config.disk and settings.get("tier") == "disk" else None
        headrace.offload_activations(model, **settings, disk=disk)


def _blocks(given: tuple[str, ...]) -> BlocksSpec:
    """The value for `blocks`: "auto" or a size such as 256MiB, if it is one such word, and else name patterns."""
    only = given[0] if len(given) == 1 else ""
    return only if only == "auto" or only[:1].isdigit() else list(given)
