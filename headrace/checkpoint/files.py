"""Which files does a checkpoint consist of, and where in them does each tensor lie? Laid out before a byte is written.

Weights are in safetensors files like those of transformers, sharded by size. An optimizer's state is in the file that
`torch.save` would write of its state_dict, so `torch.load` reads it.
"""

import contextlib
import json
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.serialization import skip_data
from torch.utils import deterministic

from headrace.checkpoint.sources import NotPlainError, Source, TensorSource, check_plain, source_of
from headrace.errors import CheckpointError
from headrace.memory.disk import TensorAtRest
from headrace.memory.disk.safetensors_header import DTYPES
from headrace.memory.disk.saved_file import SavedFile
from headrace.memory.disk.torch_files import open_torch_file, storage_ranges
from headrace.runtime.tensors import map_tree

SHARD_BYTES = 5 << 30
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Layout:
    """The layout of a file: the sources of its bytes, one behind the other."""

    name: str
    sources: Sequence[Source | TensorSource]

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.sources)


def literal(name: str, data: bytes) -> Layout:
    """The layout of a small file."""
    return Layout(name, [source_of(name, data)])


def weight_files(tensors: Mapping[str, torch.Tensor], stem: str) -> tuple[list[Layout], dict[str, str]]:
    """Safetensors files of these tensors, and the file in which each tensor is.

    Shards are of 5 GiB; several come with the index that transformers reads. Without tensors, there is no file.

    Raises TypeError for a dtype that safetensors has no name for.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name!r} is of {tensor.dtype}, which safetensors files cannot hold; convert it first")
        if shards[-1] and used + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    if not tensors:
        return [], {}
    numbered = [f"-{number:05}-of-{len(shards):05}" for number in range(1, len(shards) + 1)]
    files = [
        _safetensors(f"{stem}{number if len(shards) > 1 else ''}.safetensors", shard)
        for number, shard in zip(numbered, shards, strict=True)
    ]
    places = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
    if len(files) > 1:
        total_bytes = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
        files.append(literal(f"{stem}.safetensors.index.json", json.dumps(index, indent=2).encode()))
    return files, places


def _safetensors(name: str, tensors: Mapping[str, torch.Tensor]) -> Layout:
    # The format wants elements aligned to their size: tensors of wide dtypes come first.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, tensor in ordered:
        shape = list(tensor.shape)
        if tensor.dtype is torch.float4_e2m1fn_x2:  # two values in each element: the header counts values
            shape[-1] *= 2
        end = at + tensor.nbytes
        entries[key] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = source_of(f"header of {name}", len(text).to_bytes(8, "little") + text)
    return Layout(name, [header, *(TensorSource(key, tensor, tensor) for key, tensor in ordered)])


@dataclass(frozen=True)
class Owned:
    """A part of a tree, and the parameter that it belongs to."""

    tree: Any
    owner: Any


def torch_file(name: str, tree: Any, scratch: Path) -> Layout:
    """The layout of the file that `torch.save(tree)` would write, with each TensorAtRest as a tensor.

    Every tensor has a storage of its own in it. `scratch`: a directory for a temporary file.
    """
    sources: list[Source | TensorSource] = []

    def stand_in(value: Any, path: str, owner: Any = None) -> Any:
        """New memory in the place of a tensor: it is never touched, so it takes no pages."""
        if isinstance(value, Owned):
            return map_tree(value.tree, partial(stand_in, owner=value.owner), path)
        if isinstance(value, TensorAtRest):
            sources.append(Source(path, value.nbytes, value.read, owner))
            return torch.empty_strided(value.like.shape, value.like.stride(), dtype=value.like.dtype, device="cpu")
        if isinstance(value, torch.Tensor):
            check_plain(f"{path} of {name}", value)
            if torch.ops.aten.is_non_overlapping_and_dense(value):  # saved as it lies in memory
                sources.append(TensorSource(path, value.detach().as_strided((value.numel(),), (1,)), owner))
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            sources.append(TensorSource(path, value, owner))
            return torch.empty(value.shape, dtype=value.dtype, device="cpu")
        return value

    skeleton = scratch / name

    def write() -> None:
        settings: Any = deterministic
        fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
        try:
            with skip_data():
                torch.save(map_tree(tree, stand_in), skeleton)  # leaves holes for the bytes of tensors
        finally:
            settings.fill_uninitialized_memory = fills

    try:
        # On a separate thread: `skip_data` changes a setting of one thread, and Ctrl-C does not interrupt this one.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(write).result()
        with contextlib.closing(SavedFile(skeleton)) as file:
            open_torch_file(file)
        return _with_sources(name, skeleton, sources)
    except NotPlainError:
        raise
    except (CheckpointError, pickle.PicklingError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{name} would hold what cannot be read back safely: {str(error).splitlines()[0]}; give the optimizer plain"
            " values and tensors (a NumPy number is not plain, but float(lr) is)"
        ) from error
    finally:
        skeleton.unlink(missing_ok=True)


def _with_sources(name: str, skeleton: Path, sources: Sequence[Source | TensorSource]) -> Layout:
    """The layout of the file `skeleton`, a zip archive of torch.save whose records `data/0`, ... are the tensors.

    The records are numbered in the order in which the tensors come in the tree, which is that of `sources`.
    """
    ranges = storage_ranges(skeleton)
    found: list[Source | TensorSource] = []
    end = 0
    with skeleton.open("rb") as file:
        for number, source in enumerate(sources):
            begin, nbytes = ranges[str(number)]
            if nbytes != source.nbytes:
                raise CheckpointError(
                    f"{source.name} has {source.nbytes} bytes, and torch.save of this PyTorch ({torch.__version__})"
                    f" keeps {nbytes} for it; please report it"
                )
            file.seek(end)
            found += [source_of(name, file.read(begin - end)), source]
            end = begin + nbytes
        file.seek(end)
        return Layout(name, [*found, source_of(name, file.read())])
