"""The `headrace` command. Each file of a command's name has `add_arguments(parser)`, and `run(arguments)`.

They are imported when their command is given: `headrace --help` needs none of them, nor PyTorch.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from headrace.errors import HeadraceError

__all__ = ["InputError", "about_input", "nearest"]


class InputError(HeadraceError, ValueError):
    """What was given to a command cannot be used."""


@contextmanager
def about_input(*kinds: type[Exception], where: str = "") -> Iterator[None]:
    """Within it, errors of these kinds are about what the user gave, `where` it is."""
    try:
        yield
    except HeadraceError:
        raise
    except kinds as error:
        raise InputError(f"{where}{error}") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """Words that name the known flag that is most like `name`, if any is."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""
