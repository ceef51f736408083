"""What does a checkpoint of another program hold? Of transformers' Trainer, accelerate, Lightning, and plain files.

| what is given | weights | optimizers | the rest, returned as `extra` |
|---|---|---|---|
| Trainer's `checkpoint-300` | safetensors or pytorch_model.bin | optimizer.pt | scheduler, trainer_state |
| accelerate's `save_state` | the same | optimizer.bin, optimizer_1.bin | scheduler |
| Lightning's `.ckpt` | state_dict | optimizer_states | everything else in it |
| a file of torch.save | itself, or its model_state_dict or model | optimizer_state_dict, optimizer | everything else |
| what PEFT saved, alone or of Trainer | its adapters, in directories of their names | optimizer.pt | as above |
| a safetensors file, index or directory | all | none | None |
"""

import functools
import json
from collections.abc import Mapping
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.checkpoint.contents import Contents
from headrace.checkpoint.model import EXTRA_STATE
from headrace.errors import CheckpointError
from headrace.memory.disk.checkpoint_files import tensors_in
from headrace.memory.disk.saved_file import SavedFile
from headrace.memory.disk.torch_files import open_torch_file, plain_values

__all__ = ["foreign_contents"]

_WEIGHTS = ("state_dict", "model_state_dict", "model")  # keys of weights in files of torch.save
_ADAPTER = "adapter_model"  # a file of PEFT's, without its suffix
_OPTIMIZERS = ("optimizer_states", "optimizer_state_dict", "optimizer")


def foreign_contents(path: Path, stack: ExitStack) -> Contents:
    """What is in `path`. Its files are open until `stack` ends. Raises CheckpointError if it is none of these kinds."""

    @functools.cache
    def opened(name: str) -> SavedFile:
        return stack.enter_context(closing(SavedFile(Path(name))))

    is_adapter = path.name.startswith(f"{_ADAPTER}.")
    if path.is_file() and not path.name.endswith((".safetensors", ".json")) and not is_adapter:
        return _torch_checkpoint(opened(str(path)))
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a checkpoint's directory, or its file")
    if path.is_file() and is_adapter:
        return Contents(path=path.parent, weights={}, adapters={"": tensors_in(path, opened)})
    adapters = {} if path.is_file() else _adapters(path)
    weights = {} if adapters else tensors_in(path, opened)
    optimizers = []
    for file in [path / "optimizer.pt", *sorted(path.glob("optimizer*.bin"), key=lambda file: (len(file.name), file))]:
        if file.is_file():
            optimizers.append(open_torch_file(opened(str(file))))
    return Contents(
        path=path,
        weights=weights,
        adapters={name: tensors_in(file, opened) for name, file in adapters.items()},
        optimizers=optimizers,
        extra=_rest(path),
    )


def _adapters(directory: Path) -> dict[str, Path]:
    """The file of each adapter of PEFT, by its directory; empty if there are other weights."""
    weights = [path for name in ("*.safetensors", "pytorch_model*.bin") for path in directory.glob(name)]
    if any(not path.name.startswith(_ADAPTER) for path in weights):
        return {}
    found = {}
    for place in (directory, *sorted(path for path in directory.iterdir() if path.is_dir())):
        files = [place / f"{_ADAPTER}{suffix}" for suffix in (".safetensors", ".bin")]
        file = next((file for file in files if file.is_file()), None)
        if file is not None:
            found["" if place == directory else place.name] = file
    return found


def _torch_checkpoint(file: SavedFile) -> Contents:
    content = open_torch_file(file)
    path, tree = file.path, content.tree
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{path} holds a {type(tree).__name__}, and no state_dict")
    inner = next((name for name in _WEIGHTS if isinstance(tree.get(name), Mapping)), None)
    states: Any = next((tree[name] for name in _OPTIMIZERS if isinstance(tree.get(name), Mapping | list)), [])
    several = [states] if isinstance(states, Mapping) else states
    state = tree if inner is None else tree[inner]
    # Copies: the tensors are mapped from the file, which may be overwritten while they are in use.
    rest = None if inner is None else {name: tree[name] for name in tree if name not in (inner, *_OPTIMIZERS)}
    return Contents(
        path=path,
        weights=replace(content, tree={name: state[name] for name in state if not _is_module_state(name)}).places(),
        optimizers=[replace(content, tree=one) for one in several if inner is not None and _is_optimizer(one)],
        module_state=deepcopy({name: state[name] for name in state if _is_module_state(name)}),
        extra=deepcopy(rest),
    )


def _is_module_state(name: Any) -> bool:
    """Whether the name is that of a module's extra state, which `get_extra_state` gave."""
    return isinstance(name, str) and name.endswith(EXTRA_STATE)


def _is_optimizer(state: Any) -> bool:
    return isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys()


def _rest(directory: Path) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for path in (directory / "scheduler.pt", directory / "scheduler.bin"):
        if path.is_file():
            found["scheduler"] = plain_values(path.read_bytes(), path)
    state = directory / "trainer_state.json"
    if state.is_file():
        try:
            found["trainer_state"] = json.loads(state.read_bytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{state} is no sound JSON ({error})") from error
    return found or None
