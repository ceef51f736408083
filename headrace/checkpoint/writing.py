"""How do a checkpoint's bytes reach the drive? In pieces, which are read into a little memory and written from there.

One thread reads the pieces, in the order of the files, but first those that an optimizer is about to write to. Other
threads write the pieces to the drive. So reading runs ahead as far as memory allows, and training waits only for reads.
"""

import errno
import os
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from headrace.checkpoint.files import Layout, Stretch
from headrace.checkpoint.manifest import FileRecord
from headrace.checkpoint.sources import TensorSource, memory_of
from headrace.config import format_bytes
from headrace.errors import DiskError
from headrace.memory.disk import DirectFile, neighbours_follow
from headrace.memory.disk.checksums import checksum
from headrace.memory.disk.extent import pieces
from headrace.memory.disk.saved_file import GRAIN_BYTES, new_pages
from headrace.runtime.autograd import without_overrides
from headrace.runtime.capture import begin_capture, end_capture
from headrace.runtime.device import is_accelerator
from headrace.runtime.system import CLOSED_IN_CHILDREN, reserve
from headrace.runtime.threads import Gate, mark_headrace_thread

__all__ = ["LEAST_BYTES", "Piece", "Writing"]

WRITERS = 4  # enough threads to keep a drive busy; measured, see docs/design/checkpoints.md
LEAST_BYTES = (WRITERS + 2) * GRAIN_BYTES  # of memory: each writer has a piece, one piece is read, one waits


class Piece:
    """A piece of a file, which is read and written at once."""

    def __init__(self, file: str, begin: int, end: int) -> None:
        self.file, self.begin, self.end = file, begin, end
        self.stretches: list[Stretch] = []
        self.read = Gate()
        self.begun = False

    def fill(self, memory: torch.Tensor) -> None:
        """Reads the piece into `memory`."""
        for stretch in self.stretches:
            begin, end = max(stretch.begin, self.begin), min(stretch.end, self.end)
            stretch.source.read(begin - stretch.begin, memory[begin - self.begin : end - self.begin])


class _Ranges:
    """Ranges of addresses, from `first` to before `last`, each with its owner."""

    def __init__(self, ranges: Iterable[tuple[int, int, Any]] = ()) -> None:
        self._ranges = sorted(ranges, key=itemgetter(0, 1))
        self._reached = list(accumulate((last for _, last, _ in self._ranges), max))

    def overlapping(self, first: int, last: int) -> list[Any]:
        """The owners of the ranges that overlap with this one."""
        found = []
        for index in reversed(range(bisect_left(self._ranges, last, key=itemgetter(0)))):
            if self._reached[index] <= first:
                break
            if self._ranges[index][1] > first:
                found.append(self._ranges[index][2])
        return found


class Writing:
    """Writes the files of `layouts` into `directory`, on threads of its own.

    `finish` is called with the records of all files when these are written and safe from a loss of power; `clean_up` is
    called if anything failed.
    """

    def __init__(
        self,
        directory: Path,
        layouts: Sequence[Layout],
        memory_bytes: int,
        finish: Callable[[Mapping[str, FileRecord]], None],
        clean_up: Callable[[], None],
    ) -> None:
        self._finish, self._clean_up = finish, clean_up
        self._pieces: list[Piece] = []
        self._of: dict[Any, list[Piece]] = defaultdict(list)
        self._sources: dict[Any, list[TensorSource]] = defaultdict(list)
        self._checksums: dict[str, list[int]] = {}
        self._sizes = {layout.name: layout.nbytes for layout in layouts}
        self.nbytes = sum(self._sizes.values())
        self.waited_seconds = 0.0  # for how long writers of parameters were held up
        self.seconds = 0.0
        self._error: BaseException | None = None
        self.advance: Callable[[int], object] = lambda nbytes: None  # called when a piece was read
        self._begin, self._done = Gate(), Gate()
        self._urgent: SimpleQueue[Piece] = SimpleQueue()
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        self._files: dict[str, DirectFile] = {}
        try:
            self._open(directory, layouts)
        except BaseException:
            for file in self._files.values():
                file.close()
            raise
        slots = min(memory_bytes // GRAIN_BYTES, len(self._pieces))
        for _ in range(slots):
            self._free.put(new_pages(GRAIN_BYTES))

    def start(self) -> None:
        """Begins. From now on, optimizers ask before they write. Raises RuntimeError if no thread can be started."""
        try:
            threading.Thread(target=self._run, name="headrace-save").start()
        except BaseException:
            for file in self._files.values():
                file.close()
            self._clean_up()
            raise
        begin_capture(self)
        self._begin.open()

    def expect(self, parameters: Sequence[Any]) -> None:
        """As in `runtime.capture.Capture`."""
        for owner in self._touched(parameters):
            for source in self._sources.get(owner, []):
                source.expect_writes()

    def hurry(self, parameters: Sequence[Any] | None) -> None:
        """As in `runtime.capture.Capture`."""
        owners = list(self._of) if parameters is None else self._touched(parameters)
        pieces = [piece for owner in owners for piece in self._of.get(owner, [])]
        begun_at = time.perf_counter()
        for piece in pieces:
            if not piece.read.is_open:
                self._urgent.put(piece)
        for piece in pieces:
            piece.read.wait()
        self.waited_seconds += time.perf_counter() - begun_at

    def wait(self) -> None:
        """Waits until everything is on the drive. Raises the error if something failed."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    @property
    def done(self) -> bool:
        """Whether it has ended, with success or not."""
        return self._done.is_open

    def _touched(self, parameters: Iterable[Any]) -> list[Any]:
        """The owners whose bytes change when these parameters do: they, and those that share memory (`p.data = t`)."""
        found = list(parameters)
        with without_overrides():  # asks parameters of an offloaded model themselves
            memories = [memory_of(parameter) for parameter in found]
        for memory in memories:
            if memory is not None:
                found += self._neighbours.overlapping(*memory)
        return list(dict.fromkeys(found))

    def _open(self, directory: Path, layouts: Sequence[Layout]) -> None:
        for layout in layouts:
            (directory / layout.name).parent.mkdir(exist_ok=True)
            self._files[layout.name] = _new_file(directory / layout.name, layout.nbytes)
            own = [Piece(layout.name, begin, end) for begin, end in pieces(0, layout.nbytes, GRAIN_BYTES)]
            self._checksums[layout.name] = [0] * len(own)
            for stretch in layout.stretches:
                among = own[stretch.begin // GRAIN_BYTES : -(-stretch.end // GRAIN_BYTES)]
                whose = stretch.source.owner
                for piece in among:
                    piece.stretches.append(stretch)
                if whose is not None:
                    self._of[whose] += among
                    if isinstance(stretch.source, TensorSource):
                        self._sources[whose].append(stretch.source)
            self._pieces += own
        self._neighbours = _Ranges(
            (*memory, source.owner)
            for several in self._sources.values()
            for source in several
            if (memory := source.memory) is not None
        )

    def _run(self) -> None:
        begun_at = time.perf_counter()
        self._begin.wait()
        devices = [source.device for several in self._sources.values() for source in several]
        mark_headrace_thread(next(filter(is_accelerator, devices), None))
        try:
            with ThreadPoolExecutor(WRITERS, thread_name_prefix="headrace-save-write") as writers:
                try:
                    with neighbours_follow():
                        self._read(writers)
                finally:
                    end_capture(self)
        except BaseException as error:
            self._fail(self._cause(error))
        for piece in self._pieces:  # after a failure
            if not piece.read.is_open:
                piece.read.open()
        for name, file in self._files.items():
            self._end_file(name, file)
        try:
            if self._error is None:
                self._finish({name: FileRecord(size, self._checksums[name]) for name, size in self._sizes.items()})
        except BaseException as error:
            self._fail(error)
        if self._error is not None:
            self._clean_up()
        # Memory is let go of; the figures are kept.
        for held in (self._pieces, self._of, self._sources, self._files):
            held.clear()
        self._neighbours = _Ranges()
        self._free, self._urgent = SimpleQueue(), SimpleQueue()
        self.seconds = time.perf_counter() - begun_at
        self._done.open()

    def _cause(self, error: BaseException) -> BaseException:
        """The error to report: a false checksum of bytes on disk means a write to a tensor, if one was written to."""
        if isinstance(error, DiskError) and error.errno == errno.EBADMSG:
            sources = (source for several in self._sources.values() for source in several)
            written = next((source for source in sources if source.was_written), None)
            return error if written is None else written.write_error()
        return error

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error

    def _read(self, writers: ThreadPoolExecutor) -> None:
        in_order = iter(self._pieces)
        while self._error is None:
            memory = self._free.get()
            try:
                piece = self._urgent.get_nowait()
            except Empty:
                found = next(in_order, None)
                if found is None:
                    return
                piece = found
            if piece.begun:
                self._free.put(memory)
                continue
            piece.begun = True
            piece.fill(memory[: piece.end - piece.begin])
            piece.read.open()
            self.advance(piece.end - piece.begin)
            writers.submit(self._write, piece, memory)

    def _write(self, piece: Piece, memory: torch.Tensor) -> None:
        try:
            if self._error is None:
                address, nbytes = memory.data_ptr(), piece.end - piece.begin
                self._checksums[piece.file][piece.begin // GRAIN_BYTES] = checksum(address, nbytes)
                self._files[piece.file].write(address, nbytes, piece.begin, piece.file)
        except BaseException as error:
            self._fail(error)
        self._free.put(memory)

    def _end_file(self, name: str, file: DirectFile) -> None:
        """Closes the file; if nothing failed, makes it safe from a loss of power before."""
        try:
            try:
                if self._error is None:
                    os.fsync(file.descriptor)
            finally:
                file.close()
        except OSError as error:
            self._fail(DiskError(error.errno, f"{name} did not reach the drive: {error.strerror}"))


def _new_file(path: Path, nbytes: int) -> DirectFile:
    """Makes an empty file with room for so many bytes. Raises DiskError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | CLOSED_IN_CHILDREN, 0o666)
    except OSError as error:
        raise DiskError(error.errno, f"{path} cannot be made: {error.strerror}") from error
    try:
        if nbytes:
            reserve(descriptor, 0, nbytes)
        return DirectFile(descriptor, str(path), writable=True)
    except OSError as error:
        os.close(descriptor)
        raise DiskError(
            error.errno,
            f"{path}: {format_bytes(nbytes)} could not be taken: {error.strerror}. Free space, or save elsewhere.",
        ) from error
