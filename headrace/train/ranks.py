"""On which ranks does a run train? On those that torchrun has started, or in this process alone.

The result does not depend on the number of ranks. Micro-batches are dealt out in turn, and their results are put
together in the order of the micro-batches.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from headrace.config import counted
from headrace.errors import TrainInputError
from headrace.runtime.ranks import Ranks
from headrace.train.config import TrainConfig, flag

T = TypeVar("T")

_NEEDED = ("RANK", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")  # beside WORLD_SIZE; all but the last are numbers
# Settings that several ranks cannot take, and why.
_REFUSED = {
    "micro_batches_together": "is for one process yet: ranks average the gradients of each micro-batch",
    "device_fraction": "is for one process: ranks share one copy of the weights in host memory",
}


class World:
    """All ranks of a run, as one of them sees them. A rank that is alone never waits.

    `device` is this rank's device. `mesh` is the DeviceMesh of all ranks; None if there is only one.
    """

    def __init__(self, device: torch.device, mesh: Any = None) -> None:
        self.device, self.mesh = device, mesh
        self._ranks = None if mesh is None else Ranks(mesh.get_group(), "cpu")
        self.count, self.own = (1, 0) if self._ranks is None else (self._ranks.count, self._ranks.own)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.own == 0

    def in_turn(self, mine: Sequence[T]) -> list[T]:
        """The items of a sequence that was dealt out to ranks in turn. All ranks call this and the five below."""
        every = self._every(list(mine))
        return [one for turn in itertools.zip_longest(*every) for one in turn if one is not None]

    def any(self, value: bool) -> bool:
        """Whether `value` is true on at least one rank."""
        return any(self._every(value))

    def told(self, value: T) -> T:
        """The first rank's value."""
        return self._every(value)[0]

    def wait(self) -> None:
        """Waits until all ranks have called this."""
        self._every(None)

    def as_one(self, what: str) -> AbstractContextManager[None]:
        """Encloses what the first rank does while the others wait. If it raises, all do; see `Ranks.as_one`."""
        return nullcontext() if self._ranks is None else self._ranks.as_one(what)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """A context that the first rank runs while the others wait. Then they run it, and find what it has made."""
        if not self.is_first:
            self.wait()
        try:
            yield
        finally:
            if self.is_first:
                self.wait()

    def _every(self, value: T) -> list[T]:
        return [value] if self._ranks is None else self._ranks.objects(value)


def is_first_rank() -> bool:
    """Whether this process prints for all ranks."""
    return os.environ.get("RANK", "0") == "0" or _world_size() == 1


@contextmanager
def joined(config: TrainConfig) -> Iterator[World]:
    """Joins the ranks that torchrun has started. Raises TrainInputError for settings that several ranks cannot take."""
    count = _world_size()
    if count == 1:
        yield World(config.compute_device())
        return
    _check(config, count)
    for name in _NEEDED:
        told = os.environ.get(name)
        if told is None or not (told.isdecimal() or name == _NEEDED[-1]):
            wrong = "is not set" if told is None else f"is {told!r}, no number"
            raise TrainInputError(
                f"WORLD_SIZE is {count} in the environment, and {name} {wrong}; start the ranks with torchrun, or unset"
                " WORLD_SIZE"
            )
    device = _own_device(config)
    distributed.init_process_group("gloo")  # ranks exchange data in host memory
    try:
        yield World(device, init_device_mesh("cpu", (count,)))
    finally:
        distributed.destroy_process_group()


def _world_size() -> int:
    told = os.environ.get("WORLD_SIZE", "1")
    if not told.isdecimal() or not int(told):
        raise TrainInputError(f"WORLD_SIZE is {told!r} in the environment, and no number of ranks; unset it")
    return int(told)


def _check(config: TrainConfig, count: int) -> None:
    for name, why in _REFUSED.items():
        if getattr(config, name) is not None:
            raise TrainInputError(f"{flag(name)} {why}; leave it out, or start without torchrun")
    if (config.activation_settings() or {}).get("tier") == "disk":
        raise TrainInputError(
            "--offload-activations tier=disk is for one process: ranks keep what autograd saves in host memory; leave"
            " tier=disk out"
        )
    if config.overlap == "backward":
        raise TrainInputError(
            f"--overlap backward updates weights before their gradients are averaged over the {count} ranks; give"
            " --overlap forward"
        )
    if config.accumulate % count:
        sequences = config.batch_size * config.accumulate
        raise TrainInputError(
            f"--accumulate is {config.accumulate}, which {count} ranks cannot share evenly: a step is of {sequences}"
            f" sequences (--batch-size times --accumulate) on any number of ranks; give a multiple of {count}"
        )
    if config.compare_plain and count & (count - 1):
        raise TrainInputError(
            f"--compare-plain compares bits, and averages over {count} ranks round otherwise than one process does;"
            " leave it out, or take 2, 4, 8... ranks"
        )


def _own_device(config: TrainConfig) -> torch.device:
    """The device of number LOCAL_RANK, of the kind that `config` names."""
    present = torch.accelerator.current_accelerator(check_available=True)
    kind = present if config.device is None else torch.device(config.device.partition(":")[0])
    if present is None or kind is None or kind.type != present.type:
        return config.compute_device()
    if config.device not in (None, kind.type):
        raise TrainInputError(f"--device {config.device} is one device for all ranks; give --device {kind.type}")
    local, devices = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    if local >= devices:
        raise TrainInputError(
            f"rank {os.environ['RANK']} is number {local} of its machine, which has {counted(devices, 'device')}; give"
            f" torchrun --nproc-per-node {devices}, or --device cpu"
        )
    torch.accelerator.set_device_index(local)
    return torch.device(kind.type, local)
