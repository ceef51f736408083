"""What moves for one block in a step besides its loads?"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BlockTraffic"]


@dataclass(frozen=True, kw_only=True)
class BlockTraffic:
    """What crosses for one block besides its loads, in bytes; `update_bytes` is DRAM traffic."""

    gradient_bytes: int = 0
    update_bytes: float = 0.0
    norm_bytes: float = 0.0  # read for the norm of all gradients, as each arrives
    state_bytes: int = 0  # read before the update and written after it
    fetch_bytes: int = 0  # weights that rest on disk: read before each load
    spill_bytes: int = 0  # and written after the update
    activation_bytes: int = 0  # out after forward, back before backward
    activations_spill: bool = False  # from there to disk, and back
    load_bytes: int | None = None  # that cross the own link at a load: a shard; None: the whole block
    gather_seconds: float = 0.0  # the other shards, from other devices: behind each load, or before each visit
    reduce_seconds: float = 0.0  # of gradients across devices, when the block's backward is over
    pass_on_seconds: float = 0.0  # of updated weights to other devices
