"""What moves for one block in a step besides its loads?"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.planning.cost.experts import NO_EXPERTS, ExpertLoads

__all__ = ["BlockTraffic"]


@dataclass(frozen=True, kw_only=True)
class BlockTraffic:
    """What crosses for one block besides its loads, in bytes; `update_bytes` is DRAM traffic."""

    gradient_bytes: int = 0
    update_bytes: float = 0.0
    norm_bytes: float = 0.0  # read for the norm of all gradients, as each arrives
    state_bytes: int = 0  # read before the update and written after it
    fetch_bytes: int = 0  # weights that rest on disk: read before each load
    spill_bytes: int = 0  # of those, what the update reads and writes
    activation_bytes: int = 0  # out after forward, back before backward
    activations_spill: bool = False  # from there to disk, and back
    load_bytes: int | None = None  # that cross the own link at a load: a range of it; None: the whole block
    gather_seconds: float = 0.0  # the other ranges, from other devices, behind each load
    gathers_at_loads: bool = False  # also of blocks that stay on the device otherwise
    reduce_seconds: float = 0.0  # of gradients across devices, when the block's backward is over
    reduces_always: bool = False  # in each micro-batch, not in the last alone
    over_link: bool = False  # what devices send each other passes over each one's link to the host
    sum_bytes: float = 0.0  # DRAM traffic of adding up the gradients of several devices, each time they have left
    network_seconds: float = 0.0  # of the sum over nodes, once a step
    network_bytes: int = 0
    network_dram_bytes: float = 0.0
    pass_on_seconds: float = 0.0  # of updated weights to other devices
    experts: ExpertLoads = NO_EXPERTS  # that come one by one within each visit
