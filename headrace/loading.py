"""How does training go on from a checkpoint? `load()`: into whatever tiers, budgets and dtypes there are now."""

import contextlib
import os
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headrace.checkpoint.adapters import with_names_of
from headrace.checkpoint.contents import Contents, own_contents
from headrace.checkpoint.destinations import filling
from headrace.checkpoint.directory import restore_interrupted
from headrace.checkpoint.foreign import foreign_contents
from headrace.checkpoint.manifest import EXTRA, MANIFEST
from headrace.checkpoint.model import EXTRA_STATE, check_model, plain_name, tensors_of, unwrapped
from headrace.checkpoint.optimizers import Optimizers, check_sound, is_loaded_otherwise, plain_optimizers
from headrace.checkpoint.random_state import restore_random_state
from headrace.checkpoint.sources import SMALL_BYTES
from headrace.checkpoint.torn import is_written
from headrace.checkpoint.writing import last_saving
from headrace.errors import CheckpointError
from headrace.live import ModelHandle, handles_of
from headrace.memory.disk import SavedFile, TensorAtRest, TensorInFile, origin_of
from headrace.memory.disk.saved_file import Place, read_all, reading_memory
from headrace.memory.disk.torch_files import TorchFile
from headrace.optim.eight_bit import SUFFIX, is_record
from headrace.optim.optimizer import HostOptimizer
from headrace.optim.precision import adopt_exact, take_exact
from headrace.runtime.device import is_accelerator
from headrace.runtime.tensors import parameters_of
from headrace.weights.movement.block import Block
from headrace.weights.rest.rests import DiskRest

__all__ = ["load"]

_ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master", "master_remainder")


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers = None) -> Any:
    """Loads what `headrace.save` saved as `path` into `model` and `optimizer`, in place; returns `extra`.

    Checkpoints of other programs load as well: directories of transformers' Trainer, accelerate and
    torch.distributed.checkpoint, adapters of PEFT, Lightning's `.ckpt`, and files of torch.save and of safetensors.
    Whatever else they hold (`scheduler`, ...) is returned. No code in any of them is run.

    Tiers, budgets and blocks may differ from those at saving; if the dtypes agree, the run continues bit for bit. Other
    dtypes are converted, in both directions: between float32 and low-precision weights (with exact masters, if the
    optimizer keeps masters), and between moments in 8 bits and in float32. With `optimizer`, random states are restored
    as well.

    In checkpoints that headrace wrote, every byte is checked as it is read. Names, shapes and sizes are compared before
    the first tensor is written, so if they do not fit, nothing has changed. Loading takes 64 MiB of host memory, or 96
    MiB if weights rest on disk, and room for one tensor if any has to be converted.

    Raises CheckpointError when the checkpoint is damaged (naming file and tensor) or does not fit the model or the
    optimizer, StateError within a forward or backward, and DiskError when a drive fails. If an error comes while
    tensors are being written, calls of the model and `save` raise StateError until a later `load` has loaded
    everything.
    """
    check_model(model)
    directory = Path(path).expanduser().absolute()
    optimizers = plain_optimizers(optimizer)
    handles = handles_of(model)
    blocks = [block for handle in handles for block in handle.settled_blocks("headrace.load")]
    for saving in tuple(last_saving):  # which reads what is about to be written
        saving.ended()
    for one in optimizers:
        if isinstance(one, HostOptimizer):
            one.synchronize()
    restore_interrupted(directory.parent)
    if (directory / ".metadata").is_file():
        from headrace.checkpoint.distributed import load_distributed  # here: it takes half a second

        load_distributed(directory, _places_of(model), optimizers, is_written(model, directory))
        return None
    with contextlib.ExitStack() as stack:
        is_own = any((directory / name).exists() for name in (MANIFEST, EXTRA))
        contents = own_contents(directory, stack) if is_own else foreign_contents(directory, stack)
        if contents.adapters:
            contents = with_names_of(contents, unwrapped(model), tensors_of(model))
        if optimizers and len(optimizers) != len(contents.optimizers):
            raise CheckpointError(
                f"{directory} holds the state of {len(contents.optimizers)} optimizers, and {len(optimizers)} are"
                " given; give as many, or none, to load the weights alone"
            )
        modules = _modules_with_state(contents, model)
        wanted = _wanted(contents, model)
        states = [_State(*pair) for pair in zip(optimizers, contents.optimizers, strict=False)]
        converted = {id(tensor): one.saved for one in wanted for tensor in one.into if one.converts(tensor)}
        for state in states:
            state.check(converted)
        _make_writable(blocks, wanted)
        stack.enter_context(is_written(model, directory))
        _read_weights(wanted, handles, _images(blocks, wanted))
        for state in states:
            state.load(converted)
        for module, value in modules:
            module.set_extra_state(value)
        if optimizers and contents.random is not None:
            restore_random_state(contents.random)
    return contents.extra


def _make_writable(blocks: Sequence[Block], wanted: Sequence["_Wanted"]) -> None:
    """Homes that are about to be written are where that is kept."""
    written = {id(tensor) for one in wanted for tensor in one.into}
    for block in blocks:
        loaded = [id(param.home) in written for param in block.params]
        if any(loaded):
            block.make_writable(keeps=not all(loaded))
            for param in block.params:
                param.touch()


_Image = list[tuple[int, TensorInFile]]  # of a block: the first byte of each tensor in it


def _images(blocks: Sequence[Block], wanted: Sequence["_Wanted"]) -> list[tuple[Block, DiskRest, _Image]]:
    """The blocks on disk all of whose bytes are loaded as they lie in files."""
    plain = {id(t): one.saved for one in wanted for t in one.into if not one.converts(t) and t.is_contiguous()}
    found = []
    for block in blocks:
        params = block.params
        apart = len({param.layout.region for param in params}) == len(params)
        if apart and isinstance(block.rest, DiskRest) and all(s.in_place and id(s.home) in plain for s in params):
            found.append((block, block.rest, [(s.layout.offset, plain[id(s.home)]) for s in params]))
    return found


def _fill(rest: DiskRest, image: _Image) -> None:
    """What the files have becomes the block, past the page cache: nobody has to read it again for its checksums."""

    def lay_out(first: int, end: int, memory: torch.Tensor) -> None:
        for place, tensor in image:
            begin, stop = max(first, place), min(end, place + tensor.nbytes)
            if begin < stop:
                tensor.at_rest().read(begin - place, memory[begin - first : stop - first])

    rest.flush([])  # what was written through memory before does not come behind it
    rest.fill(lambda first, end: partial(lay_out, first, end))


def _read_weights(
    wanted: Sequence["_Wanted"], handles: Sequence[ModelHandle], images: Sequence[tuple[Block, DiskRest, _Image]]
) -> None:
    into = [tensor for one in wanted for tensor in one.into]
    filled = {id(param.home) for block, _, _ in images for param in block.params}
    places: dict[SavedFile, list[Place]] = defaultdict(list)
    devices = {tensor.device for tensor in into if is_accelerator(tensor.device)}
    with torch.no_grad():
        for one in wanted:
            aligned = one.saved.offset % one.saved.dtype.itemsize == 0
            others = [tensor for tensor in one.into if id(tensor) not in filled]
            puts = [filling(tensor, one.saved.dtype, aligned=aligned) for tensor in others]
            places[one.saved.file] += [(one.saved, put) for put in puts]
        try:
            for device in devices:  # threads fill tensors after all that it was told before, on any stream
                torch.accelerator.synchronize(device)
            for _, rest, image in images:
                _fill(rest, image)
                for _, tensor in image:
                    tensor.file.read_otherwise.update(tensor.whole_grains)
                    tensor.file.let_go()
            read_all(places.items(), reading_memory())
        finally:
            for device in devices:
                torch.accelerator.synchronize(device)
            # Memory was written past PyTorch; autograd and optimizers are to see that.
            torch.autograd.graph.increment_version([tensor for tensor in into if not tensor.is_inference()])
            for handle in handles:
                handle.refresh()
        for block, _, _ in images:
            block.note_flushed()
        for handle in handles:
            handle.settled_blocks("headrace.load")  # what a drive did not take is told here


@dataclass(frozen=True)
class _Wanted:
    """A tensor of a file, and the tensors of the model that get its values."""

    saved: TensorInFile
    into: list[torch.Tensor]

    def converts(self, tensor: torch.Tensor) -> bool:
        """Whether the values change on the way."""
        return tensor.dtype != self.saved.dtype


def _belongs_to_a_weight(name: str, weights: Collection[str]) -> bool:
    """Whether it is a part of one, as bitsandbytes' modules save them: `weight.absmax` beside `weight`."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in weights for end in range(1, len(parts)))


def _places_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What is loaded into, by name. Raises CheckpointError for copies of the model's tensors."""
    state = tensors_of(model)
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    known = {name for name, tensor in state.items() if id(tensor) in own}
    strange = next((name for name in state if name not in known and not _belongs_to_a_weight(name, known)), None)
    if strange is not None:
        raise CheckpointError(
            f"{strange!r} of the model's state_dict is none of its parameters and buffers: a hook on state_dict makes"
            " it, and nothing can be loaded into it; take the hook off for headrace.load"
        )
    return state


def _wanted(contents: Contents, model: nn.Module) -> list[_Wanted]:
    """What is read of the weights. Raises CheckpointError when they do not fit the model."""
    state = _places_of(model)
    prefix = _prefix(set(contents.weights), set(state))
    _check_names(contents, {name.removeprefix(prefix) for name in (*contents.weights, *contents.shared)}, state, model)
    saved_as = {name.removeprefix(prefix): saved for name, saved in contents.weights.items()}
    wanted: list[tuple[TensorInFile, dict[Any, torch.Tensor]]] = []
    writers: dict[Any, dict[Any, torch.Tensor]] = {}  # by memory: who fills it, the last one as in load_state_dict
    for name in [name for name in state if name in saved_as]:
        saved, into = saved_as[name], dict[Any, torch.Tensor]()
        for alias in [name, *(other for other, kept in contents.shared.items() if kept == name)]:
            tensor = state[alias]
            floating = tensor.is_floating_point() and saved.dtype.is_floating_point
            if tuple(tensor.shape) != saved.shape or not (tensor.dtype == saved.dtype or floating):
                raise CheckpointError(
                    f"{alias!r} is {saved.dtype} and has the shape {saved.shape} in {saved.file.path}, and"
                    f" {tensor.dtype} and {tuple(tensor.shape)} in the model; load it into the model that was saved"
                )
            found = origin_of(tensor.detach()) if tensor.device.type == "cpu" and tensor.is_contiguous() else None
            if found is None or not found[0].shows(str(saved.file.path), found[1], saved.offset, tensor.nbytes):
                into.setdefault((tensor.data_ptr(), tensor.nbytes), tensor)
        for memory in into:
            writers.pop(memory, {}).pop(memory, None)
            writers[memory] = into
        wanted.append((saved, into))
    return [_Wanted(saved, list(into.values())) for saved, into in wanted]


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
    stays = [name for name in missing if present[name].requires_grad]
    if stays:
        warnings.warn(
            f"{stays[0]!r} (and {len(stays) - 1} more) can be trained and is not in {contents.path}, which holds"
            " adapters and what was trained beside them. It stays as it is",
            RuntimeWarning,
            stacklevel=4,
        )


class _State:
    """The state of one optimizer, on its way. Raises CheckpointError when it does not fit the optimizer."""

    def __init__(self, optimizer: Optimizer, saved: TorchFile) -> None:
        self._optimizer = optimizer
        self._saved = saved
        self._hooked = is_loaded_otherwise(optimizer)
        if self._hooked:  # what they make of it is for them to check
            return
        check_sound(saved)
        there, here = (
            [len(group["params"]) for group in groups]
            for groups in (saved.tree["param_groups"], optimizer.param_groups)
        )
        if there != here:
            raise CheckpointError(
                f"{saved.file.path} is of an optimizer with {there} parameters in its groups; the one given has {here}"
            )
        self._check_shapes()

    def check(self, converted: Mapping[int, TensorInFile]) -> None:
        """Raises CheckpointError where `load` would have to change what hooks are to see as it was saved."""
        strange = [p for p in parameters_of(self._optimizer) if id(p) in converted]
        if self._hooked and strange and isinstance(self._optimizer, HostOptimizer):
            saved = converted[id(strange[0])]
            raise CheckpointError(
                f"{saved.name!r} is {saved.dtype} in {saved.file.path} and {strange[0].dtype} in the model, and the"
                " optimizer has hooks for load_state_dict, which want its state as it was saved; load it into a model"
                " of the saved dtype, or take the hooks off"
            )

    def load(self, converted: Mapping[int, TensorInFile]) -> None:
        """Into the optimizer. `converted`: by id, the parameters whose values have another dtype in the checkpoint."""
        if self._hooked:
            self._load_for_hooks()
            return
        numbers = [number for group in self._saved.tree["param_groups"] for number in group["params"]]
        parameters = parameters_of(self._optimizer)
        state, on_disk, groups = self._read(self._of_others(dict(zip(numbers, parameters, strict=True)), converted))
        if isinstance(self._optimizer, HostOptimizer):
            for number, parameter in zip(numbers, parameters, strict=True):
                if id(parameter) in converted:
                    entries = state.setdefault(number, {})
                    entries |= {name: one.load() for name, one in on_disk.pop(number, {}).items()}
                    _convert(self._optimizer, parameter, converted[id(parameter)], entries)
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        if isinstance(self._optimizer, HostOptimizer):
            pairs = zip(numbers, parameters, strict=True)
            self._optimizer.fill({parameter: on_disk[number] for number, parameter in pairs if on_disk.get(number)})

    def _of_others(self, parameters: Mapping[int, torch.Tensor], converted: Mapping[int, TensorInFile]) -> set[int]:
        """The numbers of parameters whose state other ranks keep, and whose values here do not come out of it."""
        if not isinstance(self._optimizer, HostOptimizer):
            return set()
        others = self._optimizer.kept_elsewhere()
        return {number for number, one in parameters.items() if one in others and id(one) not in converted}

    def _load_for_hooks(self) -> None:
        places: list[Place] = []
        tree = {key: self._in_memory(value, str(key), places) for key, value in self._saved.tree.items()}
        read_all([(self._saved.file, places)], reading_memory())
        self._optimizer.load_state_dict(tree)

    def _check_shapes(self) -> None:
        groups = self._saved.tree["param_groups"]
        numbers = [number for group in groups for number in group["params"]]
        parameters = parameters_of(self._optimizer)
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in self._saved.tree["state"].get(number, {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                moment = name.endswith(SUFFIX) and not is_record(value, parameter.numel())
                if moment or (name in _ELEMENTWISE and value.shape != parameter.shape):
                    raise CheckpointError(
                        f"{name} of parameter {number} has the shape {tuple(value.shape)} in {self._saved.file.path},"
                        f" and the parameter {tuple(parameter.shape)}; give the optimizer its parameters in the order"
                        " in which the saved one had them"
                    )

    def _read(
        self, others: Collection[int]
    ) -> tuple[dict[Any, Any], dict[Any, dict[str, TensorAtRest]], list[dict[str, Any]]]:
        """By number of the parameter: what is in memory now, and what goes from disk to disk; and the groups.

        Nothing of those in `others`.
        """
        streams = isinstance(self._optimizer, HostOptimizer) and self._optimizer.state_on_disk
        state: dict[Any, Any] = {}
        on_disk: dict[Any, dict[str, TensorAtRest]] = {}
        places: list[Place] = []
        for number, entries in self._saved.tree["state"].items():
            on_disk[number] = {}
            if number in others:
                state[number] = {}  # there is one
                continue
            for name, value in entries.items() if streams and isinstance(entries, Mapping) else ():
                if not isinstance(value, torch.Tensor) or value.nbytes <= SMALL_BYTES:
                    continue
                if _is_as_in_file(value):  # all of ours are
                    there = self._saved.place(f"state.{number}.{name}", value)
                    on_disk[number][name] = there.at_rest()
                    there.file.read_otherwise.update(there.whole_grains)
            rest = entries
            if on_disk[number]:
                rest = {name: value for name, value in entries.items() if name not in on_disk[number]}
            state[number] = self._in_memory(rest, f"state.{number}", places)
        groups = self._in_memory(self._saved.tree["param_groups"], "param_groups", places)
        read_all([(self._saved.file, places)], reading_memory())
        return state, on_disk, groups

    def _in_memory(self, value: Any, name: str, places: list[Place]) -> Any:
        """The same tree with tensors that `places` fill."""
        if isinstance(value, torch.Tensor):
            if not _is_as_in_file(value):
                return value.resolve_conj().resolve_neg().clone()  # of another program: ours have none
            filled = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            if value.numel():
                flat = filled.as_strided((filled.numel(),), (1,))
                places.append((self._saved.place(name, value), filling(flat, value.dtype)))
            return filled
        if isinstance(value, Mapping):
            return {key: self._in_memory(entry, f"{name}.{key}", places) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self._in_memory(entry, f"{name}.{i}", places) for i, entry in enumerate(value)])
        return value


def _is_as_in_file(tensor: torch.Tensor) -> bool:
    """Whether its bytes in the file, in their order, are its elements."""
    return torch.ops.aten.is_non_overlapping_and_dense(tensor) and not tensor.is_conj() and not tensor.is_neg()


def _convert(optimizer: HostOptimizer, parameter: torch.Tensor, saved: TensorInFile, state: dict[str, Any]) -> None:
    """A parameter whose dtype was another one gets its exact value, and the master that goes with it."""
    exact = take_exact(saved.at_rest().load(), state)
    if parameter.dtype in (torch.bfloat16, torch.float16):
        adopt_exact(optimizer, parameter, exact, state)
    else:
        with torch.no_grad():
            parameter.copy_(exact)


def _modules_with_state(contents: Contents, model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """The modules that save something of their own (`get_extra_state`), and what that was."""
    modules = {plain_name(name): module for name, module in model.named_modules()}
    prefix = _prefix(set(contents.weights), set(tensors_of(model)))
    found = []
    for name, value in contents.module_state.items():
        owner = name.removeprefix(prefix).removesuffix(EXTRA_STATE).removesuffix(".")
        if owner not in modules or type(modules[owner]).set_extra_state is nn.Module.set_extra_state:
            raise CheckpointError(
                f"{contents.path} holds {name!r}, which no module of the model takes (set_extra_state); load it into"
                " the model that was saved"
            )
        found.append((modules[owner], value))
    return found
