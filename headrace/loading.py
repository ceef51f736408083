"""How does training go on from a checkpoint? `load()`: into whatever tiers, budgets and dtypes there are now."""

import contextlib
import os
import warnings
from collections.abc import Collection, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headrace.checkpoint.adapters import with_names_of
from headrace.checkpoint.contents import Contents, contents_of
from headrace.checkpoint.destinations import filling
from headrace.checkpoint.directory import restore_interrupted
from headrace.checkpoint.manifest import EXTRA_STATE
from headrace.checkpoint.model import check_model, plain_name, tensors_of, unwrapped
from headrace.checkpoint.optimizers import Optimizers, fitting, is_loaded_otherwise, plain_optimizers
from headrace.checkpoint.random_state import restore_random_state
from headrace.checkpoint.sources import SMALL_BYTES
from headrace.checkpoint.torn import is_written
from headrace.checkpoint.writing import last_saving
from headrace.config import path_of
from headrace.errors import CheckpointError
from headrace.live import ModelHandle, handles_of
from headrace.memory.disk import SavedFile, TensorAtRest, TensorInFile, origin_of
from headrace.memory.disk.saved_file import Place, read_all, reading_memory
from headrace.memory.disk.torch_files import TorchFile
from headrace.optim.eight_bit import SUFFIX, is_record
from headrace.optim.loading import lacking_options
from headrace.optim.optimizer import HostOptimizer
from headrace.optim.precision import adopt_exact, take_exact
from headrace.runtime.device import is_accelerator
from headrace.runtime.tensors import map_tree, parameters_of
from headrace.weights.movement.block import Block
from headrace.weights.rest.rests import DiskRest

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
    MiB if weights rest on disk, and room for the few tensors that are read at a time if any has to be converted.

    Raises CheckpointError when the checkpoint is damaged (naming file and tensor) or does not fit the model or the
    optimizer, StateError within a forward or backward, and DiskError when a drive fails. If an error occurs while
    tensors are being written, calls of the model and `save` raise StateError until a later `load` has loaded
    everything.
    """
    check_model(model)
    if path is None:
        raise TypeError("path=None: newest() returns None where there is no complete checkpoint; train from the start")
    directory = path_of(path, "path").expanduser().absolute()
    optimizers = plain_optimizers(optimizer)
    handles = handles_of(model)
    blocks = [block for handle in handles for block in handle.settled_blocks("headrace.load")]
    for saving in tuple(last_saving):  # it reads what is about to be written
        saving.ended()
    for each in optimizers:
        if isinstance(each, HostOptimizer):
            each.synchronize()
    restore_interrupted(directory.parent)
    state = _places_of(model)
    if (directory / ".metadata").is_file():
        from headrace.checkpoint.distributed import load_distributed  # here: it takes half a second

        load_distributed(directory, state, optimizers, is_written(model, directory))
        return None
    with contextlib.ExitStack() as stack:
        contents = contents_of(directory, stack)
        if contents.adapters:
            contents = with_names_of(contents, unwrapped(model), state)
        if optimizers and len(optimizers) != len(contents.optimizers):
            raise CheckpointError(
                f"{directory} holds the state of {len(contents.optimizers)} optimizers, and {len(optimizers)} are"
                " given; give as many, or none, to load the weights alone"
            )
        prefix = _prefix(contents.weights.keys(), state.keys())
        modules = _modules_with_state(contents, model, prefix)
        wanted = _wanted(contents, model, state, prefix)
        states = [_State(*pair) for pair in zip(optimizers, contents.optimizers, strict=False)]
        converted = {id(tensor): saved for saved, tensor in wanted if tensor.dtype != saved.dtype}
        for one in states:
            one.check(converted)
        _make_writable(blocks, wanted)
        stack.enter_context(is_written(model, directory))
        files: dict[SavedFile, list[Place]] = {saved.file: [] for saved in contents.weights.values()}
        _read_weights(files, wanted, handles, _images(blocks, wanted))
        for one in states:
            one.load(converted)
        for module, value in modules:
            module.set_extra_state(value)
        _restore_passes(handles, list(contents.passes))
        if optimizers and contents.random is not None:
            restore_random_state(contents.random)
    return contents.extra


def _restore_passes(handles: Sequence[ModelHandle], passes: list[Any]) -> None:
    """Each handle takes what is known of its own passes, and nobody else does: two models may have the same blocks."""
    for handle in handles:
        for place, known in enumerate(passes):
            if handle.restore(known):
                del passes[place]
                break


_Wanted = Sequence[tuple[TensorInFile, torch.Tensor]]  # tensors of files, and those of the model that get their values


def _make_writable(blocks: Sequence[Block], wanted: _Wanted) -> None:
    """Moves blocks that will be written from a checkpoint, which is only read, to disk; and notes the writes."""
    written = {id(tensor) for _, tensor in wanted}
    for block in blocks:
        loaded = [id(param.home) in written for param in block.params]
        if any(loaded):
            block.make_writable(keeps=not all(loaded))
            for param in block.params:
                param.touch()


_Image = list[tuple[int, TensorInFile]]  # of a block: where each tensor begins in it, and the tensor in its file


def _images(blocks: Sequence[Block], wanted: _Wanted) -> list[tuple[Block, DiskRest, _Image]]:
    """The blocks on disk whose bytes all come from files, unchanged."""
    plain = {id(t): saved for saved, t in wanted if t.dtype == saved.dtype and t.is_contiguous()}
    found = []
    for block in blocks:
        params = block.params
        apart = len({param.layout.region for param in params}) == len(params)
        if apart and isinstance(block.rest, DiskRest) and all(s.in_place and id(s.home) in plain for s in params):
            found.append((block, block.rest, [(s.layout.offset, plain[id(s.home)]) for s in params]))
    return found


def _fill(rest: DiskRest, image: _Image) -> None:
    """Writes the files' bytes to the block, past the page cache; checksums need no second read."""

    def lay_out(first: int, end: int, memory: torch.Tensor) -> None:
        for place, tensor in image:
            begin, stop = max(first, place), min(end, place + tensor.nbytes)
            if begin < stop:
                tensor.read(begin - place, memory[begin - first : stop - first])

    rest.flush([])  # earlier writes through memory must not come after this one
    rest.fill(lambda first, end: partial(lay_out, first, end))


def _read_weights(
    files: dict[SavedFile, list[Place]],
    wanted: _Wanted,
    handles: Sequence[ModelHandle],
    images: Sequence[tuple[Block, DiskRest, _Image]],
) -> None:
    filled = {id(param.home) for block, _, _ in images for param in block.params}
    devices = {tensor.device for _, tensor in wanted if is_accelerator(tensor.device)}
    with torch.no_grad():
        for saved, tensor in wanted:
            if id(tensor) not in filled:
                aligned = saved.offset % saved.dtype.itemsize == 0
                files[saved.file].append((saved, filling(tensor, saved.dtype, aligned=aligned)))
        try:
            for device in devices:  # threads fill tensors after all work that it was given, on any stream
                torch.accelerator.synchronize(device)
            for _, rest, image in images:
                _fill(rest, image)
                for _, saved in image:
                    saved.file.read_otherwise.update(saved.whole_grains)
                    saved.file.let_go()
            read_all(files.items(), reading_memory())
        finally:
            for device in devices:
                torch.accelerator.synchronize(device)
            # Memory was written past PyTorch; autograd and optimizers have to see that.
            torch.autograd.graph.increment_version([tensor for _, tensor in wanted if not tensor.is_inference()])
            for handle in handles:
                handle.refresh()
        for block, _, _ in images:
            block.note_flushed()
        for handle in handles:
            handle.settled_blocks("headrace.load")  # raises the error of a write that failed


def _belongs_to_a_weight(name: str, weights: Collection[str]) -> bool:
    """Whether `name` is that of a part of a weight, as bitsandbytes' modules save them: `weight.absmax`."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in weights for end in range(1, len(parts)))


def _places_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors to fill, by name. Raises CheckpointError for copies of the model's tensors."""
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


def _wanted(contents: Contents, model: nn.Module, state: Mapping[str, torch.Tensor], prefix: str) -> _Wanted:
    """The weights to read. Raises CheckpointError when they do not fit the model."""
    _check_names(contents, {name.removeprefix(prefix) for name in (*contents.weights, *contents.shared)}, state, model)
    saved_as = {name.removeprefix(prefix): saved for name, saved in contents.weights.items()}
    found: dict[Any, tuple[TensorInFile, torch.Tensor]] = {}  # by memory: the last one fills it, as in load_state_dict
    for name in [name for name in state if name in saved_as]:
        saved = saved_as[name]
        for alias in [name, *(other for other, kept in contents.shared.items() if kept == name)]:
            tensor = state[alias]
            floating = tensor.is_floating_point() and saved.dtype.is_floating_point
            if tuple(tensor.shape) != saved.shape or not (tensor.dtype == saved.dtype or floating):
                raise CheckpointError(
                    f"{alias!r} is {saved.dtype} and has the shape {saved.shape} in {saved.file.path}, and"
                    f" {tensor.dtype} and {tuple(tensor.shape)} in the model; load it into the model that was saved"
                )
            at = origin_of(tensor.detach()) if tensor.device.type == "cpu" and tensor.is_contiguous() else None
            memory = tensor.data_ptr(), tensor.nbytes
            is_there = at is not None and at[0].shows(str(saved.file.path), at[1], saved.offset, tensor.nbytes)
            if not is_there and (memory not in found or found[memory][0] is not saved):
                found[memory] = saved, tensor
    return list(found.values())


def _prefix(saved: Set[str], present: Set[str]) -> str:
    """The prefix that a checkpoint adds to all of the model's names, such as Lightning's `model.`."""
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
    """The saved state of one optimizer, to be loaded. Raises CheckpointError when it does not fit the optimizer."""

    def __init__(self, optimizer: Optimizer, saved: TorchFile) -> None:
        self._optimizer = optimizer
        self._saved = saved
        self._hooked = is_loaded_otherwise(optimizer)  # then hooks or its class check the state themselves
        self._parameters = {} if self._hooked else fitting(optimizer, saved)  # by the number in the file
        lacking = [] if self._hooked else lacking_options(optimizer, saved.tree["param_groups"])
        if lacking:
            raise CheckpointError(
                f"{saved.file.path} has no {lacking[0]!r}, which {type(optimizer).__name__} has: another kind of"
                " optimizer was saved; give one of that kind, or load without an optimizer"
            )
        for number, parameter in self._parameters.items():
            for name, value in saved.tree["state"].get(number, {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                moment = name.endswith(SUFFIX) and not is_record(value, parameter.numel())
                if moment or (name in _ELEMENTWISE and value.shape != parameter.shape):
                    raise CheckpointError(
                        f"{name} of parameter {number} has the shape {tuple(value.shape)} in {saved.file.path},"
                        f" and the parameter {tuple(parameter.shape)}; give the optimizer its parameters in the order"
                        " in which the saved one had them"
                    )

    def check(self, converted: Mapping[int, TensorInFile]) -> None:
        """Raises CheckpointError if `load` would have to convert state that hooks need as it was saved."""
        strange = [p for p in parameters_of(self._optimizer) if id(p) in converted]
        if self._hooked and strange and isinstance(self._optimizer, HostOptimizer):
            saved = converted[id(strange[0])]
            raise CheckpointError(
                f"{saved.name!r} is {saved.dtype} in {saved.file.path} and {strange[0].dtype} in the model, and the"
                " optimizer has hooks for load_state_dict, which want its state as it was saved; load it into a model"
                " of the saved dtype, or take the hooks off"
            )

    def load(self, converted: Mapping[int, TensorInFile]) -> None:
        """Loads into the optimizer. `converted`, by a parameter's id: values with another dtype in the checkpoint."""
        tree: Mapping[str, Any] = self._saved.tree
        on_disk: dict[Any, dict[str, TensorAtRest]] = {}
        ours = self._optimizer if isinstance(self._optimizer, HostOptimizer) and not self._hooked else None
        if not self._hooked:
            others = set() if ours is None else ours.kept_elsewhere()
            here = {number: p not in others or id(p) in converted for number, p in self._parameters.items()}
            state = {number: entries if here.get(number, True) else {} for number, entries in tree["state"].items()}
            if ours is not None and ours.state_on_disk:
                on_disk = {number: self._on_disk(number, entries) for number, entries in state.items()}
                for number, apart in on_disk.items():
                    state[number] = {name: value for name, value in state[number].items() if name not in apart}
            tree = {"state": state, "param_groups": tree["param_groups"]}
        read = self._in_memory(tree)
        for number, parameter in self._parameters.items():
            if ours is not None and id(parameter) in converted:
                entries = read["state"].setdefault(number, {})
                entries |= {name: one.load() for name, one in on_disk.pop(number, {}).items()}
                _convert(ours, parameter, converted[id(parameter)], entries)
        self._optimizer.load_state_dict(read)
        if ours is not None:
            ours.fill({p: on_disk[number] for number, p in self._parameters.items() if on_disk.get(number)})

    def _on_disk(self, number: Any, entries: Mapping[str, Any]) -> dict[str, TensorAtRest]:
        """The part of a state that goes from disk to disk."""
        found: dict[str, TensorAtRest] = {}
        for name, value in entries.items():
            if isinstance(value, torch.Tensor) and value.nbytes > SMALL_BYTES and _is_as_in_file(value):
                there = self._saved.place(f"state.{number}.{name}", value)
                there.file.read_otherwise.update(there.whole_grains)
                found[name] = there
        return found

    def _in_memory(self, tree: Mapping[str, Any]) -> Any:
        """The same tree with its tensors in memory."""
        places: list[Place] = []

        def filled(value: Any, name: str) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if not _is_as_in_file(value):
                return value.resolve_conj().resolve_neg().clone()  # only in files of other programs
            memory = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            if value.numel():
                flat = memory.as_strided((memory.numel(),), (1,))
                places.append((self._saved.place(name, value), filling(flat, value.dtype)))
            return memory

        read = map_tree(tree, filled)
        read_all([(self._saved.file, places)], reading_memory())
        return read


def _is_as_in_file(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes in the file are exactly its elements."""
    return torch.ops.aten.is_non_overlapping_and_dense(tensor) and not tensor.is_conj() and not tensor.is_neg()


def _convert(optimizer: HostOptimizer, parameter: torch.Tensor, saved: TensorInFile, state: dict[str, Any]) -> None:
    """Gives a parameter saved in another dtype its exact value, and the master that goes with it."""
    exact = take_exact(saved.load(), state)
    if parameter.dtype in (torch.bfloat16, torch.float16):
        adopt_exact(optimizer, parameter, exact, state)
    else:
        with torch.no_grad():
            parameter.copy_(exact)


def _modules_with_state(contents: Contents, model: nn.Module, prefix: str) -> list[tuple[nn.Module, Any]]:
    """The modules that save something of their own (`get_extra_state`), and what that was."""
    modules = {plain_name(name): module for name, module in model.named_modules()}
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
