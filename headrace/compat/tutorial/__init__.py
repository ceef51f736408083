"""How does code of the tutorial on offloading run here? Its classes, thin over headrace's memory, lanes and optimizers.

To train or run a model that is larger than a tier, `headrace.offload()` needs none of this: it moves blocks by itself.
What differs from the tutorial is in docs/coming_from/tutorial.md, row by row.
"""

from headrace.compat.tutorial.compression import compress_parameter, decompress_parameter
from headrace.compat.tutorial.configs import (
    NVMeConfig,
    OffloadConfig,
    OffloadSystemConfig,
    OffloadTier,
    TensorLocation,
)
from headrace.compat.tutorial.loaders import DoubleBufferedLoader, OverlappedOffloader, TripleBufferedLoader
from headrace.compat.tutorial.managers import NVMeOffloadManager, UnifiedOffloadManager
from headrace.compat.tutorial.optimizer import CPUOffloadOptimizer
from headrace.compat.tutorial.packing import pack_layers_sequentially
from headrace.compat.tutorial.prefetching import LayerPrefetcher, compute_optimal_prefetch

__all__ = [
    "CPUOffloadOptimizer",
    "DoubleBufferedLoader",
    "LayerPrefetcher",
    "NVMeConfig",
    "NVMeOffloadManager",
    "OffloadConfig",
    "OffloadSystemConfig",
    "OffloadTier",
    "OverlappedOffloader",
    "TensorLocation",
    "TripleBufferedLoader",
    "UnifiedOffloadManager",
    "compress_parameter",
    "compute_optimal_prefetch",
    "decompress_parameter",
    "pack_layers_sequentially",
]
