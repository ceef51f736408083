"""Which random numbers come next? The states of all generators that a training run draws from."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from headrace.errors import CheckpointError

_NUMPY_KEYS = 624  # the words of its Mersenne twister


def random_state() -> dict[str, Any]:
    """The states of Python, NumPy, PyTorch's CPU and each device of the accelerator, as plain values and tensors."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss],
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "devices": _device_states(),
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restores what `random_state` gave; of devices, those that exist now. Raises CheckpointError if unsound."""
    try:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers.tolist()), gauss))
        kind, keys, position, has_gauss, cached = state["numpy"]
        if not 0 <= position <= _NUMPY_KEYS:  # NumPy reads at this position without a check
            raise ValueError(f"the position {position!r} of NumPy's generator is outside of its {_NUMPY_KEYS} numbers")
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["torch"])
        module = _device_module()
        if module is not None:
            for index, numbers in list(enumerate(state["devices"]))[: torch.accelerator.device_count()]:
                module.set_rng_state(numbers, index)
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's state of random numbers is unsound: {error}") from error


def _device_states() -> list[torch.Tensor]:
    module = _device_module()
    if module is None:
        return []
    return [module.get_rng_state(index).cpu() for index in range(torch.accelerator.device_count())]


def _device_module() -> Any:
    """The accelerator's module in torch, if it has generators."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return module if hasattr(module, "get_rng_state") else None
