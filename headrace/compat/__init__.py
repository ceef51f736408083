"""How does code for another system run here? Through a thin layer with its API: change the import, keep the code."""

from headrace.compat.diffsynth import OffloadTrainingManager
from headrace.compat.megatron import CPUOffloadConfig, HybridDeviceOptimizer
from headrace.compat.mindie_sd import disable_offload, enable_offload, handle_of
from headrace.compat.transformer_engine import get_cpu_offload_context

__all__ = [
    "CPUOffloadConfig",
    "HybridDeviceOptimizer",
    "OffloadTrainingManager",
    "disable_offload",
    "enable_offload",
    "get_cpu_offload_context",
    "handle_of",
]
