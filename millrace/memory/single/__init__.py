"""How do single tensors rest in tiers and visit the device, each by its name? For callers that say when.

`millrace.offload()` moves blocks of a model by itself; this is the same memory, lanes and disk under manual control.
"""

from millrace.memory.single.blocks import pack, unpack
from millrace.memory.single.entries import Location
from millrace.memory.single.tensors import TieredTensors

__all__ = ["Location", "TieredTensors", "pack", "unpack"]
