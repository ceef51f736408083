"""What do PyTorch's optimizers compute with? Its functions behind them that have an underscore, under names of ours.

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
# `fused=True`, on the CPU as on accelerators, with `state_steps` counted already.
fused_adam = torch._fused_adam_
fused_adamw = torch._fused_adamw_
fused_sgd = torch._fused_sgd_

# `adafactor` and `muon`, which are handed on as they are, rely on being the functional form of the optimizers of the
# same name: one step in place on lists of tensors, which counts `state_steps` itself where there are any.

# Adds a number to each tensor in place. Relies on it being what `torch.optim` counts steps with.
foreach_add = torch._foreach_add_
# The norm of each tensor. Relies on it being what `torch.nn.utils.get_total_norm` takes the norms with.
foreach_norm = torch._foreach_norm
# Tensors by device and dtype. Relies on `torch.nn.utils.get_total_norm` taking the norms in that order.
group_tensors = _group_tensors_by_device_and_dtype
