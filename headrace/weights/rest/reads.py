"""What does one read from disk bring, and where does it belong?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.memory.packed import Packed, unpack
from headrace.runtime.lanes import Copy, Event

__all__ = ["DiskRead", "Range", "ReadEvent"]

Range = tuple[int, int, int]  # of a block: first byte there, bytes, first byte in the target


class ReadEvent(Event, Protocol):
    """The end of a read, and when it began and ended, in seconds of one clock."""

    def began_at(self) -> float: ...

    def reached_at(self) -> float: ...

    def settle(self) -> None: ...


@dataclass(frozen=True)
class DiskRead:
    """What one read brings, and where it belongs."""

    read: Callable[[torch.Tensor], ReadEvent]  # submits a read into a chunk: to its first bytes, or packed to its last
    nbytes: int  # that are read
    parts: tuple[tuple[int, int, int], ...]  # (first byte in the chunk, bytes, first byte in the target)
    plain_bytes: int = 0  # what it is in the chunk once it is unpacked; 0: it is not packed
    keep: Callable[[torch.Tensor], Event | None] | None = None  # takes the chunk when it was copied, to pack it
    # Where the target is memory of the CPU: submits a read of what whole pages allow into it, and of the rest into a
    # chunk. What is to be called after it makes the target what `copies` would. None where no page fits.
    read_into: Callable[[torch.Tensor, torch.Tensor], tuple[ReadEvent, Callable[[], None]] | None] = lambda *_: None

    def copies(self, chunk: torch.Tensor, buffer: torch.Tensor) -> list[Copy]:
        """From the chunk to the target: mostly the block's buffer."""
        return [(buffer[to : to + nbytes], chunk[begin : begin + nbytes]) for begin, nbytes, to in self.parts]

    def unpack(self, chunk: torch.Tensor, buffer: torch.Tensor) -> None:
        """From the chunk to the target, where this is in host memory too."""
        packed = Packed.in_memory(chunk[len(chunk) - self.nbytes :])
        for begin, nbytes, to in self.parts:
            unpack(packed, buffer[to : to + nbytes], begin // 2)

    @property
    def has_whole_words(self) -> bool:
        """Whether each part can be unpacked alone."""
        return not any(begin % 2 or nbytes % 2 for begin, nbytes, _ in self.parts)
