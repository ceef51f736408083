"""What is in a file that `torch.save` wrote, and where in it are its tensors? Found without reading their bytes."""

import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.errors import CheckpointError
from headrace.memory.disk.saved_file import SavedFile, TensorInFile

_NAME_LENGTH_AT, _LOCAL_HEADER_BYTES = 26, 30  # of a record's header in a zip archive


@dataclass(frozen=True)
class TorchFile:
    """A file of torch.save. `tree` is what was saved, or a part of it; its tensors are mapped from the file."""

    tree: Any
    file: SavedFile
    _first_byte: int  # the offset in the file of the byte that is mapped at `_address`
    _address: int

    def place(self, name: str, tensor: torch.Tensor) -> TensorInFile:
        """Where one of the tensors is in the file. The tensor is dense: each of its bytes belongs to one element."""
        first = tensor.data_ptr() - self._address + self._first_byte if tensor.numel() else 0
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return TensorInFile(like, name, self.file, first)

    def places(self) -> dict[str, TensorInFile]:
        """All tensors of a state_dict, by name. Raises CheckpointError if there are none, or one is not contiguous."""
        found = {}
        for name, tensor in self.tree.items() if isinstance(self.tree, Mapping) else ():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                continue
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                raise CheckpointError(
                    f"{name!r} is not contiguous in {self.file.path}, or a conjugated or negated view; save it as a"
                    " safetensors file, or with .resolve_conj().resolve_neg().contiguous()"
                )
            found[name] = self.place(name, tensor)
        if not found:
            raise CheckpointError(f"{self.file.path} holds no tensors that are a model's state_dict")
        return found


def open_torch_file(file: SavedFile) -> TorchFile:
    """Reads a file of torch.save, except its tensors' bytes, and runs no code from it. Raises CheckpointError."""
    path = file.path
    try:
        first_bytes = {first: nbytes for first, nbytes in storage_ranges(path).values() if nbytes}
        tree = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
        all_storages = [tensor.untyped_storage() for tensor in tensors_of(tree)]
    except (OSError, RuntimeError, zipfile.BadZipFile, ValueError, EOFError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no sound file of torch.save: {str(error).splitlines()[0]}") from error
    except Exception as error:  # an unpickler has errors of its own
        raise CheckpointError(f"{path} cannot be read safely: {str(error).splitlines()[0]}") from error
    storages = {storage.data_ptr(): storage.nbytes() for storage in all_storages if storage.nbytes()}
    if not storages:
        return TorchFile(tree, file, 0, 0)
    # The file is mapped as a whole: storages lie as far from each other as in the file.
    address, first = min(storages), min(first_bytes, default=0)
    if {begin - address + first: nbytes for begin, nbytes in storages.items()} != first_bytes:
        raise CheckpointError(f"the tensors of {path} do not lie as torch.save lays them out; save it anew")
    return TorchFile(tree, file, first, address)


def storage_ranges(path: Path) -> dict[str, tuple[int, int]]:
    """The first byte and the number of bytes of each storage in the file, by its key: "0", "1", ...

    Such a file is a zip archive with uncompressed records.
    """
    ranges = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        _check_stored(archive)
        for record in archive.infolist():
            _, found, key = record.filename.partition("/data/")
            if found:
                file.seek(record.header_offset + _NAME_LENGTH_AT)
                name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
                first = record.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
                ranges[key] = first, record.file_size
    return ranges


def _check_stored(archive: zipfile.ZipFile) -> None:
    """Raises BadZipFile for compressed records, which could expand to any size: torch.save compresses none."""
    packed = next((one.filename for one in archive.infolist() if one.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise zipfile.BadZipFile(f"its record {packed!r} is compressed")


def plain_values(data: bytes, path: Path) -> Any:
    """What `torch.save` wrote to a small file: plain values and tensors only. Raises CheckpointError."""
    try:
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                _check_stored(archive)
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # an unpickler has errors of its own
        raise CheckpointError(f"{path} cannot be read safely: {str(error).splitlines()[0]}") from error


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors of nested dicts, lists and tuples."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in tensors_of(value)]
    if isinstance(tree, list | tuple):
        return [tensor for value in tree for tensor in tensors_of(value)]
    return []
