"""The names of `names.py`, and modules, imported on first use: `headrace --help` waits for none of them."""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.names import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Called once for each name and module that is taken from `headrace`."""
    inner = name.startswith("_")
    if not inner and importlib.util.find_spec(f"headrace.{name}") is not None:
        return importlib.import_module(f"headrace.{name}")
    names = importlib.import_module("headrace.names") if name == "__all__" or not inner else None
    if names is None or name not in (*names.__all__, "__all__"):
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    globals()[name] = [*names.__all__, "__version__"] if name == "__all__" else getattr(names, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
