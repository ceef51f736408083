"""How are pieces of an extent stored encoded? Each for itself, in the place that its raw bytes would take."""

import ctypes
import errno
import os
import threading
import time
from typing import Literal

import torch

from millrace.errors import DiskError
from millrace.memory.disk.codec import decode, encode, measure, pays
from millrace.memory.disk.extent import DISK_ALIGNMENT_BYTES, PIECE_BYTES, Extent, Piece
from millrace.memory.disk.file import DirectFile
from millrace.memory.disk.staging import StagingRing

__all__ = ["Codec", "Encoding"]

Codec = Literal["none", "planes", "auto"]


class Encoding:
    """Reads and writes pieces of the extents that were added. The order of requests keeps threads from one extent.

    `ring` has a slot of PIECE_BYTES for each thread. With `automatic`, an extent is encoded when `codec.pays` says so
    of the first piece that is written, and of the drive.
    """

    def __init__(self, file: DirectFile, ring: StagingRing, threads: int, *, automatic: bool) -> None:
        self._file = file
        self._ring = ring
        self._threads = min(threads, len(os.sched_getaffinity(0)))
        self._automatic = automatic
        self._element_bytes: dict[Extent, int] = {}
        self._chosen: dict[Extent, bool] = {}
        self._lengths: dict[tuple[Extent, int], int] = {}  # encoded bytes of the pieces that are stored so
        self._lock = threading.Lock()
        self._drive: tuple[float, float] | None = None

    def add(self, extent: Extent, element_bytes: int) -> None:
        """The extent holds elements of so many bytes; encoded from now on."""
        self._element_bytes[extent] = element_bytes

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._element_bytes

    def write(self, extent: Extent, piece: Piece, memory: torch.Tensor) -> int:
        """Writes `memory`, the bytes of `piece`. Returns how many bytes went to the drive."""
        whole = _whole(extent, piece.index)
        content = memory[: whole.end - piece.begin]
        covered = piece.begin == whole.begin and piece.end >= whole.end
        if not covered and (extent, piece.index) in self._lengths:
            raw = torch.empty(whole.end - whole.begin, dtype=torch.uint8, device="cpu")
            self.read(extent, whole, raw)
            raw[piece.begin - whole.begin :][: content.nbytes] = content
            return self.write(extent, whole, raw)
        self._lengths.pop((extent, piece.index), None)
        encoded = (
            encode(content, self._element_bytes[extent]) if covered and self._worth(extent, whole, content) else None
        )
        if encoded is None:
            self._file.write(memory.data_ptr(), memory.nbytes, extent.offset + piece.begin, repr(extent.name))
            return memory.nbytes
        nbytes = _whole_pages(len(encoded))
        slot = self._ring.acquire()
        try:
            ctypes.memmove(slot.memory.data_ptr(), encoded, len(encoded))
            self._file.write(slot.memory.data_ptr(), nbytes, extent.offset + piece.begin, repr(extent.name))
        finally:
            self._ring.release(slot, None)
        self._lengths[extent, piece.index] = len(encoded)
        return nbytes

    def read(self, extent: Extent, piece: Piece, memory: torch.Tensor) -> int:
        """Reads `piece` into `memory`. Returns how many bytes came from the drive."""
        length = self._lengths.get((extent, piece.index))
        if length is None:
            self._file.read(memory.data_ptr(), memory.nbytes, extent.offset + piece.begin, repr(extent.name))
            return memory.nbytes
        whole = _whole(extent, piece.index)
        content = memory[: whole.end - piece.begin]
        covered = piece.begin == whole.begin and piece.end >= whole.end
        target = content if covered else torch.empty(whole.end - whole.begin, dtype=torch.uint8, device="cpu")
        nbytes = _whole_pages(length)
        slot = self._ring.acquire()
        try:
            self._file.read(slot.memory.data_ptr(), nbytes, extent.offset + whole.begin, repr(extent.name))
            decode(slot.memory.numpy().data[:length], target, self._element_bytes[extent])
        except ValueError as error:
            raise DiskError(
                errno.EBADMSG,
                f"{extent.name!r}: {length} encoded bytes at offset {extent.offset + whole.begin} of {self._file.name}"
                f" cannot be decoded ({error}): the drive or another program changed them. Start again from the last"
                " checkpoint, on another drive.",
            ) from error
        finally:
            self._ring.release(slot, None)
        if not covered:
            content.copy_(target[piece.begin - whole.begin :][: content.nbytes])
        return nbytes

    def close(self) -> None:
        """Lets go of the memory."""
        self._ring.close()

    def _worth(self, extent: Extent, piece: Piece, content: torch.Tensor) -> bool:
        """Whether the extent is encoded; decided once, by its first piece."""
        if not self._automatic:
            return True
        with self._lock:  # one measurement at a time
            if extent not in self._chosen:
                speeds = measure(content, self._element_bytes[extent], self._threads)
                if self._drive is None:
                    self._drive = self._measure_drive(extent, piece)
                self._chosen[extent] = pays(speeds, *self._drive)
            return self._chosen[extent]

    def _measure_drive(self, extent: Extent, piece: Piece) -> tuple[float, float]:
        """Bytes per second of writing and reading one request, in the place of a piece that is written next."""
        slot, offset = self._ring.acquire(), extent.offset + piece.begin
        try:
            nbytes = _whole_pages(piece.end - piece.begin)
            begin = time.perf_counter()
            self._file.write(slot.memory.data_ptr(), nbytes, offset, repr(extent.name))
            middle = time.perf_counter()
            self._file.read(slot.memory.data_ptr(), nbytes, offset, repr(extent.name))
            end = time.perf_counter()
        finally:
            self._ring.release(slot, None)
        return nbytes / (middle - begin), nbytes / (end - middle)


def _whole(extent: Extent, index: int) -> Piece:
    """All of the piece that lies in the extent."""
    return Piece(index, index * PIECE_BYTES, min((index + 1) * PIECE_BYTES, extent.nbytes))


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // DISK_ALIGNMENT_BYTES) * DISK_ALIGNMENT_BYTES
