"""Where is the native code that was built with this installation? Beside the Python that calls it, through ctypes."""

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def load_native(beside: str, version_function: str, expected: int) -> ctypes.CDLL | None:
    """The library `_kernel` in the directory of the file `beside`; None if it was not built.

    Raises ImportError unless its `version_function` returns `expected`: an older build may have been left there.
    """
    places = [Path(beside).with_name(f"_kernel{suffix}") for suffix in EXTENSION_SUFFIXES]
    built = [path for path in places if path.exists()]
    if not built:
        return None
    # An editable install leaves earlier builds there under other names; the latest is the current one.
    path = max(built, key=lambda path: path.stat().st_mtime)
    library = ctypes.CDLL(str(path))
    if getattr(library, version_function)() != expected:
        raise ImportError(
            f"{path.name} was built for another version of headrace; build it again with"
            " `python -m pip install --editable .` (or reinstall the package)"
        )
    return library
