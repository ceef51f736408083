"""How does training go on from a checkpoint? `load()`: into whatever tiers, budgets and dtypes there are now."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from millrace.api import Offloaded
from millrace.checkpoint.contents import Contents, SavedOptimizer, SavedTensor, own_contents
from millrace.checkpoint.destinations import filling
from millrace.checkpoint.foreign import foreign_contents
from millrace.checkpoint.manifest import EXTRA, MANIFEST
from millrace.checkpoint.model import state_of
from millrace.checkpoint.optimizers import Optimizers, plain_optimizers
from millrace.checkpoint.random_state import restore_random_state
from millrace.checkpoint.reading import Place, SavedFile, read_all
from millrace.errors import CheckpointError
from millrace.live import handle_of
from millrace.memory.disk import TensorAtRest, origin_of
from millrace.optim.optimizer import HostOptimizer
from millrace.optim.precision import adopt_exact, take_exact

__all__ = ["load"]

_SMALL_BYTES = 1 << 14


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers = None) -> Any:
    """Loads what `millrace.save` saved as `path` into `model` and `optimizer`, in place; returns `extra`.

    Checkpoints of other programs load as well: of transformers' Trainer and accelerate (their directories), Lightning
    (`.ckpt`), torch.distributed.checkpoint, files of torch.save and of safetensors. What is in them besides is returned
    (`scheduler`, ...).

    Whatever the tiers, budgets and blocks were, and are now; a run goes on bit for bit when dtypes agree. Others are
    converted: weights that were float32 become a narrow model's with exact masters, where the optimizer keeps these,
    and back; moments in 8 bits, float32 ones, and back. With `optimizer`, random states are restored as well.

    Every byte that is read is checked. Raises CheckpointError when the checkpoint is damaged, naming file and tensor,
    or does not fit the model or the optimizer; StateError within a forward or backward; DiskError when a drive fails.
    Before the first tensor is written, names, shapes and sizes have been compared, and nothing has changed if these
    do not fit.
    """
    directory = Path(path).expanduser().absolute()
    optimizers = plain_optimizers(optimizer)
    handle = handle_of(model)
    blocks = handle.blocks_at_rest("millrace.load") if isinstance(handle, Offloaded) else []
    for one in optimizers:
        if isinstance(one, HostOptimizer):
            one.synchronize()
    if (directory / ".metadata").is_file():
        from millrace.checkpoint.distributed import load_distributed  # here: it takes half a second

        tensors = {name: value for name, value in state_of(model).items() if isinstance(value, torch.Tensor)}
        load_distributed(directory, tensors, optimizers)
        return None
    with contextlib.ExitStack() as stack:
        is_own = any((directory / name).exists() for name in (MANIFEST, EXTRA))
        contents = own_contents(directory, stack) if is_own else foreign_contents(directory, stack)
        if optimizers and len(optimizers) != len(contents.optimizers):
            raise CheckpointError(
                f"{directory} holds the state of {len(contents.optimizers)} optimizers, and {len(optimizers)} are given"
            )
        wanted = _wanted(contents, model)
        states = [_State(*pair) for pair in zip(optimizers, contents.optimizers, strict=False)]
        written = {id(tensor) for one in wanted for tensor in one.into}
        for block in blocks:
            if any(id(slot.home) in written for slot in block.slots):
                block.make_writable(keeps=False)
                for slot in block.slots:
                    slot.touch()
        with torch.no_grad():
            try:
                read_all(_work(wanted))
            finally:
                if isinstance(handle, Offloaded):
                    handle.refresh()
        for state in states:
            state.load({id(tensor): one.saved for one in wanted for tensor in one.into if one.converts(tensor)})
    _take_module_state(model, contents.module_state)
    if optimizers and contents.random is not None:
        restore_random_state(contents.random)
    return contents.extra


@dataclass(frozen=True)
class _Wanted:
    """A tensor of a file, and the tensors of the model that get its values."""

    saved: SavedTensor
    into: list[torch.Tensor]

    def converts(self, tensor: torch.Tensor) -> bool:
        """Whether the values change on the way."""
        return tensor.dtype != self.saved.dtype


def _wanted(contents: Contents, model: nn.Module) -> list[_Wanted]:
    """What is read of the weights. Raises CheckpointError when they do not fit the model."""
    state = {name: value for name, value in state_of(model).items() if isinstance(value, torch.Tensor)}
    prefix = _prefix(set(contents.weights), set(state))
    _check_names(contents, {name.removeprefix(prefix) for name in (*contents.weights, *contents.shared)}, state, model)
    wanted = []
    for full_name, saved in contents.weights.items():
        name = full_name.removeprefix(prefix)
        into: dict[int, torch.Tensor] = {}
        for alias in [name, *(other for other, kept in contents.shared.items() if kept == name)]:
            tensor = state[alias]
            floating = tensor.is_floating_point() and saved.dtype.is_floating_point
            if tuple(tensor.shape) != saved.shape or not (tensor.dtype == saved.dtype or floating):
                raise CheckpointError(
                    f"{alias!r} is {saved.dtype} and has the shape {saved.shape} in {saved.file.path}, and"
                    f" {tensor.dtype} and {tuple(tensor.shape)} in the model; load it into the model that was saved"
                )
            found = origin_of(tensor.detach()) if tensor.device.type == "cpu" else None
            if found is None or not found[0].shows(str(saved.file.path), found[1], saved.at.begin):
                into.setdefault(tensor.data_ptr(), tensor)
        wanted.append(_Wanted(saved, list(into.values())))
    return wanted


def _prefix(saved: set[str], present: set[str]) -> str:
    """What all names in a checkpoint begin with beside the model's own: Lightning's `model.`, for one."""
    if saved & present or not saved:
        return ""
    first = min(saved)
    return next((first[: -len(name)] for name in present if first.endswith(f".{name}")), "")


def _check_names(contents: Contents, saved: set[str], present: Mapping[str, Any], model: nn.Module) -> None:
    unexpected = sorted(saved - present.keys())
    if unexpected:
        raise CheckpointError(
            f"{contents.path} holds {unexpected[0]!r} (and {len(unexpected) - 1} more), which the model does not have;"
            " load it into the model that was saved"
        )
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = {id(present[name]) for name in saved}
    missing = sorted(name for name in present.keys() - saved - left_out if id(present[name]) not in tied)
    if missing and not contents.trained_only:
        raise CheckpointError(
            f"{contents.path} lacks {missing[0]!r} (and {len(missing) - 1} more) of the model; load it into the model"
            " that was saved"
        )


def _work(wanted: Sequence[_Wanted]) -> list[tuple[SavedFile, list[Place]]]:
    """The same, by file."""
    places: dict[SavedFile, list[Place]] = defaultdict(list)
    for one in wanted:
        saved = one.saved
        places[saved.file] += [Place(saved.at, saved.name, filling(tensor, saved.dtype)) for tensor in one.into]
    return list(places.items())


class _State:
    """The state of one optimizer, on its way. Raises CheckpointError when it does not fit the optimizer."""

    def __init__(self, optimizer: Optimizer, saved: SavedOptimizer) -> None:
        self._optimizer = optimizer
        self._saved = saved
        there, here = (
            [len(group["params"]) for group in groups]
            for groups in (saved.tree["param_groups"], optimizer.param_groups)
        )
        if there != here:
            raise CheckpointError(
                f"{saved.file.path} is of an optimizer with {there} parameters in its groups; the one given has {here}"
            )

    def load(self, converted: Mapping[int, SavedTensor]) -> None:
        """Into the optimizer. `converted`: by id, the parameters whose values have another dtype in the checkpoint."""
        state, on_disk = self._read()
        groups = self._saved.tree["param_groups"]
        numbers = [number for group in groups for number in group["params"]]
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        if isinstance(self._optimizer, HostOptimizer):
            for number, parameter in zip(numbers, parameters, strict=True):
                if id(parameter) in converted:
                    entries = state.setdefault(number, {})
                    entries |= {name: one.load() for name, one in on_disk.pop(number, {}).items()}
                    _convert(self._optimizer, parameter, converted[id(parameter)], entries)
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        if isinstance(self._optimizer, HostOptimizer):
            for number, parameter in zip(numbers, parameters, strict=True):
                if on_disk.get(number):
                    self._optimizer.fill(parameter, on_disk[number])

    def _read(self) -> tuple[dict[Any, dict[str, Any]], dict[Any, dict[str, TensorAtRest]]]:
        """By number of the parameter: what is in memory now, and what goes from disk to disk."""
        streams = isinstance(self._optimizer, HostOptimizer) and self._optimizer.state_on_disk
        state: dict[Any, dict[str, Any]] = {}
        on_disk: dict[Any, dict[str, TensorAtRest]] = {}
        places: list[Place] = []
        for number, entries in self._saved.tree["state"].items():
            state[number], on_disk[number] = {}, {}
            for name, value in entries.items():
                if not isinstance(value, torch.Tensor):
                    state[number][name] = value
                    continue
                at, what = self._saved.content.place(value), f"state.{number}.{name}"
                like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                if streams and at.nbytes > _SMALL_BYTES:
                    on_disk[number][name] = self._saved.file.at_rest(at, like, what)
                else:
                    state[number][name] = filled = torch.empty_like(like, device="cpu")
                    places.append(Place(at, what, filling(filled.as_strided((filled.numel(),), (1,)), value.dtype)))
        read_all([(self._saved.file, places)])
        return state, on_disk


def _convert(optimizer: HostOptimizer, parameter: torch.Tensor, saved: SavedTensor, state: dict[str, Any]) -> None:
    """A parameter whose dtype was another one gets its exact value, and the master that goes with it."""
    weight = saved.load()
    if parameter.dtype == torch.float32:
        exact = take_exact(weight, state)
        if exact is not None:
            with torch.no_grad():
                parameter.copy_(exact)
    elif saved.dtype == torch.float32:
        adopt_exact(optimizer, parameter, weight, state)


def _take_module_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """What modules save that is no tensor (`get_extra_state`)."""
    modules = dict(model.named_modules())
    for name, value in saved.items():
        prefix, _, _ = name.rpartition("_extra_state")
        modules[prefix.removesuffix(".")].set_extra_state(value)
