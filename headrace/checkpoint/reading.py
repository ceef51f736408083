"""How do a checkpoint's bytes come back? Pieces are read past the page cache, checked, and put where they belong."""

import contextlib
import ctypes
import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.checkpoint.manifest import PIECE_BYTES, FileRecord
from headrace.errors import CheckpointError
from headrace.memory.disk import DirectFile, TensorAtRest
from headrace.memory.disk.checksums import checksum
from headrace.memory.pages import map_pages
from headrace.runtime.system import CLOSED_IN_CHILDREN

__all__ = ["Place", "PlaceInFile", "SavedFile", "read_all"]

_READERS = 8  # that keep a drive busy; measured, see docs/design/checkpoints.md
_KEPT_PIECES = 6  # that neighbours of what was read are in


@dataclass(frozen=True)
class PlaceInFile:
    """Bytes of a file that are a tensor's."""

    begin: int
    nbytes: int


@dataclass(frozen=True)
class Place:
    """Where bytes of a file go: `put(begin, memory)` gets those of the tensor from its byte `begin` on.

    It is called from several threads, for other bytes each.
    """

    at: PlaceInFile
    name: str
    put: Callable[[int, torch.Tensor], None]


class SavedFile:
    """A file of a checkpoint. `record`: its checksums; None for a file of another program. Raises CheckpointError."""

    def __init__(self, path: Path, record: FileRecord | None) -> None:
        self.path = path
        try:
            self._file = DirectFile(os.open(path, os.O_RDONLY | CLOSED_IN_CHILDREN), str(path), writable=False)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        self.descriptor = self._file.descriptor
        self.nbytes = self._file.size()
        self._record = record
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def piece(self, index: int, memory: torch.Tensor, what: str) -> torch.Tensor:
        """Reads a piece into page-aligned `memory`, of PIECE_BYTES at least. Raises CheckpointError, naming `what`."""
        begin = index * PIECE_BYTES
        nbytes = min(PIECE_BYTES, self.nbytes - begin)
        self._file.read(memory.data_ptr(), nbytes, begin, what)
        if self._record is not None and checksum(memory.data_ptr(), nbytes) != self._record.checksums[index]:
            raise CheckpointError(
                f"{self.path}: bytes {begin} to {begin + nbytes}, of {what}, are not those that were written (their"
                " checksum differs). What was loaded so far is not to be used; load another checkpoint, or copy this"
                " one anew from where it came"
            )
        return memory[:nbytes]

    def read(self, begin: int, memory: torch.Tensor, what: str) -> None:
        """Fills uint8 `memory` with the bytes from `begin` on. Pieces are kept for those who read their neighbours."""
        if begin + memory.nbytes > self.nbytes:
            raise CheckpointError(f"{self.path} ends at byte {self.nbytes}, before {what} does; it is not sound")
        at = 0
        while at < memory.nbytes:
            index, within = divmod(begin + at, PIECE_BYTES)
            with self._lock:
                piece = self._kept.pop(index, None)
                if piece is None:
                    if len(self._kept) >= _KEPT_PIECES:
                        _, room = self._kept.popitem(last=False)
                        room = room.as_strided((PIECE_BYTES,), (1,), 0)
                    else:
                        room = _pages()
                    piece = self.piece(index, room, what)
                self._kept[index] = piece
                nbytes = min(piece.nbytes - within, memory.nbytes - at)
                ctypes.memmove(memory.data_ptr() + at, piece.data_ptr() + within, nbytes)
            at += nbytes

    def at_rest(self, at: PlaceInFile, like: torch.Tensor, name: str) -> TensorAtRest:
        """A tensor of it."""
        return TensorAtRest(like, lambda begin, memory: self.read(at.begin + begin, memory, name))

    def bytes(self) -> bytes:
        """All of a small file."""
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        self.read(0, memory, self.path.name)
        return memory.numpy().tobytes()

    def checked_pieces(self) -> range:
        """Those that have a checksum."""
        return range(0 if self._record is None else len(self._record.checksums))

    def verify(self) -> None:
        """Reads all of it. Raises CheckpointError."""
        memory = _pages()
        for index in range(-(-self.nbytes // PIECE_BYTES)):
            self.piece(index, memory, self.path.name)

    def close(self) -> None:
        """Closes the file. Where that fails nothing is lost: it was only read."""
        self._kept.clear()
        with contextlib.suppress(OSError):
            self._file.close()


def read_all(
    work: Iterable[tuple[SavedFile, Sequence[Place]]], *, but_not: Callable[[int, int], bool] = lambda *_: False
) -> None:
    """Brings everything to its place, on several threads. Raises what failed first: CheckpointError, DiskError.

    Files that have checksums are read as a whole, so that what is around the tensors is checked, too; but for pieces of
    which `but_not(first byte, last but one)` says that they are read otherwise.
    """
    own = threading.local()

    def bring(file: SavedFile, index: int, places: list[Place]) -> None:
        if not hasattr(own, "pages"):
            own.pages = _pages()
        piece = file.piece(index, own.pages, repr(places[0].name) if places else file.path.name)
        first = index * PIECE_BYTES
        for place in places:
            begin = max(place.at.begin, first)
            end = min(place.at.begin + place.at.nbytes, first + piece.nbytes)
            place.put(begin - place.at.begin, piece[begin - first : end - first])

    with ThreadPoolExecutor(_READERS, thread_name_prefix="headrace-load") as readers:
        jobs = []
        for file, places in work:
            pieces: dict[int, list[Place]] = defaultdict(list)
            for place in places:
                last = place.at.begin + place.at.nbytes
                for index in range(place.at.begin // PIECE_BYTES, -(-last // PIECE_BYTES)):
                    pieces[index].append(place)
            for index in file.checked_pieces():
                if not but_not(index * PIECE_BYTES, (index + 1) * PIECE_BYTES):
                    pieces[index]  # which may have no place
            jobs += [readers.submit(bring, file, index, pieces[index]) for index in sorted(pieces)]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            raise


def _pages() -> torch.Tensor:
    return torch.frombuffer(map_pages(PIECE_BYTES, touched=False), dtype=torch.uint8)
