"""Which errors does millrace raise? Arguments raise ValueError or TypeError; budgets, layout and state raise these."""

__all__ = ["BudgetError", "LayoutError", "MillraceError", "StateError", "WeightChangedError"]


class MillraceError(Exception):
    """The root of everything that millrace raises for budgets, layout and state."""


class BudgetError(MillraceError, ValueError):
    """A request does not fit a budget. Raised before anything is allocated; names the numbers and what to change."""


class LayoutError(MillraceError, TypeError):
    """A parameter cannot be laid out as bytes of a block (meta, sparse, quantised subclass, overlapping memory)."""


class StateError(MillraceError, RuntimeError):
    """A call came in a state that does not allow it, such as offloading a model twice."""


class WeightChangedError(StateError):
    """A weight that backward needs was changed in place after forward had used it."""
