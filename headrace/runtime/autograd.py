"""Which private names of PyTorch does headrace need? All of them are here, under names of our own.

Each says what it relies on. tests/units/test_autograd_internals.py has tests named after each, which fail when a
release of PyTorch changes that. The linter and a test refuse such names elsewhere in the package, except for

- what PyTorch's optimizers compute with: runtime/torch_rules.py;
- what is patched in PyTorch's GradScaler: runtime/grad_scaler.py;
- attributes and methods of the user's own objects. Of tensors: `_version`, `_base`, `_is_zerotensor`,
  `_backward_hooks`, `_post_accumulate_grad_hooks`. Of modules: `_parameters`, `_buffers`, `_modules`,
  `_forward_pre_hooks`, `_non_persistent_buffers_set`, `_call_impl`, `_compiled_call_impl`, `_apply`,
  `_named_members`, `_save_to_state_dict`, `_load_from_state_dict`; of recurrent ones `_flat_weights`,
  `_flat_weight_refs`, `_init_flat_weights`. Of optimizers: `_optimizer_state_dict_pre_hooks`,
  `_optimizer_state_dict_post_hooks`, `_optimizer_load_state_dict_pre_hooks`. Of DTensors: `_local_tensor`. Of process
  groups: `_get_backend`;
- how a DTensor is made around a shard of ours: runtime/sharded.py.

What is called often is not wrapped.
"""

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller
from typing import Any, Protocol, TypeVar

import torch
import torch.overrides
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.flop_counter import flop_registry

from headrace.runtime.process_wide import patched
from headrace.runtime.threads import keeps_interrupts

__all__ = [
    "NO_TASK",
    "DispatchMode",
    "EndOfBackward",
    "FakeTensorMode",
    "FunctionNode",
    "WeakTensor",
    "address_of",
    "backward_task",
    "check_version",
    "data_of",
    "dispatch_modes",
    "function_modes",
    "grad_of",
    "has_storage",
    "hooks_are_enabled",
    "in_backward",
    "in_gradient_transform",
    "innermost_transform",
    "is_costly",
    "is_wrapper",
    "make_subclass",
    "more_flops",
    "neg_view",
    "no_override",
    "patched_keeping",
    "patched_policies",
    "pop_hooks",
    "push_hooks",
    "running_node",
    "runs_in_backward",
    "saving_is_left_to_autograd",
    "sequence_number",
    "sharing_versions",
    "storage_use_count",
    "tensor_use_count",
    "top_hooks",
    "tree_flatten",
    "tree_map_only",
    "tree_unflatten",
    "unseen",
    "without_modes",
    "without_overrides",
    "without_transforms",
]

# the compiler ---------------------------------------------------------------------------------------------------------
_frames = torch._C._dynamo.eval_frame
_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
_F = TypeVar("_F", bound=Callable[..., Any])


def unseen(function: _F) -> _F:
    """Hides a Python function, with all that it calls, from PyTorch's compiler: a hook or a finalizer, which user code
    does not call itself. Otherwise the compiler would compile it, and guard on values that it has changed since.

    Relies on the compiler keeping its decision about a frame with the frame's code object, for the whole process.
    """
    _frames.set_code_exec_strategy(function.__code__, _SKIPPED)
    return function


unseen(weakref.finalize.__call__)  # finalizers run wherever their objects are collected

# hooks on what autograd saves ---------------------------------------------------------------------------------------
# `top_hooks(True)`: the pair (pack, unpack) that was pushed last on this thread, or None. Relies on autograd calling
# this pair only. `True`: also while the compiler traces; nothing of ours runs then.
top_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None]
top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
# What `torch.autograd.graph.saved_tensors_hooks` calls when it is entered and left. Relies on each thread having a
# stack of pairs, and on any code being able to pop a pair, not only the code that pushed it.
push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
# Whether hooks may be pushed. Relies on `torch.func.grad` and the like disabling them.
hooks_are_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]

# selective checkpoints ------------------------------------------------------------------------------------------------
# Decorators as of runtime/process_wide.py. What a selective checkpoint keeps of an operation's output: relies on the
# class being looked up by its name, called with a detached tensor, and asked once for it with `get_val(allowed)`.
patched_keeping = patched(lambda: torch.utils.checkpoint, "_VersionWrapper")
# Relies on the mode under which the checkpoint's forward runs being constructed with the policy first.
patched_policies = patched(lambda: torch.utils.checkpoint._CachingTorchDispatchMode, "__init__")

# the backward under way ---------------------------------------------------------------------------------------------
# Autograd's number of the backward that this thread runs now, or NO_TASK. Relies on autograd numbering its graph tasks,
# nested ones too, and never using a number twice.
backward_task = torch._C._current_graph_task_id
NO_TASK = -1


def in_backward() -> bool:
    """Whether this thread runs a backward now."""
    return backward_task() != NO_TASK


class Ended(Protocol):
    """Called when a backward is over: it completed, or it raised (or was interrupted)."""

    def __call__(self, *, completed: bool) -> None: ...


class EndOfBackward:
    """A callback that autograd holds until the backward in which `queue` was called is over, and no longer.

    `ended(completed=True)` is called within a backward that completes. `ended(completed=False)` is called in any case,
    when autograd lets go of this object: maybe later, and on another thread. Relies on autograd keeping callbacks with
    the graph task, and dropping them with it, uncalled, when the backward raises.
    """

    _ended: Ended | None = None  # for `__del__`, when an interrupt has cut `__init__` short

    def __init__(self, ended: Ended) -> None:
        self._ended = ended

    def queue(self) -> None:
        """Attaches this to the backward that this thread runs now. Raises RuntimeError if it runs none."""
        torch.autograd.Variable._execution_engine.queue_callback(self)

    @unseen
    def __call__(self) -> None:
        if self._ended is not None:
            self._ended(completed=True)

    @unseen
    @keeps_interrupts
    def __del__(self) -> None:
        if self._ended is not None:
            self._ended(completed=False)


# The node of the graph whose backward this thread computes now, or None. Relies on the nodes of users' own Functions
# being instances of `torch.autograd.function.BackwardCFunction`, and on hooks that are registered on a node while it
# computes being called after it.
running_node: Callable[[], Any] = torch._C._current_autograd_node
FunctionNode: Any = torch.autograd.function.BackwardCFunction


# Whether the backward that this thread runs will compute a node of the graph, or has done so already. Relies on nodes
# in Python being the graph's own.
runs_in_backward: Callable[[Any], bool] = torch._C._will_engine_execute_node


def saving_is_left_to_autograd() -> bool:
    """Whether this thread has no hooks on saved tensors: no visit's, no checkpoint's and no user's."""
    return top_hooks(True) is None


def check_version(tensor: torch.Tensor, version: int, shape: torch.Size | None = None) -> None:
    """Raises what autograd raises if a tensor that was saved at `version` has been changed in place since.

    Relies on writes in place raising `_version`, which views and detached tensors share.
    """
    if tensor._version != version:
        of_shape = list(tensor.shape if shape is None else shape)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a"
            f" tensor of shape {of_shape} is at version {tensor._version}; expected version {version}"
        )


# tensors and their memory -------------------------------------------------------------------------------------------
# The identity of a storage or a tensor: `address_of(tensor.untyped_storage())`. Relies on `_cdata` being the address of
# the C++ object, which all of its Python objects share, and which no other has while it lives.
address_of: Callable[[torch.Tensor | torch.UntypedStorage], int] = attrgetter("_cdata")
# How many C++ references a storage has, given its `address_of`. Relies on each tensor over it counting once.
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
# How many C++ references a tensor has. Relies on all of its references in Python counting as one, if at all.
tensor_use_count: Callable[[torch.Tensor], int] = torch._C.TensorBase._use_count  # type: ignore[attr-defined]
# Keeps a tensor's address from being given to another, without keeping the tensor alive. Relies on the weak reference
# holding the C++ object, without its memory.
WeakTensor: Any = torch._C._WeakTensorRef  # type: ignore[attr-defined]
# Autograd's number of a node of the graph: `sequence_number(tensor.grad_fn)`. Relies on a thread giving each node that
# it makes a larger number than the one before, and on backward taking the ready node with the largest number first.
sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
# Whether a tensor has memory at all. Relies on the tensors of function transforms having none.
has_storage: Callable[[torch.Tensor], bool] = torch._C._has_storage
# The property `data` of tensors, for classes that override it: `data_of.__get__(tensor)`, `data_of.__set__(tensor,
# value)`. Relies on both taking a tensor of any class, and on `__set__` leaving no trace in `_version`.
data_of: Any = torch.Tensor.data
# The property `grad`, likewise.
grad_of: Any = torch.Tensor.grad
# `make_subclass(cls, tensor, requires_grad)`: a tensor of that class over the same memory, without `cls.__new__`.
# Relies on it sharing its version counter with `tensor`.
make_subclass: Any = torch.Tensor._make_subclass
# Whether a tensor wraps others and names them: `names, context = t.__tensor_flatten__()`; one like it is made by
# `type(t).__tensor_unflatten__(inner, context, size, stride)`. Relies on the names being those of attributes.
is_wrapper: Callable[[Any], bool] = is_traceable_wrapper_subclass
# A view of the same memory that is read as negated. Relies on it doing what `tensor.imag` of a conjugate does.
neg_view = torch._neg_view

# torch functions and transforms -------------------------------------------------------------------------------------
# `with without_overrides():` no class's `__torch_function__` is called on this thread. Relies on functions, methods and
# properties of tensors then giving what they give for plain tensors.
without_overrides = torch._C.DisableTorchFunctionSubclass
# `with without_transforms():` tensors are made outside of all transforms of `torch.func` that are under way.
without_transforms = torch._C._DisableFuncTorch
# The innermost transform of `torch.func` that is under way on this thread; None: there is none.
innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
# How many modes see the operators of this thread (`TorchDispatchMode`, as of a selective checkpoint).
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The class of such a mode. Relies on a mode not seeing what its `__torch_dispatch__` calls, and on being entered again.
DispatchMode: Any = torch.utils._python_dispatch.TorchDispatchMode
# `with without_modes():` none of them sees any.
without_modes = torch.utils._python_dispatch._disable_current_modes


def sharing_versions() -> AbstractContextManager[None]:
    """Within a mode, `detach()` gives a tensor that shares its version counter, as it does outside of modes.

    Relies on modes being called below the dispatch key that sees to it.
    """
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def overrides_are_on() -> bool:
    """Whether classes' `__torch_function__` is called on this thread."""
    return bool(torch._C._is_torch_function_enabled())


# The modes that override all torch functions on this thread (`TorchFunctionMode`, `torch.device` as a context manager),
# outermost first.
function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack


# A class with this as its `__torch_function__` has tensors that torch functions treat as plain. Relies on PyTorch
# comparing with this very object, so that it costs nothing.
no_override: Any = torch._C._disabled_torch_function_impl


def in_gradient_transform() -> bool:
    """Whether `torch.func.grad`, `vjp`, `jacrev` or `hessian` is under way.

    Relies on the stack of interpreters (None: empty), each with the key of its transform.
    """
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(interpreter.key() == torch._C._functorch.TransformType.Grad for interpreter in stack)


# `FakeTensorMode` is passed on unchanged. Its users rely on tensors made in it having shapes, storages, and graphs like
# those of the CPU, but no memory.


def _attention_flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: Any, **_settings: Any
) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


# What PyTorch's `FlopCounterMode` does not count by itself, for its `custom_mapping`: attention on the CPU. Relies on
# `scaled_dot_product_attention` calling this operation.
more_flops: dict[Any, Any] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


def is_costly(operator: Any, types: Sequence[type], arguments: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether a mode sees a product of matrices, a convolution or attention that gives plain tensors of its own, the
    same ones at each call. `types`, `arguments`, `named`: what the mode was given.

    Relies on PyTorch counting the FLOPs of these operations and of no others of its own, on `types` having the
    subclasses among the tensors, and on attention being random if `dropout_p` is not 0.
    """
    place = _place_of_dropout(operator)
    if place is None or any(kind is not torch.Tensor for kind in types):
        return False
    return not named.get("dropout_p", arguments[place] if place < len(arguments) else 0)


@functools.cache
def _place_of_dropout(operator: Any) -> int | None:
    """Where a costly operation has its `dropout_p`, or a place beyond its arguments; None for any other operation."""
    if not isinstance(operator, torch._ops.OpOverload) or operator._schema.is_mutable:
        return None
    if operator.namespace != "aten":  # others register formulas too, and may be random in ways of their own
        return None
    if operator.overloadpacket not in flop_registry and operator.overloadpacket not in more_flops:
        return None
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else len(names)
