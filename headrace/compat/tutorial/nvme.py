"""How do all parameters of a model rest on a drive, and come to the device by name? Through blocks in a pinned ring."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from headrace.compat.tutorial.configs import NVMeConfig
from headrace.compat.tutorial.managed import ManagedModel, OwnDirectory, device_of
from headrace.compat.tutorial.tensors import TieredTensors
from headrace.memory.ledger import Tier
from headrace.runtime.device import resolve_device

__all__ = ["NVMeOffloadManager"]


class NVMeOffloadManager(ManagedModel):
    """Parameters of `model` rest on disk. Host memory holds `aio_queue_depth` blocks, whatever the model's size.

    `device`: where they are loaded; default the model's accelerator, or this machine's.
    """

    def __init__(
        self, model: nn.Module, config: NVMeConfig | None = None, *, device: torch.device | str | None = None
    ) -> None:
        self.config = config = config or NVMeConfig()
        directory = OwnDirectory(config.nvme_path, config.aio_queue_depth)
        tiers = TieredTensors(
            device_of(model, device),
            device_bytes=config.gpu_memory_limit,
            host_bytes=config.cpu_memory_limit,
            open_disk=directory.open_store,
            block_bytes=config.block_size,
            blocks_in_flight=config.aio_queue_depth,
            pin=config.pin_memory,
        )
        shapes = {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}
        super().__init__(model, tiers, Tier.DISK, directory)
        self.param_info = {name: (*shapes[name], tiers.location(name).offset) for name in tiers.names}

    def prefetch(self, layer_names: Sequence[str]) -> list[str]:
        """Begins to load these parameters, and returns at once: the names for which the GPU has no room now."""
        return self.tiers.prefetch(layer_names)

    def load_to_gpu(self, name: str, device: torch.device | str | None = None) -> torch.Tensor:
        """The parameter on the GPU, arrived, as often as it is asked for. It loads those that follow ahead.

        Raises ValueError for another device than the manager's, BudgetError when there is no room.
        """
        if device is not None and resolve_device(device) != self.device:
            raise ValueError(f"{name!r} is loaded to {self.device}, not {device}: give device={str(device)!r} at first")
        return self.tiers.get(name, ahead=self.config.prefetch_depth)

    def offload_from_gpu(self, name: str, data: torch.Tensor) -> None:
        """`data` is the parameter's value from now on, whether or not it was loaded; its copy on the GPU goes."""
        self.tiers.put(name, data)

    @property
    def gpu_resident(self) -> set[str]:
        """Names of those that are on the GPU, or on their way."""
        return set(self.tiers.on_device)

    def get_memory_stats(self) -> dict[str, Any]:
        """Bytes on the GPU (held, at most since the beginning), the CPU (pinned blocks) and the drive; the share of the
        parameters that is not on the GPU; how many there are, and the tier in which each rests."""
        locations = {name: self.tiers.location(name) for name in self.tiers.names}
        total = sum(location.size for location in locations.values())
        on_gpu = sum(locations[name].size for name in self.gpu_resident)
        return {
            "gpu_memory": on_gpu,
            "gpu_held": self.tiers.held_bytes(Tier.DEVICE),
            "gpu_peak": self.tiers.ledger.peak_bytes(Tier.DEVICE),
            "cpu_memory": self.tiers.held_bytes(Tier.HOST),
            "nvme_memory": total,
            "offload_ratio": 1 - on_gpu / total if total > 0 else 0,
            "count": len(locations),
            "tiers": {name: location.tier.value for name, location in locations.items()},
        }
