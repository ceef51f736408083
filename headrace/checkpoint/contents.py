"""What does a checkpoint hold, and where does each tensor of it lie? One of ours, or one of another program.

| what is given | weights | optimizers | the rest, returned as `extra` |
|---|---|---|---|
| Trainer's `checkpoint-300` | safetensors or pytorch_model.bin | optimizer.pt | scheduler, trainer_state |
| accelerate's `save_state` | the same | optimizer.bin, optimizer_1.bin | scheduler |
| Lightning's `.ckpt` | state_dict | optimizer_states | everything else in it |
| a file of torch.save | itself, or its model_state_dict or model | optimizer_state_dict, optimizer | everything else |
| what PEFT saved, alone or with Trainer | its adapters, in directories of their names | optimizer.pt | as above |
| a safetensors file, index or directory | all | none | None |
"""

import functools
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.checkpoint.manifest import EXTRA, EXTRA_STATE, MANIFEST, read_manifest
from headrace.errors import CheckpointError
from headrace.memory.disk.checkpoint_files import tensors_in
from headrace.memory.disk.safetensors_header import read_header
from headrace.memory.disk.saved_file import SavedFile, TensorInFile
from headrace.memory.disk.torch_files import TorchFile, open_torch_file, plain_values

_WEIGHTS = ("state_dict", "model_state_dict", "model")  # keys of weights in files of torch.save
_ADAPTER = "adapter_model"  # a file of PEFT's, without its suffix
_OPTIMIZERS = ("optimizer_states", "optimizer_state_dict", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What there is to load from the files of `path`."""

    path: Path
    weights: Mapping[str, TensorInFile]  # by name in the model
    adapters: Mapping[str, Mapping[str, TensorInFile]] = field(default_factory=dict)  # adapters of PEFT, by directory
    shared: Mapping[str, str] = field(default_factory=dict)  # by further name of a tensor: the saved name
    trained_only: bool = False  # whether weights that are not trained were left out
    optimizers: Sequence[TorchFile] = ()  # their trees are the state_dicts
    module_state: Mapping[str, Any] = field(default_factory=dict)
    random: Mapping[str, Any] | None = None
    passes: Sequence[Any] = ()  # of each handle on the model, what it knew of its passes
    extra: Any = None


def contents_of(path: Path, stack: ExitStack) -> Contents:
    """What is in `path`. Its files are open until `stack` ends. Raises CheckpointError if it is of no kind above."""
    is_own = any((path / name).exists() for name in (MANIFEST, EXTRA))
    return _own(path, stack) if is_own else _foreign(path, stack)


def _own(directory: Path, stack: ExitStack) -> Contents:
    manifest = read_manifest(directory)

    @functools.cache
    def opened(name: str) -> SavedFile:
        return stack.enter_context(closing(SavedFile(directory / name, manifest.files[name].checksums)))

    rest = plain_values(opened(EXTRA).bytes(), directory / EXTRA)
    if not isinstance(rest, dict) or not {"module_state", "random", "extra"} <= rest.keys():
        raise CheckpointError(f"{directory / EXTRA} does not hold what {MANIFEST} says; load another checkpoint")
    if not isinstance(rest["module_state"], dict) or not isinstance(rest["random"], dict | None):
        raise CheckpointError(f"{directory / EXTRA} does not hold states by name; load another checkpoint")
    tensors = {
        (name, tensor.name): tensor
        for name in {file for file, _ in manifest.weights.values()}
        for tensor in read_header(opened(name))
    }
    weights = {}
    for name, (file, there) in manifest.weights.items():
        if (file, there) not in tensors:
            raise CheckpointError(f"{directory / file} lacks {there!r}, which {MANIFEST} says is in it")
        weights[name] = replace(tensors[file, there], name=name)
    return Contents(
        path=directory,
        weights=weights,
        shared=manifest.shared,
        trained_only=manifest.trained_only,
        optimizers=[open_torch_file(opened(name)) for name in manifest.optimizers],
        module_state=rest["module_state"],
        random=rest["random"],
        passes=rest["passes"] if isinstance(rest.get("passes"), list) else (),
        extra=rest["extra"],
    )


def _foreign(path: Path, stack: ExitStack) -> Contents:
    @functools.cache
    def opened(name: str) -> SavedFile:
        return stack.enter_context(closing(SavedFile(Path(name))))

    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a checkpoint's directory, or its file")
    adapters = _adapters(path)
    if path.is_file() and not adapters and not path.name.endswith((".safetensors", ".json")):
        return _torch_checkpoint(opened(str(path)))
    files = [path / "optimizer.pt", *sorted(path.glob("optimizer*.bin"), key=lambda file: (len(file.name), file))]
    return Contents(
        path=path.parent if path in adapters.values() else path,
        weights={} if adapters else tensors_in(path, opened),
        adapters={name: tensors_in(file, opened) for name, file in adapters.items()},
        optimizers=[open_torch_file(opened(str(file))) for file in files if file.is_file()],
        extra=_rest(path),
    )


def _adapters(path: Path) -> dict[str, Path]:
    """The file of each adapter of PEFT, by its directory; empty if there are other weights."""
    if path.is_file():
        return {"": path} if path.name.startswith(f"{_ADAPTER}.") else {}
    weights = [file for name in ("*.safetensors", "pytorch_model*.bin") for file in path.glob(name)]
    if any(not file.name.startswith(_ADAPTER) for file in weights):
        return {}
    found = {}
    for place in (path, *sorted(folder for folder in path.iterdir() if folder.is_dir())):
        files = [place / f"{_ADAPTER}{suffix}" for suffix in (".safetensors", ".bin")]
        file = next((file for file in files if file.is_file()), None)
        if file is not None:
            found["" if place == path else place.name] = file
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
