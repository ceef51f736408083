"""How does host memory come free, for what comes later or while a model sleeps? Blocks move from there to disk."""

from collections.abc import Callable, Sequence

from headrace.config import format_bytes
from headrace.errors import BudgetError
from headrace.memory.arena import whole_pages
from headrace.memory.ledger import Ledger
from headrace.weights.movement.block import Block
from headrace.weights.movement.executor import Executor
from headrace.weights.movement.residency import Residency
from headrace.weights.rest.fetching import Fetching
from headrace.weights.rest.placement import ring_size


class Room:
    """Host memory of one offloaded model that has a disk.

    `has_room`: whether the host budget has room for more bytes. `ranks`: how many ranks of a node share that budget;
    all call `has_room` together. `blocks`: gives all blocks. `open_fetching`: makes what fetches from disk, given the
    bytes and the number of its chunks; it is called when the first block is to move there.
    """

    def __init__(
        self,
        blocks: Callable[[], Sequence[Block]],
        residency: Residency,
        executor: Executor,
        ledger: Ledger,
        open_fetching: Callable[[int, int], Fetching],
        has_room: Callable[[int], bool],
        ranks: int,
    ) -> None:
        self._blocks = blocks
        self._residency = residency
        self._executor = executor
        self._ledger = ledger
        self._open_fetching = open_fetching
        self._has_room, self._ranks = has_room, ranks
        self._asleep: dict[Block, None] = {}  # blocks that `sleep` has moved to disk, in that order
        self._cache_bytes = 0  # that `sleep` took from the host's cache of experts
        residency.begin_fetching = self._begin_fetching

    def make_room(self, nbytes: int) -> bool:
        """Moves blocks to disk until the host budget has room for `nbytes` more. Returns whether it has.

        Not to be called during a pass. Where it returns False, the disk can still be used: what has no room can rest
        there. Raises BudgetError, and moves nothing, where fetching has no room for its staging memory.
        """
        if self._has_room(nbytes):
            return True
        if self._residency.fetching is None:
            self._begin_fetching()
        return self._free(nbytes)

    def sleep(self) -> None:
        """Moves all blocks that can go from host memory to disk, until `wake`, and drops the host's cache of experts.

        Not to be called during a pass.
        """
        self._cache_bytes += self._executor.slices.leave_host()
        for block in self._movable():
            self._asleep[block] = None  # first: Ctrl-C may come amid the move
            self._to_disk(block)

    def wake(self) -> None:
        """Moves the blocks back as far as host memory is free; the others sleep on, and are fetched when they are used.

        A block whose memory somebody keeps (`p.data`) stays on disk: that memory has to go on showing the weights.
        Called when a pass begins, too.
        """
        if self._asleep:
            self._return_blocks()
        if self._cache_bytes and not self._asleep and self._ledger.fits(whole_pages(self._cache_bytes)):
            self._executor.slices.use_host(self._cache_bytes)
            self._cache_bytes = 0

    def _return_blocks(self) -> None:
        coming = [block for block in reversed(self._asleep) if not block.memory_is_kept]
        fits, all_bytes = self._ledger.fits, sum(whole_pages(block.nbytes) for block in coming)
        all_come = len(coming) == len(self._asleep) and fits(all_bytes)
        beside_bytes = 0 if all_come else self._missing_ring_bytes
        for block in coming:
            if not fits(whole_pages(block.nbytes) + beside_bytes):
                break
            block.return_to_host()
            self._executor.replan()
            del self._asleep[block]

    def _begin_fetching(self) -> None:
        """Makes room for the staging memory that blocks on disk are fetched through, and takes it."""
        budget_bytes = self._ledger.host_budget_bytes or 0
        ring_bytes = self._missing_ring_bytes
        if not self._has_room(ring_bytes - sum(block.nbytes for block in self._movable())):
            raise BudgetError(
                f"host_memory={format_bytes(self._ranks * budget_bytes)} is full, and so few blocks can move to"
                " disk (none that somebody refers to, as by kept = p.data) that there is no room for"
                f" {format_bytes(ring_bytes)} of staging memory; raise it by that",
                tier="host",
            )
        self._free(ring_bytes)
        self._residency.fetch_from(self._open_fetching(*self._ring()))

    @property
    def movable_bytes(self) -> int:
        """The bytes of host memory that can come free, less what fetching will take."""
        return max(0, sum(block.nbytes for block in self._movable()) - self._missing_ring_bytes)

    @property
    def _missing_ring_bytes(self) -> int:
        """The bytes of staging memory that fetching will take, once blocks rest on disk."""
        if self._residency.fetching is not None:
            return 0
        chunk_bytes, chunks = self._ring()
        return self._ranks * whole_pages(chunk_bytes) * chunks

    def _ring(self) -> tuple[int, int]:
        """The bytes and the number of chunks of staging memory for fetching."""
        sizes = [block.nbytes for block in self._blocks()]
        return ring_size(self._ledger.host_budget_bytes or 0, self._residency.streaming_budget_bytes, sizes)

    def _movable(self) -> list[Block]:
        """Blocks that can move to disk: the largest first, resident ones last, as a move makes them come once more.

        Blocks whose memory a user refers to cannot: it would not come free, and the parameters would leave it.
        """
        here = (block for block in self._blocks() if not (block.rest.on_disk or block.users))
        movable = [block for block in here if not (block.memory_is_kept or block.is_in_graph)]
        return sorted(movable, key=lambda block: (block.index < 0, -block.nbytes))

    def _free(self, nbytes: int) -> bool:
        """Moves blocks until there is room. First, the cache of experts goes, which rest on disk as well."""
        if not self._has_room(nbytes):
            self._executor.slices.leave_host()
        for block in self._movable():
            if self._has_room(nbytes):
                break
            self._to_disk(block)
        return self._has_room(nbytes)

    def _to_disk(self, block: Block) -> None:
        self._residency.evict(block)  # its last copy still refers to the memory
        block.spill()
        self._executor.replan()
