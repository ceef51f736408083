"""How do tensors spread over GPU, CPU and drive, and come and go by name? In the first tier with room; limits hold."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from headrace.compat.tutorial.configs import OffloadSystemConfig, OffloadTier, TensorLocation
from headrace.compat.tutorial.managed import ManagedModel, OwnDirectory, device_of
from headrace.compat.tutorial.tensors import TIERS, TieredTensors
from headrace.memory.ledger import Tier

__all__ = ["UnifiedOffloadManager"]

Kind = Literal["parameter", "gradient", "optimizer_state"]


class UnifiedOffloadManager(ManagedModel):
    """Parameters of `model`, and what `add` brings, in the first tier with room; see `OffloadSystemConfig`.

    `device`: the GPU; default the model's accelerator, or this machine's.
    """

    def __init__(
        self, model: nn.Module, config: OffloadSystemConfig, *, device: torch.device | str | None = None
    ) -> None:
        self.config = config
        sizes = [parameter.nbytes for parameter in model.parameters()]
        wanted = (config.prefetch_count + 1) * max(sizes, default=0)
        directory = OwnDirectory(config.nvme_path, config.num_io_threads)
        tiers = TieredTensors(
            device_of(model, device),
            device_bytes=config.gpu_memory_limit,
            host_bytes=config.cpu_memory_limit,
            open_disk=directory.open_store,
            visiting_bytes=min(wanted, config.gpu_memory_limit),
            packs=config.use_compression,
            pin=config.pin_memory,
        )
        first = self._first(config.offload_parameters, config.parameter_offload_tier)
        super().__init__(model, tiers, first, directory)

    def add(self, name: str, tensor: torch.Tensor, kind: Kind = "parameter") -> None:
        """Takes the value of another tensor, such as a gradient or a moment, under `name`. Not in the tutorial."""
        offloaded, tier = {
            "parameter": (self.config.offload_parameters, self.config.parameter_offload_tier),
            "gradient": (self.config.offload_gradients, OffloadTier.CPU),
            "optimizer_state": (self.config.offload_optimizer_states, OffloadTier.CPU),
        }[kind]
        self.tiers.add({name: tensor}, self._first(offloaded, tier))

    def ensure_gpu(self, name: str) -> torch.Tensor:
        """The tensor on the GPU, arrived; those that follow are loaded ahead. Raises BudgetError without room."""
        return self.tiers.get(name, ahead=self.config.prefetch_count)

    def prefetch(self, names: Sequence[str]) -> list[str]:
        """Begins to load these, and returns at once: the names for which the GPU has no room now."""
        return self.tiers.prefetch(names)

    def offload(self, name: str, data: torch.Tensor) -> None:
        """`data` is the tensor's value from now on, in the tier where it rests; its visiting copy goes."""
        self.tiers.put(name, data)

    @property
    def locations(self) -> dict[str, TensorLocation]:
        """Where each tensor rests."""
        return {name: self.tiers.location(name) for name in self.tiers.names}

    @property
    def gpu_used(self) -> int:
        """Bytes held on the GPU, with copies that visit."""
        return self.tiers.held_bytes(Tier.DEVICE)

    @property
    def cpu_used(self) -> int:
        """Bytes held on the CPU, with the blocks that pass to and from the drive."""
        return self.tiers.held_bytes(Tier.HOST)

    def get_memory_summary(self) -> dict[str, dict[str, int]]:
        """For each tier: tensors that rest there and their bytes, and the bytes held there now and at most."""
        summary = {}
        for tier, shown in TIERS.items():
            resting = [one for one in self.locations.values() if one.tier is shown]
            summary[shown.value] = {
                "count": len(resting),
                "bytes": sum(one.size for one in resting),
                "held_bytes": self.tiers.held_bytes(tier),
                "peak_bytes": self.tiers.ledger.peak_bytes(tier),
            }
        return summary

    @staticmethod
    def _first(offloaded: bool, tier: OffloadTier) -> Tier:
        return {shown: tier for tier, shown in TIERS.items()}[tier] if offloaded else Tier.DEVICE
