"""How is training saved? `save()`: weights, optimizer, random states and the rest, while training waits or goes on."""

import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headrace.checkpoint.directory import NewDirectory, check_keep
from headrace.checkpoint.files import Layout, literal, torch_file, weight_files
from headrace.checkpoint.manifest import EXTRA, MANIFEST, Manifest
from headrace.checkpoint.model import SavedModel, check_model, saved_model
from headrace.checkpoint.optimizers import Optimizers, optimizer_file, plain_optimizers, state_of_optimizer
from headrace.checkpoint.random_state import random_state
from headrace.checkpoint.torn import check_whole
from headrace.checkpoint.writing import LEAST_BYTES, Saving, begin, last_saving
from headrace.config import Size, check_flag, format_bytes, parse_bytes, path_of
from headrace.errors import CheckpointError
from headrace.live import handles_of
from headrace.optim.optimizer import HostOptimizer
from headrace.runtime.capture import before_write
from headrace.runtime.tensors import map_tree

__all__ = ["Saving", "save"]

_HOST_BYTES = 32 << 20  # of the buffers that a checkpoint passes through, if training waits for it
_HOST_BYTES_BESIDE = 256 << 20  # and if training goes on


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Any = None,
    files: Mapping[str, bytes] | None = None,
    keep: int | None = None,
    wait: bool = True,
    host_memory: Size | None = None,
) -> Saving:
    """Saves a training run, whatever tiers it uses, to the directory `path`. A checkpoint is complete or absent.

    The directory is a checkpoint that Hugging Face's libraries can read: `from_pretrained(path)` reads the weights (of
    a PEFT model, its adapters and whatever else is trained). `optimizer.pt` is what `torch.save(optimizer.state_dict(),
    ...)` writes: `optimizer.load_state_dict(torch.load("optimizer.pt", mmap=True))` reads it without headrace. Random
    states of Python, NumPy and PyTorch are saved, too. `headrace.load` checks every byte.

    - `optimizer`: one optimizer or several, of headrace or of PyTorch.
    - `extra`: plain values, tensors, and lists and dicts of these. For an object with a `state_dict()` (a scheduler, a
      GradScaler, a data loader), that dict is saved. `load` returns `extra`.
    - `files`: more files for the directory, by name, such as a tokenizer's or those that another program resumes from.
      `load` checks them but does not use them.
    - `keep`: how many checkpoints to keep, counting those next to `path` whose names differ only in the number at the
      end (`step-300`). Older ones are deleted once this one is complete.
    - `wait`: with False, the call returns while the checkpoint is still being written. Optimizers update a parameter
      only after it has been read; before you write to parameters in any other way, call `wait()` on the result. One
      checkpoint is written at a time: the next call waits for the one before it, and raises its error unless `wait()`
      has raised it. The process does not end before the checkpoint is written.
    - `host_memory`: bytes of the buffers through which the checkpoint passes, 24 MiB at least. Default: 32 MiB, or 256
      MiB with `wait=False`, so that the drive may lag behind by that much.

    Gradients are not saved: save after `optimizer.step()`.

    Raises StateError within a forward or backward and after a `load` that failed midway, DiskError when the drive fails
    or is full, CheckpointError for what cannot be saved (meta, sparse or lazy tensors; objects in `extra`), and
    ValueError and TypeError for invalid arguments. Nothing has been changed in any of these cases: an earlier
    checkpoint is still there.
    """
    check_model(model)
    path = path_of(path, "path").expanduser().absolute()
    check_flag(wait, "wait")
    if not isinstance(files, Mapping | None):
        raise TypeError(f"files is a {type(files).__name__}; give a dict of names and bytes")
    path = path.resolve() if path.is_symlink() else path
    if keep is not None:
        check_keep(path, keep)
    if host_memory is None:
        host_memory = _HOST_BYTES if wait else _HOST_BYTES_BESIDE
    memory_bytes = parse_bytes(host_memory, name="host_memory")
    if memory_bytes < LEAST_BYTES:
        raise ValueError(
            f"host_memory is {format_bytes(memory_bytes)}; a checkpoint passes through {format_bytes(LEAST_BYTES)} at"
            " least, so give that, or leave it out"
        )
    optimizers = plain_optimizers(optimizer)
    check_whole(model)
    handles = handles_of(model)
    blocks = [block for handle in handles for block in handle.settled_blocks("headrace.save")]
    for saving in tuple(last_saving):
        saving.settle()
    directory = NewDirectory(path)
    try:
        for block in blocks:
            block.flush()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        saved = saved_model(model, directory.path)
        known = [handle.known() for handle in handles]
        layouts, manifest = _laid_out(directory.path, saved, optimizers, extra, files or {}, known)
        saving = Saving(directory, layouts, manifest, memory_bytes, keep=keep, shows=wait)
    except BaseException:
        directory.discard()
        raise
    begin(saving)
    for handle in handles:
        handle.note_checkpoint(saving)
    if wait:
        saving.wait()
    else:
        before_write([tensor for tensor in saved.tensors.values() if not isinstance(tensor, nn.Parameter)])
    return saving


def _laid_out(
    directory: Path,
    saved: SavedModel,
    optimizers: Sequence[Optimizer],
    extra: Any,
    files: Mapping[str, bytes],
    known: Sequence[Mapping[str, Any]],
) -> tuple[list[Layout], Callable[..., Manifest]]:
    """The files of a checkpoint that is made in `directory`, and a function from their records to the manifest."""
    configuration = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    layouts = [literal(str(path.relative_to(directory)), path.read_bytes()) for path in configuration]
    for path in configuration:
        path.unlink()
    weights: dict[str, tuple[str, str]] = {}
    for stem, names in saved.files.items():
        of_weights, places = weight_files({there: saved.tensors[name] for there, name in names.items()}, stem)
        layouts += of_weights
        weights |= {names[there]: (file, there) for there, file in places.items()}
    optimizer_files = [optimizer_file(number) for number in range(len(optimizers))]
    for file, optimizer in zip(optimizer_files, optimizers, strict=True):
        state = optimizer.state_at_rest() if isinstance(optimizer, HostOptimizer) else optimizer.state
        layouts.append(torch_file(file, state_of_optimizer(optimizer, state), directory))
    layouts.append(literal(EXTRA, _extra_bytes(extra, saved.extra_state, known)))
    for name, data in files.items():
        taken = ("", "..", MANIFEST, *(layout.name for layout in layouts))
        if Path(name).name != name or name in taken:
            raise ValueError(f"files has {name!r}; give names without folders, none of those that a checkpoint has")
        layouts.append(literal(name, data))
    return layouts, partial(
        Manifest,
        weights=weights,
        shared=saved.shared,
        trained_only=saved.trained_only,
        optimizers=optimizer_files,
        made_by={name: version(name) for name in ("headrace", "torch")},
    )


def _extra_bytes(extra: Any, module_state: Mapping[str, Any], known: Sequence[Mapping[str, Any]]) -> bytes:
    """What `load` returns and restores, as `torch.save` writes it. Raises CheckpointError for objects."""
    strange: list[str] = []

    def has_state_dict(value: Any) -> bool:
        return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)

    def plain(value: Any, path: str) -> Any:
        """Objects become their state_dict()."""
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu")
        if has_state_dict(value):
            return map_tree(value.state_dict(), plain, path, is_leaf=has_state_dict)
        if not isinstance(value, str | int | float | bytes | complex | tuple | None):
            strange.append(f"{path} is a {type(value).__name__}")
        return value

    whole = {"extra": extra, "module_state": module_state}
    tree = map_tree(whole, plain, is_leaf=has_state_dict) | {"random": random_state(), "passes": known}
    buffer = io.BytesIO()
    try:
        torch.save(tree, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError) as error:
        why = next(iter([*strange, *str(error).splitlines(), type(error).__name__]))
        raise CheckpointError(
            f"extra holds what cannot be read back safely: {why}; give plain values,"
            " tensors, lists, dicts, and what has a state_dict()"
        ) from error
    return buffer.getvalue()
