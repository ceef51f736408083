"""How does code written for DiffSynth-Studio's OffloadTrainingManager run on millrace? With the import changed.

| DiffSynth-Studio | here |
|---|---|
| `model` on the CPU, optimizer made before or after | the same: parameters stay the objects they were |
| `target_device` | `millrace.offload(device=)` |
| a leaf module is onloaded, computes, is offloaded | a leaf module is a block; the next arrive while it computes |
| `enable_optimizer_cpu_offload=True`: trainable weights travel, | the same, and nothing but gradients is copied back |
| the optimizer runs on the CPU | |
| `enable_optimizer_cpu_offload=False`: trainable weights stay | the same (`resident=`); gradients and the optimizer |
| on the device | are on the CPU all the same |
| `cpu_offload_split_threshold`: modules above it are split; in MB, | in MB of 10**6 bytes; modules not above it, and |
| compared with a count of elements | leaf modules, are blocks |
| `after_backward()`: gradients move to the CPU, marks are cleared | gradients are there when `backward()` returns; it |
| | waits for the device, and may be left out |
| pinned chunks of 1 GiB and more | exact size |
| one micro-batch for each optimizer step | any number |
| no way back | `manager.remove()` |

Device memory is three of the largest block, and what stays: trainable weights where they do, parameters of modules that
have submodules, buffers.
"""

from collections.abc import Iterator

import torch
from torch import nn

import millrace
from millrace.compat.sizes import module_bytes, parameter_pattern, tensor_bytes

BLOCKS_ON_DEVICE = 3  # one computes, one arrives, one more evens out their sizes
MEGABYTE = 10**6


class OffloadTrainingManager:
    """Weights visit `target_device` while they compute; gradients and optimizer are on the CPU.

    `cpu_offload_split_threshold` is in MB of 10**6 bytes; None makes every leaf module a block. Raises what
    `millrace.offload` raises, and ValueError for a threshold that is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        target_device: torch.device | str,
        enable_optimizer_cpu_offload: bool = False,
        cpu_offload_split_threshold: float | None = None,
    ) -> None:
        if cpu_offload_split_threshold is not None and not cpu_offload_split_threshold > 0:
            raise ValueError(
                f"cpu_offload_split_threshold is {cpu_offload_split_threshold} MB; give more than 0, or None"
            )
        limit_bytes = 0 if cpu_offload_split_threshold is None else int(cpu_offload_split_threshold * MEGABYTE)
        staying = {} if enable_optimizer_cpu_offload else _trainable(model)
        units = [unit for unit in _units(model, limit_bytes) if any(id(p) not in staying for p in unit.parameters())]
        inside = {id(parameter) for unit in units for parameter in unit.parameters()} - staying.keys()
        outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
        staying_bytes = tensor_bytes(outside) + tensor_bytes(model.buffers())
        self.handle = millrace.offload(
            model,
            device=target_device,
            device_memory=staying_bytes + BLOCKS_ON_DEVICE * max(map(module_bytes, units), default=0),
            blocks=units or "auto",
            resident=[parameter_pattern(name) for name in staying.values()],
        )

    def after_backward(self) -> None:
        """Waits until the device is done. Gradients are on the CPU already."""
        self.handle.synchronize()

    def remove(self) -> None:
        """The model is an ordinary CPU model again."""
        self.handle.remove()


def _trainable(model: nn.Module) -> dict[int, str]:
    """Names of the parameters that want gradients, by id."""
    return {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _units(module: nn.Module, limit_bytes: int) -> Iterator[nn.Module]:
    """The largest modules inside that are not above the limit and compute as a whole, else leaf modules."""
    for child in module.children():
        if not any(True for _ in child.parameters()):
            continue
        leaf = not any(True for inner in child.children() for _ in inner.parameters())
        fits = module_bytes(child) <= limit_bytes and _computes_as_a_whole(child)
        # An nn.MultiheadAttention computes with the weights of its child without calling it.
        if leaf or fits or isinstance(child, nn.MultiheadAttention):
            yield child
        else:
            yield from _units(child, limit_bytes)


def _computes_as_a_whole(module: nn.Module) -> bool:
    """Whether its forward is how it is used: not so for containers and for autoencoders."""
    return type(module).forward is not nn.Module.forward and not (
        hasattr(module, "encode") and hasattr(module, "decode")
    )
