"""How does code of the tutorial on offloading run here? Its classes, thin over millrace's memory, lanes and optimizers.

| the tutorial | here |
|---|---|
| `CPUOffloadOptimizer` | `millrace.optim.AdamW` over the model's parameters |
| `NVMeOffloadManager`, `UnifiedOffloadManager` | `millrace.memory.single.TieredTensors`: limits hold, values are kept |
| `LayerPrefetcher` | asks a manager, which loads in the background |
| `DoubleBufferedLoader`, `TripleBufferedLoader`, `OverlappedOffloader` | lanes and events; the host waits for nothing |
| `pack_layers_sequentially` | a safetensors file in the model's order |
| `compress_parameter`, `decompress_parameter` | lossless, any dtype, checked |
| `compute_optimal_prefetch` | the least depths that hide all loads, by simulation |

To train or run a model that is larger than a tier, `millrace.offload()` needs none of this: it moves blocks by itself.
"""

from millrace.compat.tutorial.compression import CompressionTrial, compress_parameter, decompress_parameter
from millrace.compat.tutorial.configs import (
    NVMeConfig,
    OffloadConfig,
    OffloadSystemConfig,
    OffloadTier,
    TensorLocation,
)
from millrace.compat.tutorial.loaders import DoubleBufferedLoader, OverlappedOffloader, TripleBufferedLoader
from millrace.compat.tutorial.nvme import NVMeOffloadManager
from millrace.compat.tutorial.optimizer import CPUOffloadOptimizer
from millrace.compat.tutorial.packing import pack_layers_sequentially
from millrace.compat.tutorial.prefetching import LayerPrefetcher, compute_optimal_prefetch
from millrace.compat.tutorial.unified import UnifiedOffloadManager

__all__ = [
    "CPUOffloadOptimizer",
    "CompressionTrial",
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
