"""The `headrace` command. The file with a command's name has its `add_arguments(parser)` and `run(arguments)`.

It is imported only when that command is given: `headrace --help` needs none of these files, nor PyTorch.
"""

import argparse
import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import HeadraceError

__all__ = ["InputError", "about_input", "nearest", "path_argument"]


class InputError(HeadraceError, ValueError):
    """The input of a command cannot be used."""


@contextmanager
def about_input(*kinds: type[Exception], where: str = "") -> Iterator[None]:
    """A context that turns errors of these kinds into InputError. `where` says which input they are about."""
    try:
        yield
    except HeadraceError:
        raise
    except kinds as error:
        raise InputError(f"{where}{error}") from error


def path_argument(text: str) -> Path:
    """A path on the command line. An empty one is refused: it would be the current directory."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} names no path; give one ('.' is the current directory)")
    return Path(text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Words that name the known flag that is most like `name`; empty if none is."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""
