"""How are named values shown below each other? A row is a name and its text."""

from collections.abc import Sequence

from headrace.planning.text import columns

Row = tuple[str, str]


def rows_text(rows: Sequence[Row]) -> str:
    """One line for each row, with aligned values."""
    return "\n".join(columns(rows))
