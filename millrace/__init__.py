"""Which names does a user import? These and no others."""

from millrace.api import Offloaded, offload
from millrace.errors import BudgetError, LayoutError, MillraceError, StateError, WeightChangedError
from millrace.report import Stats

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "LayoutError",
    "MillraceError",
    "Offloaded",
    "StateError",
    "Stats",
    "WeightChangedError",
    "__version__",
    "offload",
]
