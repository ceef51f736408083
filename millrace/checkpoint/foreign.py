"""What does a checkpoint of another program hold? Of transformers' Trainer, accelerate, Lightning, and plain files.

| what is given | weights | optimizers | the rest, returned as `extra` |
|---|---|---|---|
| Trainer's `checkpoint-300` | safetensors or pytorch_model.bin | optimizer.pt | scheduler, trainer_state |
| accelerate's `save_state` | the same | optimizer.bin, optimizer_1.bin | scheduler |
| Lightning's `.ckpt` | state_dict | optimizer_states | everything else in it |
| a file of torch.save | itself, or its model_state_dict or model | optimizer_state_dict, optimizer | everything else |
| a safetensors file, index or directory | all | none | None |
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from millrace.checkpoint.contents import Contents, SavedOptimizer, SavedTensor, opener
from millrace.checkpoint.reading import PlaceInFile, SavedFile
from millrace.checkpoint.torch_files import TorchFile, open_torch_file
from millrace.errors import CheckpointError
from millrace.memory.disk.checkpoint_files import find_files
from millrace.memory.disk.safetensors_header import read_header

__all__ = ["foreign_contents"]

_WEIGHTS = ("state_dict", "model_state_dict", "model")  # under which files of torch.save have them
_OPTIMIZERS = ("optimizer_states", "optimizer_state_dict", "optimizer")


def foreign_contents(path: Path, stack: ExitStack) -> Contents:
    """What is in `path`. Its files are open until `stack` ends. Raises CheckpointError when it is none of these."""
    opened = opener(stack, lambda name: SavedFile(Path(name), None))
    if path.is_file() and not path.name.endswith((".safetensors", ".json")):
        return _torch_checkpoint(path, opened(str(path)))
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a checkpoint's directory, or its file")
    weights: dict[str, SavedTensor] = {}
    if path.is_file() or any(path.glob("*.safetensors")):
        for file, names in find_files(path).items():
            saved = opened(str(file))
            for record in read_header(saved.descriptor, str(file)):
                if names is None or record.name in names:
                    at = PlaceInFile(record.offset, record.nbytes)
                    weights[record.name] = SavedTensor(record.name, saved, at, record.dtype, record.shape)
    else:
        for file in _pickled_weights(path):
            content = open_torch_file(file)
            weights |= _tensors(content.tree, content, opened(str(file)))
    optimizers = []
    for file in [path / "optimizer.pt", *sorted(path.glob("optimizer*.bin"), key=lambda file: (len(file.name), file))]:
        if file.is_file():
            content = open_torch_file(file)
            optimizers.append(SavedOptimizer(content.tree, content, opened(str(file))))
    return Contents(path=path, weights=weights, optimizers=optimizers, extra=_rest(path))


def _torch_checkpoint(path: Path, file: SavedFile) -> Contents:
    content = open_torch_file(path)
    tree = content.tree
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{path} holds a {type(tree).__name__}, and no state_dict")
    inner = next((name for name in _WEIGHTS if isinstance(tree.get(name), Mapping)), None)
    states: Any = next((tree[name] for name in _OPTIMIZERS if isinstance(tree.get(name), Mapping | list)), [])
    several = [states] if isinstance(states, Mapping) else states
    optimizers = [SavedOptimizer(state, content, file) for state in several if _is_optimizer(state)]
    if inner is None:
        return Contents(path=path, weights=_tensors(tree, content, file))
    rest = {name: value for name, value in tree.items() if name not in (inner, *_OPTIMIZERS)}
    return Contents(path=path, weights=_tensors(tree[inner], content, file), optimizers=optimizers, extra=rest)


def _tensors(tree: Any, content: TorchFile, file: SavedFile) -> dict[str, SavedTensor]:
    found = {}
    for name, tensor in tree.items() if isinstance(tree, Mapping) else ():
        if not isinstance(tensor, torch.Tensor):
            continue
        if not tensor.is_contiguous():
            raise CheckpointError(
                f"{name!r} is not contiguous in {file.path}; save it as a safetensors file, or with .contiguous()"
            )
        found[name] = SavedTensor(name, file, content.place(tensor), tensor.dtype, tuple(tensor.shape))
    if not found:
        raise CheckpointError(f"{file.path} holds no tensors that are a model's state_dict")
    return found


def _pickled_weights(directory: Path) -> list[Path]:
    indices = sorted(directory.glob("*.bin.index.json"))
    if indices:
        try:
            names = set(json.loads(indices[0].read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{indices[0]} is no sound index of shards ({error})") from error
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"{indices[0]} names files outside of its directory; it is not read")
        return [directory / name for name in sorted(names)]
    found = [path for path in (directory / "pytorch_model.bin", directory / "adapter_model.bin") if path.is_file()]
    if not found:
        raise CheckpointError(f"{directory} holds no weights: neither millrace.json, safetensors nor pytorch_model.bin")
    return found


def _is_optimizer(state: Any) -> bool:
    return isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys()


def _rest(directory: Path) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for path in (directory / "scheduler.pt", directory / "scheduler.bin"):
        if path.is_file():
            found["scheduler"] = torch.load(path, weights_only=True)
    if (directory / "trainer_state.json").is_file():
        found["trainer_state"] = json.loads((directory / "trainer_state.json").read_bytes())
    return found or None
