"""Does anybody but its parameter hold a gradient? Then the gradient may be read or written while it seems to be unused.

A gradient can be kept as the tensor itself, as a view of it, as a NumPy array, through DLPack, as the `grad` of another
tensor, in autograd's graph, or as its storage object. Each of these raises one of four counts: the references to the
tensor, or to its storage, in C++ or in Python. Only an address (`data_ptr()`) leaves no trace.
"""

import sys
from typing import Any

import torch
from torch import nn

from headrace.runtime.autograd import address_of, storage_use_count, tensor_use_count, without_overrides
from headrace.runtime.pending import OWNER


def gradient_is_shared(parameter: torch.Tensor) -> bool:
    """Whether anybody but the parameter and headrace refers to its `grad`, which must not be None, or to its memory."""
    owner = parameter.__dict__.get(OWNER)
    ours = None if owner is None else owner.kept_gradient
    with without_overrides():  # an optimizer may be updating the parameter
        is_ours = ours is not None and _storage_of(ours) == _storage_of(parameter.grad)
        return _references_to_gradient(parameter) > _ALONE + is_ours


def _storage_of(tensor: Any) -> int:
    return address_of(tensor.untyped_storage())


def _references_to_gradient(parameter: Any) -> int:
    # Without variables: each would be one more reference, or none, depending on the version of Python.
    of_tensor = tensor_use_count(parameter.grad) + sys.getrefcount(parameter.grad)
    of_storage = storage_use_count(address_of(parameter.grad.untyped_storage()))
    return int(of_tensor + of_storage + sys.getrefcount(parameter.grad.untyped_storage()))


def _of_nobody_else() -> int:
    parameter = nn.Parameter(torch.empty(1, device="cpu"))
    parameter.grad = torch.empty(1, device="cpu")
    return _references_to_gradient(parameter)


_ALONE = _of_nobody_else()
