"""How do weights in host memory cross the link in three quarters of their bytes? Packed, where passes wait for it.

A packed piece crosses to one of two halves of a little device memory. A kernel unpacks it into the block's buffer, on
a lane of its own, while the next piece crosses to the other half. See docs/design/packed.md.
"""

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from headrace.errors import BudgetError, StateError
from headrace.memory.arena import Arena, whole_pages
from headrace.memory.ledger import Ledger, Tier
from headrace.memory.packed import Packed, pack, pack_into, unpack_on_device, unpacks_by_kernel
from headrace.runtime.device import new_stream
from headrace.runtime.host import available_host_bytes
from headrace.runtime.lanes import Copy, Event, Lane, Lanes, Transfer
from headrace.runtime.link import LinkSpeed
from headrace.runtime.threads import OneThread, keeps_interrupts
from headrace.weights.meter import Meter
from headrace.weights.movement.block import Block
from headrace.weights.rest.packing import is_frozen

_LOADS_BEFORE = 3  # loads of the same contents, after which a block is packed: it comes repeatedly
MOST_PIECE_BYTES, LEAST_PIECE_BYTES = 32 << 20, 8 << 20  # of weights; smaller pieces cost the host more than they save
PIECES_OF_BUDGET = 64
_MOST_SHARE = 0.8  # of a piece's bytes: pieces that take more when packed cross as they are
_HOST_SHARE = 0.5  # of the memory that is left in the host budget and on the machine
_BUDGET_BLOCKS = 3  # blocks that must keep their room, for computing and loading side by side
WORTH = 0.95  # the most that packed loads may take, of the time of plain ones
_JUDGED_BLOCKS, _JUDGED_SEND = 3, 2  # so many blocks are judged, by this packed load of each


@dataclass
class _Half:
    """One half of the device memory that packed pieces come to."""

    memory: torch.Tensor
    free: Event  # when the last piece in it is unpacked


@dataclass(frozen=True)
class _Piece:
    """A piece of a block: its bytes from `first` on."""

    first: int
    nbytes: int
    packed: Packed | None  # its packed form in host memory; None: it crosses as it is

    @property
    def crossing_bytes(self) -> int:
        return self.nbytes if self.packed is None else self.packed.memory.nbytes


@dataclass(eq=False)
class _PackedBlock:
    """The packed copy of a block in host memory, and what is known of its loads."""

    of: object  # the generation and place of the contents that are packed
    loads: int = 0  # how often these contents were loaded
    is_asked_for: bool = False
    pieces: Sequence[_Piece] = ()  # empty before all are packed, and once dropped
    is_dropped: bool = False
    last_read: Event | None = None
    sends: int = 0
    judged: Transfer | None = None  # the second packed load: kernels may be compiled during the first

    @property
    def crossing_bytes(self) -> int:
        return sum(piece.crossing_bytes for piece in self.pieces)

    @property
    def held_bytes(self) -> int:
        return sum(whole_pages(piece.crossing_bytes) for piece in self.pieces if piece.packed is not None)


@dataclass
class _Room:
    """Host memory for packed pieces."""

    nbytes: int  # all of it, taken or not
    taken_bytes: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)  # held to change this, and to read or drop pieces
    packing: threading.RLock = field(default_factory=threading.RLock)  # held to make pieces; never within `lock`


class PackedLoads:
    """The packed copies of one model's blocks that rest in host memory. Does nothing before `open`.

    `wanted`: False if it is never to be opened.
    """

    def __init__(self, device: torch.device, lanes: Lanes, ledger: Ledger, meter: Meter, *, wanted: bool) -> None:
        self._device, self._lanes, self._ledger, self._meter = device, lanes, ledger, meter
        self._may_open = wanted and unpacks_by_kernel(device)
        self.is_open = False
        self._scratch: torch.Tensor | None = None
        self._halves: list[_Half] = []
        self._piece_bytes = 0
        self._blocks: dict[Block, _PackedBlock] = {}
        self._room = _Room(0)
        self._thread: OneThread | None = None
        self._plain_link = LinkSpeed([])  # the speed of plain loads
        self._is_judged = False
        self._changed = False  # whether load times have changed since the last call of `changed`
        self._process = os.getpid()

    @keeps_interrupts
    def __del__(self) -> None:
        """If a model goes without `remove()`: waits, so that memory in use by loads is not reused."""
        if self._halves and self._process == os.getpid():
            with contextlib.suppress(RuntimeError):
                self.finish()
                self._lanes.copy(Lane.ONLOAD, (), self._lanes.mark()).done.synchronize()

    @property
    def held_bytes(self) -> int:
        """The bytes of device memory that this holds beside blocks."""
        return 0 if self._scratch is None else self._scratch.nbytes

    def wanted_bytes(self, blocks: Iterable[Block], budget_bytes: int, largest_bytes: int) -> int:
        """The bytes of a budget that `open` takes for these blocks; 0: this is not to be opened."""
        piece_bytes = min(MOST_PIECE_BYTES, budget_bytes // PIECES_OF_BUDGET, largest_bytes) // 256 * 256
        wanted_bytes = 2 * _half_bytes(piece_bytes)
        count = min(_BUDGET_BLOCKS, budget_bytes // max(1, largest_bytes))
        has_room = count * largest_bytes + wanted_bytes <= budget_bytes
        worth_it = self._may_open and self._scratch is None and piece_bytes >= LEAST_PIECE_BYTES
        if not (worth_it and has_room) or self._ledger.host_budget_bytes is None:
            return 0
        return wanted_bytes if any(map(_may_be_packed, blocks)) else 0

    def open(self, scratch: torch.Tensor, link: LinkSpeed) -> None:
        """From now on packs blocks that come repeatedly. `scratch`: device memory; `link`: the speed of plain loads."""
        self._scratch, self._plain_link, self.is_open = scratch, link, True
        half_bytes, free = scratch.nbytes // 2, self._lanes.mark()
        self._halves = [_Half(part, free) for part in scratch.split(half_bytes)]
        self._piece_bytes = min(MOST_PIECE_BYTES, int(half_bytes / _MOST_SHARE) // 256 * 256)
        # The machine's memory counts, too: optimizers may be in no budget.
        self._room = _Room(int(min(self._ledger.host_left_bytes, available_host_bytes()) * _HOST_SHARE))
        self._ledger.spare = weakref.WeakMethod(self._give_way)
        self._thread = OneThread("headrace-pack", self._device)
        check = partial(_unpacks_right, self._device, self._halves[0].memory, self._halves[1].memory, free)
        self.works = self._thread.submit(check)

    def load_bytes(self, block: Block) -> int:
        """The bytes that cross the link when the block is loaded."""
        packed = self._blocks.get(block)
        return block.nbytes if packed is None or not packed.pieces else packed.crossing_bytes

    def changed(self) -> bool:
        """Whether load times have changed since the last call."""
        changed, self._changed = self._changed, False
        return changed

    def is_worth_it(self) -> bool:
        """Whether packed loads are quicker than plain ones were. Judged once; True until then. Waits for nothing."""
        if self._scratch is None:
            return True
        if self._is_judged or not self._may_open:
            return self._may_open  # False: Ctrl-C has struck during `close`
        known = [(block.nbytes, packed.judged) for block, packed in self._blocks.items() if packed.judged is not None]
        if len(known) < _JUDGED_BLOCKS or not all(transfer.done.query() for _, transfer in known):
            return True
        self._is_judged = True
        packed_seconds = sum(self._lanes.seconds(transfer.begun, transfer.done) for _, transfer in known)
        plain_seconds = sum(self._plain_link.load_seconds(nbytes) for nbytes, _ in known)
        return packed_seconds <= WORTH * plain_seconds

    def onload(self, block: Block, buffer: torch.Tensor, copies: Sequence[Copy], after: Event) -> Transfer | None:
        """Submits a packed load in place of `copies`, which are from `Block.prepare_copies`. It begins after `after`.
        Called while `is_open`.

        None: nothing was submitted, as the block is not packed.
        """
        if not copies or copies[0][0] is not buffer or buffer.nbytes < LEAST_PIECE_BYTES:
            return None
        if not is_frozen(block.params):
            if block in self._blocks:
                self._drop(self._blocks.pop(block))
            return None
        if block.memory_is_kept:  # whoever keeps the memory may write to it unnoticed
            return None
        of = block.look(), block.rest
        packed = self._blocks.get(block)
        if packed is None or packed.of != of:
            if packed is not None:
                self._drop(packed)
            packed = self._blocks[block] = _PackedBlock(of)
        packed.loads += 1
        if packed.loads > _LOADS_BEFORE and not packed.is_asked_for and self._thread is not None:
            packed.is_asked_for = True
            self._thread.submit(_pack, weakref.ref(self), packed, copies[0][1])
        with self._room.lock:
            return self._send(packed, buffer, copies, after) if packed.pieces else None

    def close(self) -> torch.Tensor:
        """Ends packed loads for good. Returns the device memory that `open` was given, which compute may then use."""
        if self._scratch is None:
            raise StateError("packed loads were closed before they were opened")
        self._may_open = self.is_open = False
        for packed in self._blocks.values():
            self._drop(packed)
        self._blocks.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        for half in self._halves:
            self._lanes.wait(half.free)
        self._halves = []
        self._ledger.spare = None
        self._changed = True
        scratch, self._scratch = self._scratch, None
        return scratch

    def finish(self) -> None:
        """The host waits until no piece is being unpacked."""
        if self._halves:  # does not rely on `free`: Ctrl-C may have struck before that was noted
            self._lanes.beside(_nothing, ()).synchronize()

    def _send(self, packed: _PackedBlock, buffer: torch.Tensor, copies: Sequence[Copy], after: Event) -> Transfer:
        begun, end = None, after
        for piece in packed.pieces:
            place = slice(piece.first, piece.first + piece.nbytes)
            if piece.packed is None:
                crossing = self._lanes.copy(Lane.ONLOAD, [(buffer[place], copies[0][1][place])], after)
                end = self._lanes.beside(_nothing, (crossing.done,))
            else:
                half = self._halves[0]
                self._halves.reverse()
                there = half.memory[: piece.packed.memory.nbytes]
                crossing = self._lanes.copy(Lane.ONLOAD, [(there, piece.packed.memory)], half.free)
                came = Packed(there, piece.packed.words, piece.packed.escapes)
                job = partial(unpack_on_device, came, buffer[place])
                half.free = end = self._lanes.beside(job, (crossing.done, after))
            packed.last_read = crossing.done
            begun = crossing.begun if begun is None else begun
        nbytes = packed.crossing_bytes
        if copies[1:]:
            end = self._lanes.copy(Lane.ONLOAD, copies[1:], end).done
            nbytes += sum(source.nbytes for _, source in copies[1:])
        self._meter.onload_packed_bytes += packed.crossing_bytes
        self._meter.onload_unpacked_bytes += buffer.nbytes
        transfer = Transfer(Lane.ONLOAD, (), nbytes, begun, end)
        packed.sends += 1
        if packed.sends == _JUDGED_SEND:
            packed.judged = transfer
        return transfer

    def _drop(self, packed: _PackedBlock) -> None:
        with self._room.lock:
            if packed.last_read is not None:
                packed.last_read.synchronize()
            self._room.taken_bytes -= packed.held_bytes
            packed.pieces, packed.is_dropped = (), True
            self._changed = True

    def _give_way(self, nbytes: int) -> None:
        """Gives up `nbytes` of host memory for good, as something else needs them. Called on any thread."""
        with self._room.lock:
            for packed in reversed(list(self._blocks.values())):
                if nbytes <= 0:
                    break
                nbytes -= packed.held_bytes
                self._drop(packed)
            self._room.nbytes = self._room.taken_bytes
        with self._room.packing:  # pieces in the making find no room then, and go as well
            pass

    def pack(self, packed: _PackedBlock, memory: torch.Tensor) -> None:
        """On the thread that packs: packs all of `memory`, or nothing where there is no room for all."""
        with self._room.packing:
            self._make_pieces(packed, memory)

    def _make_pieces(self, packed: _PackedBlock, memory: torch.Tensor) -> None:
        arena = self._arena(self._halves[0].memory.nbytes, torch.device("cpu"))
        if arena is None:
            return
        work = arena.tensor
        pieces: list[_Piece] = []
        taken_bytes = 0
        count = -(-len(memory) // self._piece_bytes)
        piece_bytes = -(-len(memory) // count // 256) * 256
        for first in range(0, len(memory), piece_bytes):
            part, packed_piece = memory[first : first + piece_bytes], None
            if packed.is_dropped or self._room.taken_bytes + taken_bytes > self._room.nbytes:
                return
            nbytes = pack_into(part, work(0, self._halves[0].memory.nbytes))
            if nbytes:
                taken_bytes += whole_pages(nbytes)
                if self._room.taken_bytes + taken_bytes > self._room.nbytes:
                    return
                if (arena := self._arena(nbytes, self._device)) is None:
                    return
                packed_piece = Packed.in_memory(arena.tensor(0, nbytes).copy_(work(0, nbytes)))
            pieces.append(_Piece(first, len(part), packed_piece))
        with self._room.lock:
            has_room = self._room.taken_bytes + taken_bytes <= self._room.nbytes
            if not packed.is_dropped and taken_bytes and has_room:
                self._room.taken_bytes += taken_bytes
                packed.pieces = pieces
                self._changed = True

    def _arena(self, nbytes: int, device: torch.device) -> Arena | None:
        """Host memory that nobody else wants; None: there is none."""
        nbytes = whole_pages(nbytes)
        if not self._ledger.take_spare("weights", nbytes):
            return None
        try:
            return Arena(nbytes, device, self._ledger, "weights")
        except BudgetError:  # somebody else has just taken it
            return None
        finally:
            self._ledger.add(Tier.HOST, "weights", -nbytes)  # the arena books its own


def _may_be_packed(block: Block) -> bool:
    return not block.is_fetched and block.nbytes >= LEAST_PIECE_BYTES and is_frozen(block.params)


def _pack(loads: "weakref.ref[PackedLoads]", packed: _PackedBlock, memory: torch.Tensor) -> None:
    """Packs a block on the thread that packs, which must not keep the model alive."""
    present = loads()
    if present is not None and present.works.result():
        present.pack(packed, memory)


def _nothing() -> None:
    pass


def _half_bytes(piece_bytes: int) -> int:
    return -(-int(piece_bytes * _MOST_SHARE) // 256) * 256


def _unpacks_right(device: torch.device, packed_place: torch.Tensor, place: torch.Tensor, free: Event) -> bool:
    """Whether the device's kernel, compiled just now on this machine, works and gives the same bits as the host."""
    count = place.nbytes // 4  # as many words as fit in half of the place
    every = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16)  # every possible word: most escape
    own = torch.Generator("cpu").manual_seed(0)  # leaves the user's generator as in the plain run
    usual = torch.randn(count - len(every), generator=own, dtype=torch.float32, device="cpu").to(torch.bfloat16)
    words = torch.cat([every, usual.view(torch.int16)])
    memory = pack(words)
    if memory is None:
        return False
    at_home = Packed.in_memory(memory)
    why = "its bits are not the host's"
    try:
        with new_stream(device) as stream:
            stream.wait_event(free)  # type: ignore[arg-type]
            there = packed_place[: memory.nbytes].copy_(memory)
            result = place[: words.nbytes]
            unpack_on_device(Packed(there, at_home.words, at_home.escapes), result)
            works = torch.equal(result.cpu(), words.view(torch.uint8))
    except Exception as error:  # whatever keeps Triton from compiling
        works, why = False, f"{type(error).__name__}: {error}"
    if not works:
        warnings.warn(_NOT_PACKED.format(device=device, why=why), RuntimeWarning, stacklevel=2)
    return works


_NOT_PACKED = (
    "the kernel that unpacks weights does not work on {device} ({why}): they cross the link as they are, and results"
    " are the same. packed=False avoids the attempt"
)
