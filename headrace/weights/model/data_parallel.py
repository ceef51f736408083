"""Who averages gradients between ranks? headrace, with `mesh`: wrappers around offloaded weights never see gradients.

DistributedDataParallel waits for gradients of the parameters that it was given. In an offloaded model these are homes,
but autograd accumulates into leaves: nothing would be averaged, and every rank would train a model of its own.
"""

import gc
from collections.abc import Callable, Iterator
from operator import attrgetter

import torch
from torch import nn

from headrace.errors import StateError
from headrace.weights.model.home import Home

ADVICE = (
    "offload the model without a wrapper, on all ranks: headrace.offload(model, mesh=mesh) averages their gradients and"
    " keeps one copy of the model for each node (mesh = torch.distributed.init_device_mesh('cuda', (world_size,)))."
    " transformers' Trainer, TRL, accelerate and Lightning wrap by themselves where several processes were started;"
    " call headrace.integrations.ranks.leave_unwrapped(trainer), or leave_unwrapped(accelerator), before they do, and"
    " give Lightning strategy=headrace.integrations.lightning.MeshStrategy()"
)

SHARDS = (
    "of a tensor parallel model (parallelize_module) each rank offloads its shards, as plain parameters, with the lines"
    " of docs/parallel.md"
)

_ONE_PROCESS = (
    "its copies of the model would compute with weights that are not there; offload the model without a wrapper, and"
    " train it on one device, or in one process for each device: headrace.offload(model, mesh=mesh)"
)

# By name: FSDP takes long to import, and other libraries have wrappers of these names that work alike.
_WRAPPERS = frozenset((
    "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "ReplicateModule",
))  # fmt: skip
_NAME_OF: Callable[[type], str] = attrgetter("__name__")  # asked for each layer in each forward where layers are sliced


def refuse_wrapping(wrapper: nn.Module, module: nn.Module | None) -> None:
    """Raises StateError if `wrapper`, of which `module` is about to become a part, would have to see its gradients."""
    if module is None or not _is_wrapper(type(wrapper)):
        return
    if any(isinstance(parameter, Home) and parameter.requires_grad for parameter in module.parameters()):
        around = f"{_name(wrapper)} around an offloaded model ({_described(module)})"
        if _name(wrapper) == "DataParallel":
            raise StateError(f"{around} cannot be: {_ONE_PROCESS}")
        raise StateError(
            f"{around} would never see its gradients, and each rank would train a model of its own; {ADVICE}"
        )


def refuse_wrapped(model: nn.Module) -> None:
    """Raises StateError for a model with trainable parameters that contains such a wrapper, or is inside of one."""
    for name, module in model.named_modules():
        if _is_wrapper(type(module)) and _learns(module):
            where = f"module {name!r}" if name else "the model"
            raise StateError(f"{where} is wrapped by {_refusal(module)}")
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and _learns(model)):
        return
    if next(_wrappers_around(model), None) is not None:
        gc.collect()  # the wrapper may be garbage
        for around in _wrappers_around(model):
            raise StateError(f"the model ({_described(model)}) is inside of a {_refusal(around)}")


def _wrappers_around(model: nn.Module) -> Iterator[nn.Module]:
    """Finds wrappers around the model among all live objects: a module does not know what it was registered in."""
    own = set(map(id, model.modules()))
    for found in gc.get_objects():
        if (
            issubclass(type(found), nn.Module)
            and _is_wrapper(type(found))
            and not own.isdisjoint(map(id, found.modules()))
        ):
            yield found


def _refusal(wrapper: nn.Module) -> str:
    if _name(wrapper) == "DataParallel":
        return f"DataParallel: {_ONE_PROCESS}"
    return f"{_name(wrapper)}, which would never see gradients; {ADVICE}"


def _described(model: nn.Module) -> str:
    learns = sum(parameter.requires_grad for parameter in model.parameters())
    return f"a {type(model).__name__} with {learns} trainable parameters"


def _is_wrapper(kind: type) -> bool:
    return not _WRAPPERS.isdisjoint(map(_NAME_OF, kind.__mro__))


def _learns(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _name(wrapper: nn.Module) -> str:
    return next(base.__name__ for base in type(wrapper).__mro__ if base.__name__ in _WRAPPERS)
