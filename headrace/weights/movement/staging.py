"""What becomes of gradients that do not go straight into `home.grad`? They are copied to page-locked staging memory,
from which the host lane adds or casts them into their targets.
"""

import mmap
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import repeat
from typing import NamedTuple

import torch

from headrace.memory.arena import Arena, aligned, whole_pages
from headrace.memory.disk import Request
from headrace.memory.ledger import Ledger
from headrace.weights.movement.flow import PURPOSE
from headrace.weights.movement.host_gradients import flat, laid_out
from headrace.weights.rest.tiers import DiskGradients

_ANY_BYTES = 1 << 62  # no limit


class Staged(NamedTuple):
    """A gradient, or a part of one, on its way through staging memory."""

    piece: torch.Tensor  # in staging memory
    source: torch.Tensor  # on the device
    target: torch.Tensor  # the tensor that is `home.grad`, or becomes it
    adds: bool  # whether the piece is added to what the target holds
    disk: DiskGradients | None  # where the target rests on disk; None: in host memory
    rows: torch.Tensor | None = None  # which rows of the target the piece has; None: all

    @property
    def is_written(self) -> bool:
        """Whether the target gets exactly the bytes of the piece."""
        same = self.piece.dtype == self.target.dtype and self.target.is_contiguous()
        return same and not self.adds and self.rows is None

    def perform(self) -> None:
        """On the host lane: adds or copies the gradient into the target."""
        if self.rows is not None:
            piece = self.target.index_select(0, self.rows).add_(self.piece) if self.adds else self.piece
            self.target.index_copy_(0, self.rows, piece.to(self.target.dtype))
        elif self.adds:
            self.target.add_(self.piece)
        else:
            self.target.copy_(self.piece)


class Remainder(NamedTuple):
    """The rows of a target that a gradient of some rows lacks. They become zero, or a zero is added to them."""

    target: torch.Tensor
    rows: Sequence[int] | None  # rows without a gradient; None: all are cleared, before the gradient comes
    adds: bool
    disk: DiskGradients | None

    def perform(self) -> None:
        """On the host lane: writes or adds the zeros."""
        for part in [self.target] if self.rows is None else [self.target[row] for row in self.rows]:
            if self.adds:
                part.add_(0.0)
            else:
                part.zero_()


def remainders_of(
    target: torch.Tensor, rows: torch.Tensor, disk: DiskGradients | None, *, adds: bool, large: bool
) -> list[Remainder]:
    """What is to be done to the rows of `target` that are not in `rows`. `large`: each row (an expert) is worth a call
    of its own, so that no row is written twice.

    Adding a zero turns -0 into +0. The small rows of tables need none: their sums begin at +0, and have no -0.
    """
    if large:
        return [Remainder(target, sorted(set(range(len(target))).difference(rows.tolist())), adds, disk)]
    return [] if adds else [Remainder(target, None, adds, disk)]


def add_up(staged: "list[Staged | Remainder]", under_way: list[Request]) -> list[Request]:
    """On the host lane: adds or casts staged gradients into their targets.

    Returns the writes to disk that this begins, which read the staging memory. `under_way`: all writes that may not
    have ended, a list that only this thread uses.
    """
    under_way[:] = [write for write in under_way if not write.query()]
    writes: list[Request] = []
    on_disk: Counter[DiskGradients] = Counter()
    with torch.no_grad():
        for one in staged:
            if isinstance(one, Staged) and one.disk is not None and one.is_written:
                writes.append(one.disk.write(one.target, one.piece))
                under_way.append(writes[-1])
                continue
            if one.disk is not None:
                for write in under_way:  # one may be of this target
                    write.settle()
                on_disk[one.disk] += one.target.nbytes
            one.perform()
    for disk, nbytes in on_disk.items():
        disk.forget(nbytes)
    staged.clear()  # so that counts of references to gradients find none of ours
    return writes


class Additions:
    """The end of the host lane's job for one transfer, and of the writes to disk that this job submits."""

    def __init__(self, job: "Future[list[Request]]") -> None:
        self._job = job

    def synchronize(self) -> None:
        """The caller waits for the job and its writes. Raises what failed."""
        writes = self._job.result()
        for write in writes:
            write.settle()
        for write in writes:
            write.synchronize()


class Staging:
    """A ring of pinned memory: parts of it receive copies while the host lane adds up others.

    It has room for the gradients of two blocks, but no more than twice `most_bytes`: larger gradients are cut. Single
    rows, and gradients for a `home.grad` with gaps, cannot be cut: the ring grows for them.
    """

    def __init__(self, device: torch.device, ledger: Ledger, most_bytes: int | None) -> None:
        self._device = device
        self._ledger = ledger
        self._most_bytes = _ANY_BYTES if most_bytes is None else most_bytes
        self._wanted_bytes = 0
        self._ring = torch.empty(0, dtype=torch.uint8, device="cpu")
        # Oldest first, with the bytes of the ring that each reads, from the first to the one past the last.
        self._under_way: deque[tuple[int, int, Additions]] = deque()
        self._begin = self._end = 0  # of what was carved since the last `sent`
        self.coming_bytes = 0  # about how many are carved next, at most: better in one piece of the ring

    def grow(self, block_bytes: int) -> None:
        """Asks for room for two blocks of `block_bytes` each. The ring is made at first use, as a single micro-batch
        needs none.
        """
        self._wanted_bytes = max(self._wanted_bytes, aligned(min(block_bytes, self._most_bytes)))

    def limit(self, most_bytes: int) -> None:
        """Cuts gradients to `most_bytes` from now on. Called where host memory is short."""
        self._most_bytes = min(self._most_bytes, most_bytes)
        self._wanted_bytes = min(self._wanted_bytes, self._most_bytes)

    def make(self) -> None:
        """Makes the ring before its first use."""
        if self.missing_bytes:
            self._make(self.missing_bytes)

    @property
    def missing_bytes(self) -> int:
        """The most bytes that making the ring (anew) takes: the ring may be a page larger than wanted, see `carve`."""
        return whole_pages(2 * self._wanted_bytes) + mmap.PAGESIZE if 2 * self._wanted_bytes > len(self._ring) else 0

    def parts(
        self, gradients: Sequence[torch.Tensor], target: torch.Tensor, rows: torch.Tensor | None
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """The gradient in parts of at most half the ring, if it can be cut: each, its target, its rows (None: all)."""
        gradient = gradients[0]
        if rows is not None:
            count = max(1, self._wanted_bytes // max(1, gradient[0].nbytes))
            sources = [source for gradient in gradients for source in gradient.contiguous().split(count)]
            return zip(sources, repeat(target), rows.split([len(source) for source in sources]), strict=False)
        if not torch.ops.aten.is_non_overlapping_and_dense(target):
            return [(gradient.contiguous(), target, None)]  # the user made this `home.grad`
        # Less a page, so that two parts fit into the ring with the bytes that `carve` leaves out before each.
        count = max(1, (self._most_bytes - mmap.PAGESIZE) // gradient.element_size())
        source = flat(laid_out(gradient, target.stride(), gradient.dtype))
        return zip(source.split(count), flat(target).split(count), repeat(None), strict=False)

    def fits(self, nbytes: int, page: int | None) -> bool:
        """Whether `nbytes` fit after what was carved since the last `sent`. `page`: see `carve`."""
        return self._begin == self._end or self._place(page) + aligned(nbytes) <= len(self._ring)

    def carve(self, gradient: torch.Tensor, page: int | None) -> torch.Tensor:
        """Memory for a copy of contiguous `gradient`, which `fits`. The host waits until earlier additions are done
        with it.

        `page`: the byte of a file where the gradient goes, if it goes to disk. The memory then lies in its page as it
        will in the file, so that whole pages can be written as they are.
        """
        nbytes = aligned(gradient.nbytes)
        ring_bytes = max(2 * max(self._wanted_bytes, nbytes), (page or 0) % mmap.PAGESIZE + nbytes)
        if ring_bytes > len(self._ring):
            self._make(ring_bytes)
        first, together = self._place(page), max(nbytes, min(self.coming_bytes, len(self._ring) // 2))
        if self._begin == self._end and first + together > len(self._ring):
            self._begin = self._end = 0
            first = self._place(page)
        last = first + nbytes
        while any(begin < last and first < end for begin, end, _ in self._under_way):
            self._finish_oldest()
        self._end = last
        return self._ring[first : first + gradient.nbytes].view(gradient.dtype).view(gradient.shape)

    def _place(self, page: int | None) -> int:
        """The first free byte that lies in its page as byte `page` of a file does; None: the first free byte."""
        return self._end if page is None else self._end + (page - self._end) % mmap.PAGESIZE

    def sent(self, additions: Additions) -> None:
        """Called when what was carved since the last call was sent: `additions` reads it."""
        self._under_way.append((self._begin, self._end, additions))
        self._begin = self._end

    def under_way(self) -> list[Additions]:
        """The additions that were submitted and not waited for."""
        return [additions for *_, additions in self._under_way]

    def wait(self) -> None:
        """The host waits for all additions. Raises what failed in one."""
        self._begin = self._end = 0
        while self._under_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """The host waits for the oldest additions. What failed in them is raised once; Ctrl-C leaves them under way."""
        try:
            self._under_way[0][-1].synchronize()
        except Exception:
            self._under_way.popleft()
            raise
        self._under_way.popleft()

    def _make(self, nbytes: int) -> None:
        self.wait()
        self._ring = Arena(nbytes, self._device, self._ledger, PURPOSE).tensor(0, nbytes)
