"""What becomes of the values that a selective checkpoint keeps? They are activations, and leave like others.

PyTorch keeps them beside the hooks on saved tensors, and recomputes without a word, outside of compiled code, what a
policy marks `MUST_CPU_OFFLOAD` or `PREFER_CPU_OFFLOAD`. Within a forward whose activations are offloaded, such values
are kept instead, and all that is kept goes to the hooks of that forward.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from headrace.activations.saving import forward_below
from headrace.runtime.autograd import patched_keeping, patched_policies, sharing_versions, without_modes
from headrace.runtime.process_wide import Method

_Policy = Callable[..., CheckpointPolicy | bool]


@patched_keeping
def kept_values_go_to_hooks(own: Any) -> Any:
    """Replaces the class of what is kept."""

    class Kept(own):  # type: ignore[misc]
        def __init__(self, value: Any) -> None:
            self._unpack: Callable[[], Any] | None = None
            forward = forward_below() if type(value) is torch.Tensor else None
            if forward is not None:
                with outside_the_checkpoint():
                    if forward.takes(value):
                        self._unpack = functools.partial(forward.unpack, forward.pack(value))
            super().__init__(value if self._unpack is None else None)

        def get_val(self, allow_cache_entry_mutation: bool) -> Any:
            if self._unpack is None:
                return super().get_val(allow_cache_entry_mutation)
            with outside_the_checkpoint():
                return self._unpack()

    return Kept


@patched_policies
def offloaded_values_are_kept(own: Method) -> Method:
    """Wraps the constructor of the mode that asks the policy."""

    def __init__(mode: Any, policy: _Policy, *arguments: Any, **settings: Any) -> None:  # noqa: N807
        own(mode, functools.partial(_kept_policy, policy), *arguments, **settings)

    return __init__


def _kept_policy(policy: _Policy, *arguments: Any, **settings: Any) -> CheckpointPolicy | bool:
    decided = policy(*arguments, **settings)
    offloads = isinstance(decided, CheckpointPolicy) and decided.name.endswith("_CPU_OFFLOAD")
    if offloads and get_proxy_mode() is None and forward_below() is not None:  # the compiler offloads by itself
        return CheckpointPolicy.MUST_SAVE
    return decided


@contextlib.contextmanager
def outside_the_checkpoint() -> Iterator[None]:
    """Operators are not counted by the checkpoint, and what is saved shares its version counter with its alias."""
    with without_modes(), sharing_versions():
        yield
