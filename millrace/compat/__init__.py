"""How does code for another system run here? Its API, thin over millrace's: change the import, keep the code."""

from millrace.compat.diffsynth import OffloadTrainingManager
from millrace.compat.megatron import HybridDeviceOptimizer
from millrace.compat.mindie_sd import disable_offload, enable_offload

__all__ = ["HybridDeviceOptimizer", "OffloadTrainingManager", "disable_offload", "enable_offload"]
