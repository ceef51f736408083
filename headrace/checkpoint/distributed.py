"""How is a checkpoint of torch.distributed.checkpoint loaded? By its own reader, in place, however many ranks wrote it.

PyTorch's own reader unpickles `.metadata`, and its planner unpickles values that are not tensors: both would call
whatever a file names. Here, these pickles may name only data. Saving needs no code: `dcp.save(get_state_dict(model,
optimizer))` works with an offloaded model as with any other.
"""

import importlib
import io
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from headrace.checkpoint.manifest import EXTRA_STATE
from headrace.errors import CheckpointError
from headrace.runtime.tensors import parameters_of

# The optimizer's prefix, a parameter's number or name, an entry.
_OPTIMIZERS = re.compile(r"(.*\.)?state\.(.+)\.([^.]+)")
_METADATA = "torch.distributed.checkpoint.metadata"
_NAMED = {
    _METADATA: {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "collections": {"OrderedDict"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
}


def load_distributed(
    path: Path,
    state: Mapping[str, torch.Tensor],
    optimizers: Sequence[Optimizer],
    is_written: AbstractContextManager[None],
) -> None:
    """Loads into the tensors of a model's state_dict, and into one optimizer; they change within `is_written`.

    Raises CheckpointError if they do not fit.
    """
    found = _DataReader(path).read_metadata().state_dict_metadata
    besides = next((key for key in found if EXTRA_STATE in key), None)
    if besides is not None:
        raise CheckpointError(
            f"{path} holds {besides!r}, which a module keeps besides its tensors; load it with"
            " torch.distributed.checkpoint's own call"
        )
    weights = _weights(path, state, found)
    if len(optimizers) > 1:
        raise CheckpointError(f"{path}: load the optimizers one by one, with torch.distributed.checkpoint's own call")
    besides_weights = {key: one for key, one in found.items() if key not in weights}
    places = _places_in(optimizers[0], path, state, besides_weights) if optimizers else {}
    file_bytes = sum(file.stat().st_size for file in path.iterdir())
    wanted = {**weights, **{key: _memory_for(path, file_bytes, key, found[key]) for key in places}}
    with is_written:
        try:
            with torch.no_grad():
                load(wanted, storage_reader=_DataReader(path), planner=_DataPlanner(), no_dist=True)
        except (OSError, RuntimeError, ValueError, pickle.UnpicklingError, CheckpointException) as error:
            raise CheckpointError(f"{path} could not be read: {str(error).splitlines()[0]}") from error
        for optimizer in optimizers:
            loaded: dict[str, Any] = {
                "state": defaultdict(dict),
                "param_groups": optimizer.state_dict()["param_groups"],
            }
            for key, (part, number, name) in places.items():
                loaded[part][number][name] = wanted[key]
            optimizer.load_state_dict({**loaded, "state": dict(loaded["state"])})


def _weights(path: Path, state: Mapping[str, torch.Tensor], found: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    first = next(iter(state))
    prefixes = [key[: -len(first)] for key in found if key == first or key.endswith(f".{first}")]
    for prefix in prefixes:
        if any(not isinstance(found.get(prefix + name), TensorStorageMetadata) for name in state):
            continue
        other = [name for name, tensor in state.items() if found[prefix + name].size != tensor.shape]
        if other:
            raise CheckpointError(
                f"{other[0]!r} has the shape {tuple(found[prefix + other[0]].size)} in {path}, and"
                f" {tuple(state[other[0]].shape)} in the model; load it into the model that was saved"
            )
        return {prefix + name: tensor for name, tensor in state.items()}
    raise CheckpointError(
        f"{path} does not hold all weights of the model, such as {first!r}; load it into the saved one"
    )


def _places_in(
    optimizer: Optimizer, path: Path, state: Mapping[str, torch.Tensor], found: Mapping[str, Any]
) -> dict[str, tuple[str, int, str]]:
    """Where each key of the checkpoint belongs in the optimizer's state_dict: a part of it, a number, a name."""
    places: dict[str, tuple[str, int, str]] = {}
    numbers = {parameter: number for number, parameter in enumerate(parameters_of(optimizer))}
    by_name = {name: numbers[tensor] for name, tensor in state.items() if tensor in numbers}
    by_name |= {str(number): number for number in numbers.values()}
    prefix = ""
    for key in found:
        match = _OPTIMIZERS.fullmatch(key)
        if match is not None and match[2] in by_name:
            prefix, places[key] = match[1] or "", ("state", by_name[match[2]], match[3])
    if not places:
        raise CheckpointError(f"{path} holds no state of an optimizer of these parameters; load the model alone")
    for number, group in enumerate(optimizer.param_groups):
        # A group's settings are under its number, or (flatten_optimizer_state_dict) under each of its parameters.
        first = [name for name, tensor in state.items() if any(tensor is one for one in group["params"][:1])]
        for name in group:
            keys = [f"{prefix}param_groups.{part}.{name}" for part in (str(number), *first)]
            for key in [key for key in keys if name != "params" and key in found][:1]:
                places[key] = "param_groups", number, name
    return places


def _memory_for(path: Path, file_bytes: int, key: str, stored: TensorStorageMetadata | BytesStorageMetadata) -> Any:
    """Memory for what is stored under `key`. Raises CheckpointError if all files together, `file_bytes`, have less."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    nbytes = math.prod(stored.size) * stored.properties.dtype.itemsize
    if nbytes > file_bytes:
        raise CheckpointError(
            f"{key!r} is of {nbytes} bytes, it says, and all files of {path} have {file_bytes}; {path} is unsound"
        )
    return torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows only what describes tensors: sizes, dtypes, places in files."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath  # the directory that it was saved to, which nobody reads
        found = getattr(importlib.import_module(module), name, None) if module in ("torch", *_NAMED) else None
        if name in _NAMED.get(module, ()) or (module == "torch" and isinstance(found, torch.dtype)):
            return found
        raise CheckpointError(f"it names {module}.{name}, which is no description of tensors; it is not read")


class _DataReader(FileSystemReader):
    """PyTorch's own reader of the directory `path`, with a metadata file that may only describe."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = path / ".metadata"

    def read_metadata(self, *args: Any, **settings: Any) -> Metadata:
        """Reads the metadata. Raises CheckpointError if it holds more than a description, or leads outside."""
        try:
            metadata = _Unpickler(io.BytesIO(self._file.read_bytes())).load()
        except Exception as error:  # unpicklers raise errors of many kinds
            raise CheckpointError(f"{self._file} cannot be read safely: {str(error).splitlines()[0]}") from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise CheckpointError(f"{self._file} is no description of a checkpoint")
        for place in metadata.storage_data.values():
            if PurePosixPath(place.relative_path).name != place.relative_path:
                raise CheckpointError(
                    f"{self._file} names {place.relative_path!r}, which leads out of the checkpoint; it is not read"
                )
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _DataPlanner(DefaultLoadPlanner):
    """PyTorch's own planner, which takes only plain values beside tensors. Raises UnpicklingError for anything else."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
