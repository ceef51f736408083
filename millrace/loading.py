"""How does training go on from a checkpoint? `load()`: into whatever tiers, budgets and dtypes there are now."""

import contextlib
import io
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
from millrace.checkpoint.destinations import filling
from millrace.checkpoint.manifest import EXTRA, Manifest, read_manifest
from millrace.checkpoint.model import state_of
from millrace.checkpoint.optimizers import Optimizers, plain_optimizers
from millrace.checkpoint.random_state import restore_random_state
from millrace.checkpoint.reading import Place, PlaceInFile, SavedFile, read_all
from millrace.checkpoint.torch_files import open_torch_file
from millrace.errors import CheckpointError
from millrace.live import handle_of
from millrace.memory.disk import TensorAtRest, origin_of
from millrace.memory.disk.safetensors_header import TensorRecord, read_header
from millrace.optim.optimizer import HostOptimizer
from millrace.optim.precision import adopt_exact, take_exact

__all__ = ["load"]

_SMALL_BYTES = 1 << 14


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers = None) -> Any:
    """Loads what `millrace.save` saved as `path` into `model` and `optimizer`, in place; returns `extra`.

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
    manifest = read_manifest(directory)
    if optimizers and len(optimizers) != len(manifest.optimizers):
        raise CheckpointError(
            f"{directory} holds the state of {len(manifest.optimizers)} optimizers, and {len(optimizers)} are given"
        )
    with contextlib.ExitStack() as stack:

        def opened(name: str) -> SavedFile:
            file = SavedFile(directory / name, manifest.files[name])
            stack.callback(file.close)
            return file

        rest = torch.load(io.BytesIO(opened(EXTRA).bytes()), weights_only=True)
        weights = {name: opened(name) for name in {file for file, _ in manifest.weights.values()}}
        wanted = _wanted(directory, manifest, weights, model)
        states = [_OptimizerFile(one, opened(name)) for one, name in zip(optimizers, manifest.optimizers, strict=False)]
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
            state.load({id(tensor): one for one in wanted for tensor in one.into if tensor.dtype != one.dtype})
    _take_module_state(model, rest["module_state"])
    if optimizers:
        restore_random_state(rest["random"])
    return rest["extra"]


@dataclass(frozen=True)
class _Wanted:
    """A tensor of a file, and the tensors of the model that get its values."""

    file: SavedFile
    at: PlaceInFile
    dtype: torch.dtype
    name: str
    into: list[torch.Tensor]


def _wanted(directory: Path, manifest: Manifest, files: Mapping[str, SavedFile], model: nn.Module) -> list[_Wanted]:
    """What is read of the weights. Raises CheckpointError when they do not fit the model."""
    state = {name: value for name, value in state_of(model).items() if isinstance(value, torch.Tensor)}
    records: dict[tuple[str, str], TensorRecord] = {
        (name, record.name): record
        for name, file in files.items()
        for record in read_header(file.descriptor, str(file.path))
    }
    known = {*manifest.weights, *manifest.shared}
    _check_names(directory, known, set(state), manifest, model)
    wanted = []
    for name, (file, there) in manifest.weights.items():
        if (file, there) not in records:
            raise CheckpointError(f"{directory / file} lacks {there!r}; load another checkpoint")
        record = records[file, there]
        into: dict[int, torch.Tensor] = {}
        for alias in [name, *(other for other, kept in manifest.shared.items() if kept == name)]:
            tensor = state[alias]
            if tuple(tensor.shape) != record.shape:
                raise CheckpointError(
                    f"{alias!r} has the shape {record.shape} in {directory / file}, and {tuple(tensor.shape)} in the"
                    " model; load it into the model that was saved"
                )
            if tensor.dtype != record.dtype and not (tensor.is_floating_point() and record.dtype.is_floating_point):
                raise CheckpointError(
                    f"{alias!r} is {record.dtype} in {directory / file}, and {tensor.dtype} in the model; load it into"
                    " the model that was saved"
                )
            found = origin_of(tensor.detach()) if tensor.device.type == "cpu" else None
            if found is None or not found[0].shows(str(files[file].path), found[1], record.offset):
                into.setdefault(tensor.data_ptr(), tensor)
        at = PlaceInFile(record.offset, record.nbytes)
        wanted.append(_Wanted(files[file], at, record.dtype, name, list(into.values())))
    return wanted


def _check_names(directory: Path, saved: set[str], present: set[str], manifest: Manifest, model: nn.Module) -> None:
    unexpected = sorted(saved - present)
    if unexpected:
        raise CheckpointError(
            f"{directory} holds {unexpected[0]!r} (and {len(unexpected) - 1} more), which the model does not have;"
            " load it into the model that was saved"
        )
    missing = sorted(present - saved - set(getattr(model, "_keys_to_ignore_on_save", None) or ()))
    if missing and not manifest.trained_only:
        raise CheckpointError(
            f"{directory} lacks {missing[0]!r} (and {len(missing) - 1} more) of the model; load it into the model"
            " that was saved"
        )


def _work(wanted: Sequence[_Wanted]) -> list[tuple[SavedFile, list[Place]]]:
    """The same, by file."""
    places: dict[SavedFile, list[Place]] = defaultdict(list)
    for one in wanted:
        places[one.file] += [Place(one.at, one.name, filling(tensor, one.dtype)) for tensor in one.into]
    return list(places.items())


class _OptimizerFile:
    """The state of one optimizer in a file. Raises CheckpointError when it does not fit the optimizer."""

    def __init__(self, optimizer: Optimizer, file: SavedFile) -> None:
        self._optimizer = optimizer
        self._file = file
        self._content = open_torch_file(file.path)
        saved, there = (
            [len(group["params"]) for group in groups]
            for groups in (self._content.tree["param_groups"], optimizer.param_groups)
        )
        if saved != there:
            raise CheckpointError(
                f"{file.path} is of an optimizer with {saved} parameters in its groups; the one given has {there}"
            )

    def load(self, converted: Mapping[int, _Wanted]) -> None:
        """Into the optimizer. `converted`: by id, the parameters whose values have another dtype in the checkpoint."""
        state, on_disk = self._read()
        groups = self._content.tree["param_groups"]
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
        for number, entries in self._content.tree["state"].items():
            state[number], on_disk[number] = {}, {}
            for name, value in entries.items():
                if not isinstance(value, torch.Tensor):
                    state[number][name] = value
                    continue
                at, what = self._content.place(value), f"state.{number}.{name}"
                like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                if streams and at.nbytes > _SMALL_BYTES:
                    on_disk[number][name] = self._file.at_rest(at, like, what)
                else:
                    state[number][name] = filled = torch.empty_like(like, device="cpu")
                    places.append(Place(at, what, filling(filled.as_strided((filled.numel(),), (1,)), value.dtype)))
        read_all([(self._file, places)])
        return state, on_disk


def _convert(optimizer: HostOptimizer, parameter: torch.Tensor, saved: _Wanted, state: dict[str, Any]) -> None:
    """A parameter whose dtype was another one gets its exact value, and the master that goes with it."""
    like = torch.empty(parameter.shape, dtype=saved.dtype, device="meta")
    weight = saved.file.at_rest(saved.at, like, saved.name).load()
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
