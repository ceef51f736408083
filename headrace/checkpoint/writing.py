"""How do a checkpoint's bytes reach the drive? In pieces, which are read into a little memory and written from there.

One thread reads the pieces, in the order of the files, but first those that an optimizer is about to write to. Other
threads write the pieces to the drive. So reading runs ahead as far as memory allows, and training waits only for reads.
One checkpoint is written at a time; the end of the process waits for it.
"""

import errno
import functools
import os
import sys
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from headrace.checkpoint.directory import NewDirectory, remove_older, write_whole
from headrace.checkpoint.files import Layout
from headrace.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from headrace.checkpoint.sources import Source, TensorSource, memory_of
from headrace.config import format_bytes
from headrace.errors import DiskError, StateError
from headrace.memory.disk import DirectFile, neighbours_follow
from headrace.memory.disk.checksums import checksum
from headrace.memory.disk.extent import pieces
from headrace.memory.disk.saved_file import GRAIN_BYTES, new_pages
from headrace.runtime.autograd import without_overrides
from headrace.runtime.capture import begin_capture, end_capture
from headrace.runtime.device import is_accelerator
from headrace.runtime.progress import progress
from headrace.runtime.system import CLOSED_IN_CHILDREN, after_fork, reserve
from headrace.runtime.threads import Gate, mark_headrace_thread

WRITERS = 4  # enough threads to keep a drive busy; measured, see docs/design/checkpoints.md
LEAST_BYTES = (WRITERS + 2) * GRAIN_BYTES  # of memory: each writer has a piece, one piece is read, one waits

last_saving: list["Saving"] = []  # the last checkpoint of this process, which may still be written


class Piece:
    """A piece of a file, which is read and written as a whole."""

    def __init__(self, file: str, begin: int, end: int) -> None:
        self.file, self.begin, self.end = file, begin, end
        self.sources: list[tuple[int, Source | TensorSource]] = []  # each with the place of its first byte in the file
        self.read = Gate()
        self.begun = False

    def fill(self, memory: torch.Tensor) -> None:
        """Reads the piece into `memory`."""
        for place, source in self.sources:
            begin, end = max(place, self.begin), min(place + source.nbytes, self.end)
            source.read(begin - place, memory[begin - self.begin : end - self.begin])


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


class Reading:
    """The pieces of all files, in the order in which they are read. It is a `runtime.capture.Capture`."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.pieces: list[Piece] = []
        self.waited_seconds = 0.0  # for how long writers of parameters were held up
        self.error: StateError | None = None  # for a parameter that was written to without asking first
        self._of: dict[Any, list[Piece]] = defaultdict(list)
        self._tensors: dict[Any, list[TensorSource]] = defaultdict(list)
        self._urgent: SimpleQueue[Piece] = SimpleQueue()
        for layout in layouts:
            own = [Piece(layout.name, begin, end) for begin, end in pieces(0, layout.nbytes, GRAIN_BYTES)]
            place = 0
            for source in layout.sources:
                among = own[place // GRAIN_BYTES : -(-(place + source.nbytes) // GRAIN_BYTES)] if source.nbytes else []
                for piece in among:
                    piece.sources.append((place, source))
                place += source.nbytes
                if source.owner is not None:
                    self._of[source.owner] += among
                    if isinstance(source, TensorSource):
                        self._tensors[source.owner].append(source)
            self.pieces += own
        self._in_order = iter(self.pieces)
        self._neighbours = _Ranges(
            (*memory, source.owner) for source in self.tensors() if (memory := source.memory) is not None
        )

    def tensors(self) -> list[TensorSource]:
        """The tensors that are read, and that may be written to meanwhile."""
        return [source for several in self._tensors.values() for source in several]

    def next(self) -> Piece | None:
        """The piece that is to be read now; None when all have begun."""
        while not self._urgent.empty():
            piece = self._urgent.get()  # only one thread reads
            if not piece.begun:
                return piece
        return next((piece for piece in self._in_order if not piece.begun), None)

    def expect(self, parameters: Sequence[Any]) -> None:
        """As in `runtime.capture.Capture`."""
        for owner in self._touched(parameters):
            for source in self._tensors.get(owner, []):
                source.expect_writes()

    def hurry(self, parameters: Sequence[Any] | None) -> None:
        """As in `runtime.capture.Capture`."""
        owners = list(self._of) if parameters is None else self._touched(parameters)
        wanted = [piece for owner in owners for piece in self._of.get(owner, [])]
        begun_at = time.perf_counter()
        for piece in wanted:
            if not piece.read.is_open:
                self._urgent.put(piece)
        for piece in wanted:
            piece.read.wait()
        self.waited_seconds += time.perf_counter() - begun_at

    def spoilt(self, parameters: Sequence[Any]) -> None:
        """As in `runtime.capture.Capture`."""
        for owner in self._touched(parameters):
            for source in self._tensors.get(owner, []):
                self.error = self.error or source.write_error()

    def _touched(self, parameters: Iterable[Any]) -> list[Any]:
        """The owners whose bytes change when these parameters do: they, and those that share memory (`p.data = t`)."""
        found = list(parameters)
        with without_overrides():  # reads an offloaded model's parameters as they are
            memories = [memory_of(parameter) for parameter in found]
        for memory in memories:
            if memory is not None:
                found += self._neighbours.overlapping(*memory)
        return list(dict.fromkeys(found))

    def forget(self) -> None:
        """Lets go of all memory; `waited_seconds` is kept."""
        self.pieces, self._of, self._tensors, self._neighbours = [], {}, {}, _Ranges()
        self._in_order, self._urgent = iter(()), SimpleQueue()


class Saving:
    """A checkpoint that is being written, as `headrace.save` returns it."""

    nbytes = 0
    """The bytes of the checkpoint."""

    seconds = 0.0
    """How long saving took; 0.0 before it is done."""

    def __init__(
        self,
        directory: NewDirectory,
        layouts: Sequence[Layout],
        manifest: Callable[..., Manifest],
        memory_bytes: int,
        *,
        keep: int | None,
        shows: bool,
    ) -> None:
        self.path = directory.target
        self._directory, self._manifest, self._keep, self._shows = directory, manifest, keep, shows
        self._reading = Reading(layouts)
        self._sizes = {layout.name: layout.nbytes for layout in layouts}
        self._checksums = {name: [0] * -(-nbytes // GRAIN_BYTES) for name, nbytes in self._sizes.items()}
        self.nbytes = sum(self._sizes.values())
        self._error: BaseException | None = None
        self._told = False  # whether somebody was told how it ended
        self._begin, self._done = Gate(), Gate()
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        self._files: dict[str, DirectFile] = {}
        try:
            for name, nbytes in self._sizes.items():
                (directory.path / name).parent.mkdir(exist_ok=True)
                self._files[name] = _new_file(directory.path / name, nbytes)
            for _ in range(min(memory_bytes // GRAIN_BYTES, len(self._reading.pieces))):
                self._free.put(new_pages(GRAIN_BYTES))
        except BaseException:
            for file in self._files.values():
                file.close()
            raise

    def __repr__(self) -> str:
        end = f"failed: {self._error}" if self._error is not None else f"written in {self.seconds:.1f} s"
        return f"<{self.path}: {format_bytes(self.nbytes)}, {end if self.done else 'being written'}>"

    @property
    def done(self) -> bool:
        """Whether saving has ended, with success or not."""
        return self._done.is_open

    @property
    def waited_seconds(self) -> float:
        """How long optimizers' updates waited for the parameters to be read."""
        return self._reading.waited_seconds

    def wait(self) -> None:
        """Waits until the checkpoint is complete and safe from a loss of power. Raises the error if saving failed."""
        self._told = True
        self._done.wait()
        if self._error is not None:
            raise self._error

    def ended(self) -> None:
        """Waits until saving has ended, with success or not."""
        self._done.wait()

    def settle(self) -> None:
        """Waits until saving has ended. Raises its error, if nobody has been told of it."""
        if self._told:
            self.ended()
        else:
            self.wait()

    def _run(self) -> None:
        begun_at = time.perf_counter()
        self._begin.wait()
        reading = self._reading
        devices = (source.device for source in reading.tensors())
        mark_headrace_thread(next(filter(is_accelerator, devices), None))
        captured = ExitStack()  # ends when reading ends, or fails to begin
        captured.callback(end_capture, reading)
        try:
            with (
                captured,
                progress("headrace: saving", self.nbytes if self._shows else 0) as bar,
                ThreadPoolExecutor(WRITERS, thread_name_prefix="headrace-save-write") as writers,
                neighbours_follow(),
                captured,
            ):
                self._read(writers, bar.update)
            if reading.error is not None:
                raise reading.error
        except BaseException as error:
            self._fail(self._cause(error))
        for piece in reading.pieces:  # after a failure
            if not piece.read.is_open:
                piece.read.open()
        for name, file in self._files.items():
            self._end_file(name, file)
        try:
            if self._error is None:
                files = {name: FileRecord(size, self._checksums[name]) for name, size in self._sizes.items()}
                write_whole(self._directory.path / MANIFEST, self._manifest(files=files).to_json())
                self._directory.publish()
                if self._keep is not None:
                    remove_older(self.path, self._keep)
        except BaseException as error:
            self._fail(error)
        if self._error is not None:
            self._directory.discard()
        reading.forget()
        self._files, self._free = {}, SimpleQueue()
        self.seconds = time.perf_counter() - begun_at
        self._done.open()

    def _cause(self, error: BaseException) -> BaseException:
        """The error to report: a wrong checksum of bytes on disk comes from a write to a tensor, if there was one."""
        if isinstance(error, DiskError) and error.errno == errno.EBADMSG:
            written = next((source for source in self._reading.tensors() if source.was_written), None)
            return error if written is None else written.write_error()
        return error

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error

    def _read(self, writers: ThreadPoolExecutor, advance: Callable[[int], object]) -> None:
        while self._error is None:
            memory = self._free.get()
            piece = self._reading.next()
            if piece is None:
                return
            piece.begun = True
            piece.fill(memory[: piece.end - piece.begin])
            piece.read.open()
            advance(piece.end - piece.begin)
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
        """Closes the file; if nothing failed, first makes it safe from a loss of power."""
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


@functools.cache
def _settle_at_exit() -> None:
    """Called when the first save begins: what is registered last runs first, before models are let go of."""
    threading._register_atexit(_end)  # type: ignore[attr-defined]


def begin(saving: Saving) -> None:
    """Starts the thread that reads, writes and publishes. From now on, optimizers ask before they write."""
    thread = threading.Thread(target=saving._run, name="headrace-save")
    try:
        _settle_at_exit()
        thread.start()
    except RuntimeError:  # no more threads, or the interpreter ends
        for file in saving._files.values():
            file.close()
        saving._directory.discard()
        raise
    begin_capture(saving._reading)
    saving._begin.open()
    last_saving[:] = [saving]


def _end() -> None:
    """Called at exit: waits until the checkpoint is whole, or prints why it is not."""
    for saving in last_saving:
        try:
            saving.settle()
        except Exception as error:
            print(f"headrace.save: {saving.path} was not saved: {error}", file=sys.stderr)  # noqa: T201


after_fork(last_saving.clear)  # a forked child has none of the threads that write
