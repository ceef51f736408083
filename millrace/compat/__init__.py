"""The APIs of other systems, thin over millrace's own: change the import, keep the code."""

from millrace.compat.diffsynth import OffloadTrainingManager
from millrace.compat.mindie_sd import disable_offload, enable_offload

__all__ = ["OffloadTrainingManager", "disable_offload", "enable_offload"]
