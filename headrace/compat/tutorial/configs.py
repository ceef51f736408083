"""Which settings do the tutorial's classes take? Its dataclasses, with its defaults; every field does what it says."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from headrace.memory.disk import DISK_ALIGNMENT_BYTES

__all__ = ["NVMeConfig", "OffloadConfig", "OffloadSystemConfig", "OffloadTier", "TensorLocation"]


@dataclass
class OffloadConfig:
    """What `CPUOffloadOptimizer` offloads.

    - `offload_optimizer`: moments, master weights and the update are on the host; False: on the parameters' device.
    - `offload_gradients`: gradients on an accelerator are freed once `step()` has taken them.
    - `offload_parameters`: `headrace.offload()` manages the weights, with its default budgets.
    - `pin_memory`: host memory is page-locked. `num_threads`: threads that update, at most those of this process.
    - `overlap_comm`: gradients and weights travel while others are updated.
    """

    offload_optimizer: bool = True
    offload_gradients: bool = True
    offload_parameters: bool = False
    pin_memory: bool = True
    num_threads: int = 4
    overlap_comm: bool = True


def _check_least(config: Any, **least: int) -> None:
    """Raises ValueError if a field is below its least value. None means no limit, and passes."""
    for name, number in least.items():
        given = getattr(config, name)
        if given is not None and given < number:
            raise ValueError(f"{type(config).__name__}({name}={given}): give {number} or more")


@dataclass
class NVMeConfig:
    """How `NVMeOffloadManager` reaches the drive, and how much memory it may use beside it.

    - `nvme_path`: a directory on a local drive; each manager takes one of its own in it.
    - `block_size`: bytes of one request, whole pages. `aio_queue_depth`: requests in flight, at most.
    - `prefetch_depth`: `load_to_gpu` begins to load this many of the following parameters, if there is room.
    - `pin_memory`: the memory that blocks pass through is page-locked.
    - `gpu_memory_limit`, `cpu_memory_limit`: ceilings in bytes; None: none. Not in the tutorial.
    """

    nvme_path: str = "/mnt/nvme/offload"
    block_size: int = 1024 * 1024
    aio_queue_depth: int = 8
    prefetch_depth: int = 2
    pin_memory: bool = True
    gpu_memory_limit: int | None = None
    cpu_memory_limit: int | None = None

    def __post_init__(self) -> None:
        _check_least(self, aio_queue_depth=1, prefetch_depth=0, gpu_memory_limit=0, cpu_memory_limit=0)
        if self.block_size < 1 or self.block_size % DISK_ALIGNMENT_BYTES:
            raise ValueError(
                f"NVMeConfig(block_size={self.block_size}): give whole pages of the disk, such as"
                f" {max(1, self.block_size // DISK_ALIGNMENT_BYTES) * DISK_ALIGNMENT_BYTES}"
            )


class OffloadTier(Enum):
    """A tier in which tensors can rest."""

    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"


@dataclass
class TensorLocation:
    """Where a tensor rests: `size` in bytes, `offset` in the file on disk."""

    tier: OffloadTier
    offset: int = 0
    size: int = 0
    is_loading: bool = False
    is_saving: bool = False


@dataclass
class OffloadSystemConfig:
    """Where `UnifiedOffloadManager` keeps tensors. Limits are ceilings on the bytes that it holds in a tier.

    - `offload_optimizer_states`, `offload_gradients`: such tensors, added with `add(kind=...)`, never rest on the GPU.
    - `offload_parameters`: parameters rest in `parameter_offload_tier` or below; False: in the first tier with room.
    - `prefetch_count`: `ensure_gpu` loads this many following tensors ahead; the GPU keeps room for them and one more.
    - `pin_memory`: memory of the CPU tier is page-locked. `num_io_threads`: threads that read and write the drive.
    - `nvme_path`: a directory on a local drive, used when a tensor has room nowhere else.
    - `use_compression`: bfloat16 weights rest on disk in three quarters of their bytes, without loss.
    """

    gpu_memory_limit: int = 40 * (1024**3)
    cpu_memory_limit: int = 256 * (1024**3)
    offload_optimizer_states: bool = True
    offload_gradients: bool = True
    offload_parameters: bool = False
    parameter_offload_tier: OffloadTier = OffloadTier.CPU
    prefetch_count: int = 2
    pin_memory: bool = True
    num_io_threads: int = 4
    nvme_path: str = "/mnt/nvme/offload"
    use_compression: bool = False

    def __post_init__(self) -> None:
        _check_least(self, gpu_memory_limit=0, cpu_memory_limit=0, prefetch_count=0, num_io_threads=1)
