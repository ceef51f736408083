"""How are named values shown below each other? A row is a name and its text; rows are aligned."""

from collections.abc import Sequence

Row = tuple[str, str]


def rows_text(rows: Sequence[Row]) -> str:
    """One line for each row, with aligned values."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
