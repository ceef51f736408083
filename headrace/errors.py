"""Which errors does headrace raise? Arguments raise ValueError or TypeError; budgets, layout and state raise these."""

from typing import Literal


class HeadraceError(Exception):
    """The base class of all errors that headrace raises for budgets, layout and state."""


class BudgetError(HeadraceError, ValueError):
    """A request does not fit a budget. The message has the numbers and says what to change.

    `offload()` raises it before anything is allocated. The first pass with gradients raises it when `host_memory` has
    no room for them, and any pass does that needs more blocks at once than `device_memory` holds. `tier` says whose
    budget is too small.
    """

    def __init__(self, message: str, *, tier: Literal["device", "host"] = "device") -> None:
        super().__init__(message)
        self.tier = tier


class CheckpointError(HeadraceError, ValueError):
    """A checkpoint cannot be read: it is missing, damaged, not safetensors, or lacks a tensor that is needed."""


class DiskError(HeadraceError, OSError):
    """The disk tier failed: disk full, I/O fault, truncated or corrupted file. Names file, tensor, offset and numbers.

    `errno` says which: ENOSPC, EIO (also for a file that ends too early), or EBADMSG for a wrong checksum.
    """


class LayoutError(HeadraceError, TypeError):
    """A tensor is not plain bytes, so it cannot travel or be updated (meta, sparse, quantised, a subclass, lazy)."""


class OutOfMemoryError(HeadraceError, RuntimeError):
    """`headrace train` found no room in a tier. Names the tier, the numbers, and the flags that help."""


class RankError(HeadraceError, RuntimeError):
    """Another rank ended, raised, or did not come when this one waited for it. Names that rank and its last error."""


class StateError(HeadraceError, RuntimeError):
    """A call is not allowed in the current state, such as offloading a model twice."""


class TrainInputError(HeadraceError, ValueError):
    """Something that was given to `headrace train` cannot be used: a flag, a path, a text, a model, a number."""


class TrainingFailedError(HeadraceError, RuntimeError):
    """`headrace train` ran, but its result is worthless: the loss is not a number, or differs from the plain run's."""


class WeightChangedError(StateError):
    """A weight that backward needs was changed in place after forward had used it."""
