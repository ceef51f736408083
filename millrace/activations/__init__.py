"""What does autograd save, and where does it wait for backward? On the host, where that costs nothing."""

from millrace.activations.offloading import ActivationOffloading, offload_activations
from millrace.activations.selection import mark_not_offload

__all__ = ["ActivationOffloading", "mark_not_offload", "offload_activations"]
