"""In which tier does each tensor rest? The fastest that has room, in their order, decided ahead of copies."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headrace.config import format_bytes
from headrace.errors import BudgetError
from headrace.memory.arena import aligned, whole_pages
from headrace.memory.ledger import Tier

__all__ = ["Room", "tiers_for"]


@dataclass(frozen=True)
class Room:
    """Ceilings (None: there is none) and what is taken of them. `visiting_bytes` of the device are for copies."""

    device: torch.device
    device_bytes: int | None
    device_taken: int
    visiting_bytes: int
    host_bytes: int | None
    host_taken: int
    has_disk: bool


def tiers_for(sizes: Mapping[str, int], first: Tier, room: Room) -> dict[str, Tier]:
    """The tier of each tensor of so many bytes, from `first` on. Raises BudgetError when one has room nowhere."""
    on_device, limit = room.device_taken, room.device_bytes
    everything = first is Tier.DEVICE and (limit is None or on_device + sum(sizes.values()) <= limit)
    resting = None if limit is None else limit - (0 if everything else room.visiting_bytes)
    on_host = 0
    tiers = {}
    for name, nbytes in sizes.items():
        host_wanted = room.host_taken + whole_pages(on_host + aligned(nbytes))
        if first is Tier.DEVICE and (resting is None or on_device + nbytes <= resting):
            tiers[name], on_device = Tier.DEVICE, on_device + nbytes
        elif first is not Tier.DISK and (room.host_bytes is None or host_wanted <= room.host_bytes):
            tiers[name], on_host = Tier.HOST, on_host + aligned(nbytes)
        elif room.has_disk:
            tiers[name] = Tier.DISK
        else:
            raise BudgetError(
                f"{name!r} needs {format_bytes(nbytes)}: {room.device} has {format_bytes(on_device)} of"
                f" {_limit(limit)}, host memory {format_bytes(room.host_taken + on_host)} of {_limit(room.host_bytes)},"
                " and there is no directory on a disk; raise a limit, or give a directory"
            )
        if tiers[name] is not Tier.DEVICE and limit is not None and nbytes > limit:
            raise BudgetError(
                f"{name!r} needs {format_bytes(nbytes)} on {room.device} when it is used; the limit there is"
                f" {format_bytes(limit)}; raise it to at least {format_bytes(nbytes, at_least=True)}"
            )
    return tiers


def _limit(nbytes: int | None) -> str:
    return "any number" if nbytes is None else format_bytes(nbytes)
