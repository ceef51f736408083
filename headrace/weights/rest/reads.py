"""What does one read from disk bring, and where does it belong?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from headrace.memory.packed import Packed, unpack
from headrace.runtime.lanes import Copy, Event


class Range(NamedTuple):
    """A range of bytes, of a block or of a chunk, and where it goes."""

    first: int
    nbytes: int
    to: int  # the first byte in the target


class ReadEvent(Event, Protocol):
    """The event of a read's end. It knows when the read began and ended, in seconds of one clock."""

    def began_at(self) -> float: ...

    def reached_at(self) -> float: ...

    def settle(self) -> None: ...


@dataclass(frozen=True)
class DiskRead:
    """What one read brings, and where it belongs."""

    read: Callable[[torch.Tensor], ReadEvent]  # submits a read to a chunk's first bytes; to its last if it is packed
    nbytes: int  # bytes that are read
    ranges: tuple[Range, ...]  # of the chunk
    plain_bytes: int = 0  # bytes in the chunk after unpacking; 0: it is not packed
    keep: Callable[[torch.Tensor], Event | None] | None = None  # packs the chunk after it was copied
    # If the target is memory of the CPU: submits a read of whole pages into the target, and of the rest into a chunk.
    # Returns the event and a function that then makes the target what `copies` would make it. None if no page fits.
    read_into: Callable[[torch.Tensor, torch.Tensor], tuple[ReadEvent, Callable[[], None]] | None] = lambda *_: None

    def copies(self, chunk: torch.Tensor, buffer: torch.Tensor) -> list[Copy]:
        """The copies from the chunk to the target, which is mostly the block's buffer."""
        return [(buffer[to : to + nbytes], chunk[begin : begin + nbytes]) for begin, nbytes, to in self.ranges]

    def unpack(self, chunk: torch.Tensor, buffer: torch.Tensor) -> None:
        """Unpacks the chunk into the target, which has to be in host memory."""
        packed = Packed.in_memory(chunk[len(chunk) - self.nbytes :])
        for begin, nbytes, to in self.ranges:
            unpack(packed, buffer[to : to + nbytes], begin // 2)

    @property
    def has_whole_words(self) -> bool:
        """Whether every range consists of whole two-byte words, so that it can be unpacked by itself."""
        return not any(begin % 2 or nbytes % 2 for begin, nbytes, _ in self.ranges)
