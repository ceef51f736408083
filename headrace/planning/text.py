"""How do numbers read? Bytes, seconds, indices, and columns of them."""

from collections.abc import Sequence


def size_text(count: int) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or above."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def decimal_text(nbytes: float, digits: int = 3) -> str:
    """Bytes in decimal units, in which memory and drives are sold."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.{digits}g} {name}"
    return f"{nbytes:.0f} B"


def columns(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Rows as lines with aligned cells; with `right`, all but the first column are aligned to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if right and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def seconds_text(seconds: float) -> str:
    """Seconds in s, ms or us."""
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds} s"


def indices_text(blocks: frozenset[int]) -> str:
    """Sorted indices with runs folded: 0-3, 7, 9-10."""
    runs: list[list[int]] = []
    for block in sorted(blocks):
        if runs and runs[-1][1] == block - 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "none"
