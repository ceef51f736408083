"""In which tier does each block rest? As many on the host as have room there, spread evenly; the rest on disk."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from headrace.config import format_bytes
from headrace.errors import BudgetError
from headrace.memory.arena import whole_pages
from headrace.planning import on_disk

_CHUNK_BYTES = 8 * 2**20  # a request of this size has a drive's full speed
_SMALLEST_CHUNK_BYTES = 2**12
_LARGEST_CHUNK_BYTES = 32 * 2**20  # for large blocks: each chunk costs the host a third of a millisecond of Python
_RING_SHARE = 1 / 8  # of the host budget, for staging; the rest of the budget holds blocks
_MOST_RING_SHARE = 1 / 4  # where an eighth is too little for what the next two constants ask for
_ENOUGH_CHUNKS = 16  # keeps the drive's four requests busy, and no thread waits for a chunk
_AHEAD_BLOCKS = 3  # largest blocks on the device: where fewer have room, the ring takes the next block
_FEWEST_CHUNKS = 4  # of a ring, and of a block in large chunks: one is read, one is copied, and one follows each


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Names of the blocks that rest on disk, and the staging memory that their weights and gradients pass through."""

    on_disk: frozenset[str] = frozenset()
    disk_bytes: int = 0  # disk space that these blocks take
    experts_bytes: int = 0  # host memory for single experts of these blocks
    chunk_bytes: int = 0  # bytes of a chunk of the ring for weights
    chunks: int = 0
    gradient_bytes: int | None = None  # half of the ring of gradients' staging memory; None: as much as a block's

    @property
    def needs_no_staging(self) -> bool:
        """Whether all blocks and gradients rest in host memory, so that nothing passes through staging memory."""
        return self == Placement()


def place(
    sizes: Mapping[str, int],
    device_bytes: int,
    host_bytes: int,
    all_gradient_bytes: int,
    *,
    ranks: int = 1,
    gradient_staging_bytes: int | None = None,
) -> Placement:
    """Spreads blocks over host and disk, evenly, so that the drive has work during the whole pass.

    `sizes`: bytes of each block by name, in order of use. `device_bytes`: what blocks may take on the device.
    `host_bytes`: the host memory for blocks, gradients and staging. `all_gradient_bytes`: the gradients of a model that
    trains; they get the room that weights leave, else they rest on disk.

    `ranks` share the host memory, and each has a ring of its own. `gradient_staging_bytes`: the memory through which
    the gradients of all ranks pass uncut; None: gradients are cut, and it follows from the ring.

    Raises BudgetError when not even the staging memory fits.
    """
    pages = {name: whole_pages(nbytes) for name, nbytes in sizes.items()}
    total_bytes = sum(pages.values())
    if total_bytes + all_gradient_bytes + (gradient_staging_bytes or 0) <= host_bytes:
        return Placement()
    for_rings_bytes = max(0, host_bytes - (gradient_staging_bytes or 0))
    chunk_bytes, chunks = ring_size(for_rings_bytes // ranks, device_bytes, pages.values())
    half_bytes = 2 * grain_size(chunk_bytes)  # of the ring of gradients
    gradient_bytes = half_bytes if all_gradient_bytes else 0
    gradient_staging_bytes = 2 * gradient_bytes if gradient_staging_bytes is None else gradient_staging_bytes
    if total_bytes + gradient_staging_bytes <= host_bytes:
        return Placement(gradient_bytes=gradient_bytes or None)
    staging_bytes = ranks * chunks * chunk_bytes + gradient_staging_bytes
    left_bytes = host_bytes - staging_bytes
    if left_bytes < 0:
        raise BudgetError(
            f"blocks that do not fit in host memory pass through {format_bytes(staging_bytes)} of it; host_memory"
            f" leaves {format_bytes(max(0, host_bytes))} for that; raise it by"
            f" {format_bytes(-left_bytes, at_least=True)}",
            tier="host",
        )
    names = list(pages)
    there = frozenset(names[number] for number in on_disk(pages.values(), left_bytes))
    return Placement(
        on_disk=there,
        disk_bytes=sum(pages[name] for name in there),
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        gradient_bytes=half_bytes,
    )


def grain_size(chunk_bytes: int) -> int:
    """Bytes of a block on disk that have one checksum. Writing a block, or updating it, takes host memory for several
    grains beside the budget, so grains do not grow with chunks.
    """
    return min(chunk_bytes, _CHUNK_BYTES)


def ring_size(host_bytes: int, device_bytes: int, sizes: Collection[int]) -> tuple[int, int]:
    """Bytes of a chunk and number of chunks, of the ring through which blocks of these sizes come."""
    largest_bytes, typical_bytes = max(sizes, default=0), _typical_bytes(sizes)
    chunk_bytes = _CHUNK_BYTES
    while chunk_bytes < _LARGEST_CHUNK_BYTES and typical_bytes >= _FEWEST_CHUNKS * 2 * chunk_bytes:
        chunk_bytes *= 2
    while chunk_bytes > _SMALLEST_CHUNK_BYTES and chunk_bytes * _FEWEST_CHUNKS > host_bytes * _RING_SHARE:
        chunk_bytes //= 2
    wanted_bytes = _ENOUGH_CHUNKS * min(chunk_bytes, _CHUNK_BYTES)
    if device_bytes < _AHEAD_BLOCKS * largest_bytes:
        wanted_bytes = max(wanted_bytes, largest_bytes + chunk_bytes)
    ring_bytes = max(host_bytes * _RING_SHARE, min(host_bytes * _MOST_RING_SHARE, wanted_bytes))
    return chunk_bytes, max(_FEWEST_CHUNKS, int(min(ring_bytes, 2 * largest_bytes)) // chunk_bytes)


def _typical_bytes(sizes: Collection[int]) -> int:
    """The size of which larger blocks hold less than half of all bytes: of layers, even where tables are larger."""
    beyond = sum(sizes) / 2
    for size in sorted(sizes, reverse=True):
        beyond -= size
        if beyond <= 0:
            return size
    return 0
