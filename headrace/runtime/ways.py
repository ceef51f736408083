"""Which way do blocks come to a node's devices? Whole, over each device's link, or in ranges that devices exchange."""

from dataclasses import dataclass
from functools import partial

import torch

from headrace.runtime.device import is_accelerator
from headrace.runtime.device_group import DeviceGroup
from headrace.runtime.node import Node
from headrace.runtime.page_locks import locked_tensor
from headrace.runtime.probe import median_seconds

_TRIED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Way:
    """The way of one model, which is the same on all ranks, and the reason for it."""

    gathers: bool
    reason: str

    @property
    def row(self) -> tuple[str, str]:
        """The name and value of this way, for a report."""
        way = "gathered by all devices" if self.gathers else "over each link alone"
        return "weights and gradients", f"{way}: {self.reason}"


def way_of(asked: str, node: Node, device: torch.device) -> Way:
    """The way that the user asked for; for "auto", the quicker one by the first rank's clock. A collective.

    All ranks try both ways at the same time. Memory that they share from now on is placed where the way reads it.
    """
    way = _chosen(asked, node, device)
    node.spread_memory(device, by_ranks=way.gathers)
    return way


def _chosen(asked: str, node: Node, device: torch.device) -> Way:
    if asked != "auto":
        return Way(asked == "gather", "as asked")
    own, gathered = node.from_first(_seconds_of_both(node, device), "the way that it measures")
    figures = f"{_TRIED_BYTES >> 20} MiB took {1e3 * gathered:.1f} ms gathered, {1e3 * own:.1f} ms over each link alone"
    return Way(gathered < own, figures)


def _seconds_of_both(node: Node, device: torch.device) -> tuple[float, float]:
    group, locked = DeviceGroup(node, device), locked_tensor(device, _TRIED_BYTES) if is_accelerator(device) else None
    host = torch.zeros(_TRIED_BYTES, dtype=torch.uint8, device="cpu") if locked is None else locked[0]
    there = torch.empty(_TRIED_BYTES, dtype=torch.uint8, device=device)
    length = _TRIED_BYTES // node.size
    ranges = there[: node.size * length].view(node.size, length)

    def gather() -> None:
        ranges[node.rank].copy_(host[:length], non_blocking=True)
        group.gather(ranges, "its range of a block that is tried")

    meet = partial(node.meet, "a load that is tried")
    try:
        own = median_seconds(device, lambda: there.copy_(host, non_blocking=True), meet)
        return own, median_seconds(device, gather, meet)
    finally:
        group.close()
        if locked is not None:
            locked[1]()
