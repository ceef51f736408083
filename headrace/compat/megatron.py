"""What of Megatron-Core and Megatron-Bridge is here? Optimizer, settings, recipes: see docs/documents/megatron.md.

| name | file |
|---|---|
| `HybridDeviceOptimizer` | `hybrid.py`; other classes and arguments as its shares: `sub_optimizers.py` |
| `OptimizerConfig`, `ConfigContainer`, `TrainingConfig`, `apply`, `override` | `megatron_config.py` |
| `CPUOffloadConfig` | `transformer_engine.py` |
| `run_recipe`, `find_recipe`, `qwen3_30b_a3b_pretrain_config` | `recipes.py` |
"""

from headrace.compat.hybrid import HybridDeviceOptimizer
from headrace.compat.megatron_config import ConfigContainer, OptimizerConfig, TrainingConfig, apply, override
from headrace.compat.recipes import MoEModelConfig, find_recipe, qwen3_30b_a3b_pretrain_config, run_recipe
from headrace.compat.transformer_engine import CPUOffloadConfig

__all__ = [
    "CPUOffloadConfig",
    "ConfigContainer",
    "HybridDeviceOptimizer",
    "MoEModelConfig",
    "OptimizerConfig",
    "TrainingConfig",
    "apply",
    "find_recipe",
    "override",
    "qwen3_30b_a3b_pretrain_config",
    "run_recipe",
]
