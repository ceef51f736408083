"""Which names does a user import? These and no others."""

from millrace.api import Offloaded, offload
from millrace.errors import BudgetError, DiskError, LayoutError, MillraceError, StateError, WeightChangedError
from millrace.report import Stats

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "DiskError",
    "LayoutError",
    "MillraceError",
    "Offloaded",
    "StateError",
    "Stats",
    "WeightChangedError",
    "__version__",
    "offload",
]
