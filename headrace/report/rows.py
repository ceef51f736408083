"""How are named values shown below each other? A name and what it says of the run, and such rows as text."""

from collections.abc import Sequence

__all__ = ["Row", "rows_text"]

Row = tuple[str, str]


def rows_text(rows: Sequence[Row]) -> str:
    """A line for each row, the values below each other."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
