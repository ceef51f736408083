"""What is known of one named tensor: where it rests, its copy on the device, and what is under way."""

from dataclasses import dataclass, field

import torch

from headrace.memory.ledger import Tier
from headrace.memory.single.blocks import Rest
from headrace.runtime.lanes import Event
from headrace.runtime.threads import Job

__all__ = ["Arrival", "Entry", "Location", "Visit", "event_of", "failed", "flat", "reached"]

Arrival = Event | Job[Event]  # the end of a move; a job's: once it has submitted that


@dataclass(frozen=True)
class Location:
    """Where a tensor is now. `offset`, `stored_bytes`: in the file on disk, where it rests there."""

    tier: Tier
    nbytes: int
    on_device: bool
    is_loading: bool = False
    is_saving: bool = False
    offset: int = 0
    stored_bytes: int = 0


@dataclass(eq=False)
class Visit:
    """A copy on the device, arrived or on its way."""

    buffer: torch.Tensor
    arrival: Arrival
    owner_version: int | None
    used: int = 0  # when it was asked for last; 0: not yet
    version: int = 0  # of the buffer when it had arrived

    @property
    def written(self) -> bool:
        return bool(self.used) and self.buffer._version != self.version


@dataclass(eq=False)
class Entry:
    """One tensor. `home`: its uint8 bytes on the device or host; `owner`: who else writes to that memory."""

    like: torch.Tensor  # on meta
    tier: Tier
    home: torch.Tensor | None = None
    rest: Rest | None = None
    owner: torch.Tensor | None = None
    visit: Visit | None = None
    saving: "Arrival | None" = None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.like.numel() * self.like.itemsize

    def shaped(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[: self.nbytes].view(self.like.dtype).view(self.like.shape)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: uint8, (nbytes,)."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def event_of(under_way: Arrival) -> Event:
    return under_way.result() if isinstance(under_way, Job) else under_way


def reached(under_way: "Arrival | None") -> bool:
    if isinstance(under_way, Job):
        return under_way.done() and (under_way.exception() is not None or under_way.result().query())
    return under_way is None or under_way.query()


def failed(under_way: Arrival) -> bool:
    """Whether a job could not submit it. Waits for the job."""
    return isinstance(under_way, Job) and under_way.exception() is not None
