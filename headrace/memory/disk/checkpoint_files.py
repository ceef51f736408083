"""Which files make up a checkpoint? One file, the shards of an index, or all of a directory; none from elsewhere."""

import json
from collections.abc import Callable
from pathlib import Path

from headrace.errors import CheckpointError
from headrace.memory.disk.safetensors_header import read_header
from headrace.memory.disk.saved_file import SavedFile, TensorInFile
from headrace.memory.disk.torch_files import open_torch_file

_Files = dict[Path, frozenset[str] | None]  # the tensors to take from each file; None: all of them

_ZIP = b"PK\x03\x04"
_INDICES = ("*.safetensors.index.json", "*.bin.index.json")
_WEIGHTS = ("*.safetensors", "pytorch_model.bin")


def tensors_in(path: Path, opened: Callable[[str], SavedFile]) -> dict[str, TensorInFile]:
    """The tensors of the weights in `path`, by name: from safetensors files, or else from files of torch.save.

    `path` is a file, an index, or a directory with one index or with files; `opened` opens them. Every header is
    checked in full. Raises CheckpointError if something is wrong or missing, or leads out of the directory.
    """
    tensors: dict[str, TensorInFile] = {}
    for path_there, names in _find_files(path).items():
        file = opened(str(path_there))
        if file.peek(0, len(_ZIP)) == _ZIP or file.path.suffix == ".bin":  # a file of torch.save
            here = open_torch_file(file).places()
        else:
            here = {tensor.name: tensor for tensor in read_header(file)}
        missing = sorted(names - here.keys()) if names is not None else []
        if missing:
            raise CheckpointError(
                f"{file.path} lacks {missing[0]!r} (of {len(missing)} missing ones), which the index says is in it;"
                " download the checkpoint again"
            )
        for name in here if names is None else names:
            if name in tensors:
                raise CheckpointError(
                    f"{name!r} is in {tensors[name].path} and in {file.path}; give the path of one of the files"
                )
            tensors[name] = here[name]
    return tensors


def _find_files(path: Path) -> _Files:
    path = path.expanduser()
    if path.is_dir():
        indices = next(filter(None, (sorted(path.glob(pattern)) for pattern in _INDICES)), [])
        if len(indices) > 1:
            names = ", ".join(index.name for index in indices)
            raise CheckpointError(f"{path} has {len(indices)} indices ({names}); give the path of one of them")
        if indices:
            return _indexed(indices[0])
        found = next(filter(None, (sorted(path.glob(pattern)) for pattern in _WEIGHTS)), [])
        files = [_inside(path, file.name) for file in found]
        if not files:
            raise CheckpointError(
                f"{path} has no safetensors file and no pytorch_model.bin; give a directory with one, or save the model"
                " again"
            )
        return dict.fromkeys(files)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; give a safetensors file, its index, or their directory")
    return _indexed(path) if path.name.endswith(".json") else {path.resolve(): None}


def _indexed(index: Path) -> _Files:
    try:
        found = json.loads(index.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{index} is no sound JSON ({error}); download or save it again") from error
    weights = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights.values()):
        raise CheckpointError(f"{index} has no weight_map of tensors and files; download or save it again")
    return {
        _inside(index.parent, name): frozenset(tensor for tensor, file in weights.items() if file == name)
        for name in sorted(set(weights.values()))
    }


def leads_out(directory: Path, file: Path) -> bool:
    """Whether a file, after all links, is outside of the directory. The hub's cache has files beside its snapshots."""
    home = directory.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    return not any(file.resolve().is_relative_to(place) for place in allowed)


def _inside(directory: Path, name: str) -> Path:
    """The real path of a file in the directory. Raises CheckpointError if it leads out, or is missing."""
    path = (directory / name).resolve()
    if Path(name).name != name or leads_out(directory, path):
        raise CheckpointError(f"{name!r} of the checkpoint in {directory} leads out of it, to {path}; it is not read")
    if not path.is_file():
        raise CheckpointError(f"{directory} lacks {name!r}, a part of its checkpoint; download it again")
    return path
