"""How is a checkpoint of torch.distributed.checkpoint read so that nothing in it can run? Its pickles name data alone.

PyTorch's own reader unpickles `.metadata`, and its planner unpickles values that are not tensors: both would call
whatever a file names.
"""

import importlib
import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from headrace.errors import CheckpointError

__all__ = ["DataPlanner", "DataReader"]

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


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows only what describes tensors: sizes, dtypes, places in files."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath  # the path of the directory in which it was saved, which nobody reads
        found = getattr(importlib.import_module(module), name, None) if module in ("torch", *_NAMED) else None
        if name in _NAMED.get(module, ()) or (module == "torch" and isinstance(found, torch.dtype)):
            return found
        raise CheckpointError(f"it names {module}.{name}, which is no description of tensors; it is not read")


class DataReader(FileSystemReader):
    """PyTorch's own reader of the directory `path`, with a metadata file that can only describe."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = path / ".metadata"

    def read_metadata(self, *args: Any, **settings: Any) -> Metadata:
        """Reads the metadata. Raises CheckpointError if it is not only a description, or leads out of the directory."""
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


class DataPlanner(DefaultLoadPlanner):
    """PyTorch's own planner, which takes only plain values beside tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Loads a plain value. Raises UnpicklingError for anything else."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
