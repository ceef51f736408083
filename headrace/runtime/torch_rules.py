"""What do PyTorch's optimizers compute with? Private functions of PyTorch, which have names of our own here.

As in runtime/autograd.py, each says what it relies on, and tests/units/test_autograd_internals.py tests that.
"""

import torch
from torch.optim._adafactor import adafactor
from torch.optim._muon import muon
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

__all__ = [
    "adafactor",
    "foreach_add",
    "foreach_norm",
    "fused_adam",
    "fused_adamw",
    "fused_sgd",
    "group_tensors",
    "muon",
]

# One step of Adam, AdamW and SGD in place, on lists of tensors. They rely on being what `torch.optim` calls with
# `fused=True`, both on the CPU and on accelerators, after it has counted up `state_steps`.
fused_adam = torch._fused_adam_
fused_adamw = torch._fused_adamw_
fused_sgd = torch._fused_sgd_

# `adafactor` and `muon` are passed on unchanged. They rely on being the functional forms of the optimizers of the same
# name: one step in place on lists of tensors, which counts up `state_steps` itself, if it has any.

# Adds a number to each tensor in place. Relies on `torch.optim` counting steps with it.
foreach_add = torch._foreach_add_
# The norm of each tensor. Relies on `torch.nn.utils.get_total_norm` computing norms with it.
foreach_norm = torch._foreach_norm
# Groups tensors by device and dtype. Relies on `torch.nn.utils.get_total_norm` taking the norms in that order.
group_tensors = _group_tensors_by_device_and_dtype
