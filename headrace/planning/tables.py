"""Does an embedding's table travel by rows, where not all weights stay on the device? And what room do rows have?"""

FEWEST_ROWS = 16  # the device has room for at least this many rows; a lookup of more may have to take turns

_MOST_SHARE = 1 / 4  # of the room for weights: more rows evict blocks
_FROZEN_SHARE = 1 / 4  # of the largest block: a smaller table saves too little for a wait of the host


def goes_by_rows(table_bytes: int, largest_bytes: int, *, trained: bool) -> bool:
    """Whether only the rows that are looked up should travel, beside blocks of up to `largest_bytes`.

    A trained table must be larger than every other block: only then does it determine the least budget. It saves no
    time, because the host has to clear its dense gradient, which takes about as long as the loads that are saved. Of a
    frozen table, only rows ever come, and each lookup costs no more than a wait.
    """
    return table_bytes > largest_bytes if trained else table_bytes >= largest_bytes * _FROZEN_SHARE


def kept_free_for_rows(wanted_bytes: int, room_bytes: int, least_bytes: int) -> int:
    """Bytes of the room for weights that plans leave free for rows, beside the least that blocks need."""
    return max(0, min(wanted_bytes, int(room_bytes * _MOST_SHARE), room_bytes - least_bytes))
