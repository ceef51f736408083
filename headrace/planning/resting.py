"""Which blocks rest on disk where host memory has no room for all? One answer, for plans and for runs."""

from collections.abc import Iterable


def on_disk(sizes: Iterable[int], room_bytes: int) -> frozenset[int]:
    """The numbers of the blocks that rest on disk. `sizes`: the bytes of each, in the order in which they are used.

    The others, of at most `room_bytes`, rest on the host. They are spread evenly among them, so that the drive has work
    during a whole pass.
    """
    sizes = list(sizes)
    total_bytes, kept_bytes, passed_bytes = sum(sizes), 0, 0
    found = set()
    for number, nbytes in enumerate(sizes):
        passed_bytes += nbytes
        if kept_bytes + nbytes <= room_bytes * passed_bytes / total_bytes:
            kept_bytes += nbytes
        else:
            found.add(number)
    return frozenset(found)
