"""Which errors does millrace raise? Arguments raise ValueError or TypeError; budgets, layout and state raise these."""

__all__ = [
    "BudgetError",
    "CheckpointError",
    "DiskError",
    "LayoutError",
    "MillraceError",
    "StateError",
    "WeightChangedError",
]


class MillraceError(Exception):
    """The root of everything that millrace raises for budgets, layout and state."""


class BudgetError(MillraceError, ValueError):
    """A request does not fit a budget; names the numbers and what to change.

    From `offload()` before anything is allocated; from the first pass with gradients when `host_memory` has no room for
    them; and from a pass that needs more blocks at once than `device_memory` holds.
    """


class CheckpointError(MillraceError, ValueError):
    """A checkpoint cannot be read: missing, damaged, not safetensors, or without a tensor that is asked for."""


class DiskError(MillraceError, OSError):
    """The disk tier failed: disk full, I/O fault, truncated or corrupted file. Names file, tensor, offset and numbers.

    `errno` tells which: ENOSPC, EIO (also for a file that ends too early), EBADMSG for a wrong checksum.
    """


class LayoutError(MillraceError, TypeError):
    """A tensor is not plain bytes, to be part of a block or updated (meta, sparse, quantised, a subclass, lazy)."""


class StateError(MillraceError, RuntimeError):
    """A call came in a state that does not allow it, such as offloading a model twice."""


class WeightChangedError(StateError):
    """A weight that backward needs was changed in place after forward had used it."""
