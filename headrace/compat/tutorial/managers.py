"""How do a model's parameters rest on GPU, CPU and drive, and come and go by name? In tiers, within limits of bytes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from headrace.compat.tutorial.blocks import DiskSettings
from headrace.compat.tutorial.configs import NVMeConfig, OffloadSystemConfig, OffloadTier, TensorLocation
from headrace.compat.tutorial.tensors import TIERS, TieredTensors
from headrace.memory.ledger import Tier
from headrace.runtime.device import is_accelerator, resolve_device

__all__ = ["NVMeOffloadManager", "UnifiedOffloadManager"]

Kind = Literal["parameter", "gradient", "optimizer_state"]


class _ManagedModel(AbstractContextManager[Any]):
    """The parameters of `model` in tiers, from `first` on. `device` is the GPU: by default the model's accelerator, or
    this machine's. While managed, a parameter that rests on the CPU or GPU has its value there, and one that rests on
    disk is empty. `close()` gives the model all values back, on the devices where they were.

    Raises BudgetError before anything is changed.
    """

    def __init__(self, model: nn.Module, device: torch.device | str | None, first: Tier, **settings: Any) -> None:
        if device is None:
            device = next((p.device for p in model.parameters() if is_accelerator(p.device)), None)
        self.model, self.device = model, resolve_device(device)
        self.tiers = TieredTensors(self.device, **settings)
        self._parameters = dict(model.named_parameters())
        self._devices = {name: parameter.device for name, parameter in self._parameters.items()}
        self.tiers.add({name: parameter.detach() for name, parameter in self._parameters.items()}, first)
        for name, parameter in self._parameters.items():
            self.tiers.show(name, parameter)

    def release(self, name: str) -> None:
        """Frees the parameter's copy on the GPU. Values written to it in place are kept. Not in the tutorial."""
        self.tiers.let_go(name)

    def synchronize(self) -> None:
        """Waits until no transfer is under way. Raises DiskError for a write that failed."""
        self.tiers.synchronize()

    def close(self, *, restore: bool = True) -> None:
        """Makes the model an ordinary one again, with its present values. Without `restore`, those on disk are lost."""
        for name, parameter in self._parameters.items() if restore else ():
            if self.tiers.location(name).tier is not OffloadTier.GPU or parameter.device != self._devices[name]:
                parameter.data = self.tiers.take_out(name).to(self._devices[name])
        self._parameters = {}
        self.tiers.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class NVMeOffloadManager(_ManagedModel):
    """Parameters of `model` rest on disk. Host memory holds `aio_queue_depth` blocks, whatever the model's size.

    `device`: where parameters are loaded; by default the model's accelerator, or this machine's. `close()` gives the
    model its values back.
    """

    def __init__(
        self, model: nn.Module, config: NVMeConfig | None = None, *, device: torch.device | str | None = None
    ) -> None:
        self.config = config = config or NVMeConfig()
        shapes = {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}
        super().__init__(
            model,
            device,
            Tier.DISK,
            device_bytes=config.gpu_memory_limit,
            host_bytes=config.cpu_memory_limit,
            pin=config.pin_memory,
            disk=DiskSettings(config.nvme_path, config.aio_queue_depth, config.block_size, config.aio_queue_depth),
        )
        self.param_info = {name: (*shapes[name], location.offset) for name, location in self.tiers.locations().items()}

    def prefetch(self, layer_names: Sequence[str]) -> list[str]:
        """Begins to load these parameters. Returns, at once, the names for which the GPU has no room now."""
        return self.tiers.prefetch(layer_names)

    def load_to_gpu(self, name: str, device: torch.device | str | None = None) -> torch.Tensor:
        """The parameter on the GPU, which has arrived. The parameters that follow are prefetched.

        Raises ValueError for another device than the manager's, and BudgetError if there is no room.
        """
        if device is not None and resolve_device(device) != self.device:
            raise ValueError(f"{name!r} is loaded to {self.device}, not {device}: give device={str(device)!r} at first")
        return self.tiers.get(name, ahead=self.config.prefetch_depth)

    def offload_from_gpu(self, name: str, data: torch.Tensor) -> None:
        """Makes `data` the parameter's value, whether or not it was loaded, and frees its copy on the GPU."""
        self.tiers.put(name, data)

    @property
    def gpu_resident(self) -> set[str]:
        """Names of the parameters that are on the GPU, or on their way there."""
        return set(self.tiers.on_device)

    def get_memory_stats(self) -> dict[str, Any]:
        """Bytes on the GPU (now, and at most so far), on the CPU (pinned blocks) and on the drive; the share of the
        parameters that is not on the GPU; the number of parameters, and the tier in which each rests."""
        locations = self.tiers.locations()
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


class UnifiedOffloadManager(_ManagedModel):
    """Parameters of `model`, and what `add` brings, in the first tier with room; see `OffloadSystemConfig`.

    `device`: the GPU; by default the model's accelerator, or this machine's. `close()` gives the model its values back.
    """

    def __init__(
        self, model: nn.Module, config: OffloadSystemConfig, *, device: torch.device | str | None = None
    ) -> None:
        self.config = config
        wanted = (config.prefetch_count + 1) * max((parameter.nbytes for parameter in model.parameters()), default=0)
        super().__init__(
            model,
            device,
            self._first("parameter"),
            device_bytes=config.gpu_memory_limit,
            host_bytes=config.cpu_memory_limit,
            visiting_bytes=min(wanted, config.gpu_memory_limit),
            pin=config.pin_memory,
            disk=DiskSettings(config.nvme_path, config.num_io_threads, packs=config.use_compression),
        )

    def add(self, name: str, tensor: torch.Tensor, kind: Kind = "parameter") -> None:
        """Adds another tensor, such as a gradient or a moment, under `name`. Not in the tutorial."""
        self.tiers.add({name: tensor}, self._first(kind))

    def ensure_gpu(self, name: str) -> torch.Tensor:
        """The tensor on the GPU, which has arrived. The next ones are prefetched. Raises BudgetError without room."""
        return self.tiers.get(name, ahead=self.config.prefetch_count)

    def prefetch(self, names: Sequence[str]) -> list[str]:
        """Begins to load these tensors. Returns, at once, the names for which the GPU has no room now."""
        return self.tiers.prefetch(names)

    def offload(self, name: str, data: torch.Tensor) -> None:
        """Makes `data` the tensor's value, in the tier where it rests, and frees its copy on the GPU."""
        self.tiers.put(name, data)

    @property
    def locations(self) -> dict[str, TensorLocation]:
        """Where each tensor rests."""
        return self.tiers.locations()

    @property
    def gpu_used(self) -> int:
        """Bytes held on the GPU, visiting copies included."""
        return self.tiers.held_bytes(Tier.DEVICE)

    @property
    def cpu_used(self) -> int:
        """Bytes held on the CPU, with the blocks through which tensors pass to and from the drive."""
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

    def _first(self, kind: Kind) -> Tier:
        """The fastest tier in which tensors of that kind may rest."""
        offloaded, shown = {
            "parameter": (self.config.offload_parameters, self.config.parameter_offload_tier),
            "gradient": (self.config.offload_gradients, OffloadTier.CPU),
            "optimizer_state": (self.config.offload_optimizer_states, OffloadTier.CPU),
        }[kind]
        return next(tier for tier, name in TIERS.items() if name is shown) if offloaded else Tier.DEVICE
