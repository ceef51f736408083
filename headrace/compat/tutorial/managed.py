"""What do the tutorial's managers share? A model whose parameters rest in tiers, each reached by its name."""

import itertools
import os
import shutil
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import torch
from torch import nn

from headrace.compat.tutorial.configs import OffloadTier
from headrace.compat.tutorial.tensors import TieredTensors
from headrace.memory.disk import DiskStore
from headrace.memory.ledger import Ledger, Tier
from headrace.runtime.device import is_accelerator, resolve_device
from headrace.runtime.system import host_name

__all__ = ["ManagedModel", "OwnDirectory", "device_of"]

_PREFIX = "headrace-tensors-"
_numbers = itertools.count()


def device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The one that is given, else the accelerator on which the model is, else this machine's."""
    if device is None:
        device = next((p.device for p in model.parameters() if is_accelerator(p.device)), None)
    return resolve_device(device)


class OwnDirectory:
    """A directory of one manager's own inside of `directory`, made when its store is opened."""

    def __init__(self, directory: str, threads: int) -> None:
        self._parent = Path(directory).expanduser()
        self._own = self._parent / f"{_PREFIX}{os.getpid()}-{next(_numbers)}@{host_name()}"
        self._threads = threads
        self.remove = weakref.finalize(self, shutil.rmtree, self._own, ignore_errors=True)

    def open_store(self, ledger: Ledger) -> DiskStore:
        """The store in it. Directories of this host's killed processes go: they hold a lock's file, and no bytes."""
        for path in self._parent.glob(f"{_PREFIX}*-*@{host_name()}"):
            owner = path.name.removeprefix(_PREFIX).split("-")[0]
            if owner.isdigit() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(path, ignore_errors=True)
        return DiskStore(self._own, ledger, threads=self._threads)


class ManagedModel:
    """The parameters of `model` in `tiers`. While managed, one that rests on the CPU or GPU shows its value there, and
    one on disk is empty. `close()` gives the model all values back, on the devices where they were.

    Raises BudgetError before anything is changed.
    """

    def __init__(self, model: nn.Module, tiers: TieredTensors, first: Tier, directory: OwnDirectory) -> None:
        self.model, self.tiers = model, tiers
        self._directory = directory
        self.device = tiers.device
        self._parameters = dict(model.named_parameters())
        self._devices = {name: parameter.device for name, parameter in self._parameters.items()}
        tiers.add({name: parameter.detach() for name, parameter in self._parameters.items()}, first)
        for name, parameter in self._parameters.items():
            place = tiers.place_of(name)
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device) if place is None else place
            if place is not None:
                tiers.watch(name, parameter)

    def release(self, name: str) -> None:
        """The copy on the GPU is not needed any more. What was written to it in place is kept. Not in the tutorial."""
        self.tiers.let_go(name)

    def synchronize(self) -> None:
        """Waits until nothing is under way. Raises DiskError for a write that failed."""
        self.tiers.synchronize()

    def close(self, *, restore: bool = True) -> None:
        """The model is an ordinary one again, with its present values (without `restore` those on disk are lost)."""
        if not self._parameters:
            return
        if restore:
            for name, parameter in self._parameters.items():
                if self.tiers.location(name).tier is not OffloadTier.GPU or parameter.device != self._devices[name]:
                    parameter.data = self.tiers.take_out(name).to(self._devices[name])
        self._parameters = {}
        self.tiers.close()
        self._directory.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
