"""How do single tensors rest in tiers and visit the device, each by its name? For callers that say when.

`headrace.offload()` moves blocks of a model by itself; this is the same memory, lanes and disk under manual control.
"""

from headrace.memory.single.blocks import pack, unpack
from headrace.memory.single.entries import Location
from headrace.memory.single.tensors import TieredTensors

__all__ = ["Location", "TieredTensors", "pack", "unpack"]
