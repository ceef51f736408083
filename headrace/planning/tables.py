"""Does an embedding's table travel by rows? Where not all weights stay on the device, and where that pays."""

__all__ = ["goes_by_rows"]

_FROZEN_SHARE = 1 / 4  # of the largest block: a smaller table saves too little for a wait of the host


def goes_by_rows(table_bytes: int, largest_bytes: int, *, trained: bool) -> bool:
    """Whether only the rows that are looked up should travel, beside blocks of up to `largest_bytes`.

    A trained table must be larger than every other block: only then does it set the least budget. The bytes that it
    saves cost about as much time, as the host clears its dense gradient, and rows wait behind the loads of the step's
    first blocks. Of a frozen one only rows ever come, and it costs no more than a wait.
    """
    return table_bytes > largest_bytes if trained else table_bytes >= largest_bytes * _FROZEN_SHARE
