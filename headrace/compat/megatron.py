"""What of Megatron-Core and Megatron-Bridge is here? Optimizer and settings: see docs/documents/megatron.md.

| name | file |
|---|---|
| `HybridDeviceOptimizer` | `hybrid.py`; other classes and arguments as its shares: `sub_optimizers.py` |
| `OptimizerConfig`, `ConfigContainer`, `TrainingConfig`, `apply`, `override` | `megatron_config.py` |
| `CPUOffloadConfig` | `transformer_engine.py` |
| a recipe, and what runs it | `examples/run_recipe.py` of the repository |
"""

from headrace.compat.hybrid import HybridDeviceOptimizer
from headrace.compat.megatron_config import ConfigContainer, OptimizerConfig, TrainingConfig, apply, override
from headrace.compat.transformer_engine import CPUOffloadConfig

__all__ = [
    "CPUOffloadConfig",
    "ConfigContainer",
    "HybridDeviceOptimizer",
    "OptimizerConfig",
    "TrainingConfig",
    "apply",
    "override",
]
