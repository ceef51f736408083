"""How does an accelerator update what rests in host memory? Piece by piece, in device memory kept for that.

While one piece is updated, the next one arrives and the one before leaves. Order comes from events alone; the host
waits for pieces that have left, and at the end for all.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.config import format_bytes
from headrace.errors import BudgetError
from headrace.memory.arena import KERNEL_ALIGNMENT_BYTES, Arena
from headrace.memory.ledger import Ledger
from headrace.optim import eight_bit, kernel, update
from headrace.optim.eight_bit import RUN_ELEMENTS
from headrace.optim.kernel import Master
from headrace.optim.update import Update
from headrace.runtime.lanes import Copy, Event, Lane, open_lanes
from headrace.runtime.threads import wait_asleep

_RING_PIECES = 3  # that the memory takes: one arrives, one is updated, one leaves
_MOST_PIECE_BYTES = 16 << 20  # long enough for the link: 1 Mi elements of AdamW's with bfloat16 weights
_LEAST_ELEMENTS = 1 << 16  # of a piece, unless its parameter has fewer: kernels take longer than their launches
_LEAST_PIECES = 8  # of a parameter, at least, unless they would be smaller: some leave while others arrive
_SUBMITTED = 2 * _RING_PIECES  # pieces that are submitted before the host waits for the first of them
_MOST_COLUMNS = 6  # weight, gradient, master, two moments and a maximum


@dataclass(frozen=True)
class Piece:
    """What is updated at once.

    `columns`: all that the update needs, dense; what is on the accelerator already is used where it is. `update` is
    given them on the accelerator. It submits its kernels to the current stream, and returns the copies that bring to
    the host what it wrote. `done` is called when these copies are over.
    """

    columns: Sequence[torch.Tensor]
    update: Callable[[Sequence[torch.Tensor]], Sequence[Copy]]
    done: Callable[[], None]


@dataclass(frozen=True)
class _UnderWay:
    """A piece that was submitted, the copies that bring it back, and the bytes of the memory that it takes."""

    piece: Piece
    copies: Sequence[Copy]
    done: Event
    start: int
    stop: int


def device_bytes(parameters: Mapping[torch.Tensor, bool]) -> int:
    """The device memory that updates of these parameters take. The values say whether a rule needs a whole one."""
    least = 0
    for parameter, whole in parameters.items():
        # Rules for whole parameters have a gradient, a master, and one moment or two factors of it. Together, these
        # are no larger than the moment, unless the matrix has a single row or column.
        wide = max(4, parameter.itemsize)
        columns = _MOST_COLUMNS - 1 if not whole else 4 if 1 in parameter.shape[-2:] else 3
        nbytes = parameter.numel() * (parameter.itemsize + columns * wide)
        nbytes += _MOST_COLUMNS * KERNEL_ALIGNMENT_BYTES + RUN_ELEMENTS * wide
        least = max(least, nbytes if whole else _RING_PIECES * min(_MOST_PIECE_BYTES, nbytes))
    return _aligned(least)


class DeviceUpdates:
    """Performs updates on one accelerator. `memory`: device memory for pieces, a flat uint8 tensor."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.device = memory, memory.device
        self._lanes = open_lanes(memory.device)
        self._made = self._lanes.mark()  # earlier users of the memory are done with it
        self._next = 0  # where the next piece goes, if it fits
        self._under_way: deque[_UnderWay] = deque()
        # One for each piece that is submitted, and one for the piece that is being made.
        flags = Arena(_SUBMITTED + 1, memory.device, Ledger(), "optimizer").tensor(0, _SUBMITTED + 1)
        self._flags = itertools.cycle(flags.view(torch.bool).split(1))
        weakref.finalize(self, self._lanes.close, wait=False)

    def perform(self, updates: Sequence[Update], gradient_scale: float) -> None:
        """As `update.perform`, with the accelerator's arithmetic. Blocks until all is written."""
        if not update.are_apart([one.weight for one in updates]):
            for one in updates:
                self.perform([one], gradient_scale)
            return
        self.run(piece for one in updates for piece in self._pieces(one, gradient_scale))

    def flag(self) -> torch.Tensor:
        """A flag in host memory, of shape (1,), to which a piece may copy what it finds. Its `done` reads it."""
        flag: torch.Tensor = next(self._flags)
        return flag

    def run(self, pieces: Iterable[Piece]) -> None:
        """Updates all pieces in order. Blocks until all is written, also if an error or Ctrl-C breaks it off."""
        with torch.accelerator.device_index(self.device.index):  # this thread may never have been told
            try:
                for piece in pieces:
                    while len(self._under_way) >= _SUBMITTED:
                        self._finish_one()
                    self._submit(piece)
                while self._under_way:
                    self._finish_one()
            finally:
                self._finish_copies()

    def _submit(self, piece: Piece) -> None:
        start, stop, free = self._room(piece)
        here = self._placed(piece.columns, start)
        arriving = [
            (target, source) for target, source in zip(here, piece.columns, strict=True) if target is not source
        ]
        after = [self._lanes.copy(Lane.ONLOAD, arriving, free).done] if arriving else [free]
        if len(arriving) < len(here):
            after.append(self._lanes.mark())  # earlier work on the accelerator may still write what is there
        leaving: list[Copy] = []
        updated = self._lanes.beside(lambda: leaving.extend(piece.update(here)), after)
        done = self._lanes.copy(Lane.OFFLOAD, leaving, updated).done
        self._under_way.append(_UnderWay(piece, leaving, done, start, stop))

    def _room(self, piece: Piece) -> tuple[int, int, Event]:
        """The bytes of the memory that a piece takes, and when they are free."""
        nbytes = sum(_aligned(column.nbytes) for column in piece.columns if column.device != self.device)
        if nbytes > self.memory.nbytes:
            raise BudgetError(
                f"an update on {self.device} needs {format_bytes(nbytes)} there at once, and there is room for"
                f" {format_bytes(self.memory.nbytes)}: state[parameter] has more than the optimizer puts there, which"
                ' comes along; take it out, or leave update at "host"'
            )
        if self._next + nbytes > self.memory.nbytes:
            self._next = 0
        start = self._next
        self._next = stop = start + nbytes
        before = [one.done for one in self._under_way if one.start < stop and start < one.stop]
        return start, stop, before[-1] if before else self._made  # pieces leave in order

    def _placed(self, columns: Sequence[torch.Tensor], at: int) -> list[torch.Tensor]:
        """The columns' places on the accelerator: where they are, or else in the memory, from `at` on."""
        placed = []
        for column in columns:
            if column.device == self.device:
                placed.append(column)
                continue
            flat = self.memory[at : at + column.nbytes].view(column.dtype)
            placed.append(flat.as_strided(column.shape, column.stride()))
            at += _aligned(column.nbytes)
        return placed

    def _finish_one(self) -> None:
        one = self._under_way[0]
        wait_asleep(one.done)
        one.piece.done()
        self._under_way.popleft()

    def _finish_copies(self) -> None:
        """The host waits until nothing is copied or updated any more, whatever was broken off."""
        arrived = self._lanes.copy(Lane.ONLOAD, (), self._made).done
        updated = self._lanes.beside(lambda: None, (arrived,))
        wait_asleep(self._lanes.copy(Lane.OFFLOAD, (), updated).done)
        self._under_way.clear()

    def _pieces(self, whole: Update, gradient_scale: float) -> Iterator[Piece]:
        count = whole.weight.numel()
        most = self._most_elements([column for column in whole.columns.values() if column.device != self.device])
        elements = min(most, max(_LEAST_ELEMENTS, count // _LEAST_PIECES // RUN_ELEMENTS * RUN_ELEMENTS))
        for start in range(0, count, elements):
            part = whole.part(start, min(start + elements, count))
            yield _piece(whole, part, gradient_scale, self.flag(), is_last=start + elements >= count)

    def _most_elements(self, columns: Sequence[torch.Tensor]) -> int:
        """How many elements of these columns a piece has at most: whole runs of 8-bit moments."""
        room = self.memory.nbytes // _RING_PIECES - len(columns) * KERNEL_ALIGNMENT_BYTES
        run_bytes = sum(eight_bit.nbytes(RUN_ELEMENTS, column.dtype) for column in columns)
        return max(1, room // max(1, run_bytes)) * RUN_ELEMENTS


def _piece(whole: Update, part: Update, gradient_scale: float, flag: torch.Tensor, *, is_last: bool) -> Piece:
    """The piece that performs a part of an update. What it finds out is noted in `whole`."""
    columns = part.columns

    def perform(here: Sequence[torch.Tensor]) -> Sequence[Copy]:
        there: dict[str, Any] = dict(zip(columns, here, strict=True))
        piece = replace(part, **there)
        update.perform([piece], gradient_scale)
        found = torch.as_tensor(piece.not_finite, device=here[0].device).view(1)
        written = [(columns[name], column) for name, column in piece.columns.items() if name != "gradient"]
        return [(flag, found), *((target, source) for target, source in written if target is not source)]

    def done() -> None:
        whole.not_finite = bool(flag) or whole.not_finite
        if whole.form is Master.SPLIT and is_last:
            whole.checksum = kernel.checksum(update.part_of(whole.weight, 0, whole.weight.numel()))

    return Piece(list(columns.values()), perform, done)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // KERNEL_ALIGNMENT_BYTES) * KERNEL_ALIGNMENT_BYTES
