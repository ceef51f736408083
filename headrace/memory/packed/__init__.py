"""How do 16-bit weights take three quarters of their bytes, without loss? See docs/design/packed.md."""

from headrace.memory.packed.device import unpack_on_device, unpacks_by_kernel
from headrace.memory.packed.format import (
    GROUP_WORDS,
    Packed,
    available,
    level,
    pack,
    pack_into,
    unpack,
    unpack_in_place,
    unpacking_speed,
)

__all__ = [
    "GROUP_WORDS",
    "Packed",
    "available",
    "level",
    "pack",
    "pack_into",
    "unpack",
    "unpack_in_place",
    "unpack_on_device",
    "unpacking_speed",
    "unpacks_by_kernel",
]
