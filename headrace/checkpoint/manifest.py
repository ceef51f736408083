"""What is in a checkpoint? Its manifest names every file, with a checksum for each piece; it is written last."""

import json
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from headrace.errors import CheckpointError
from headrace.memory.disk.checkpoint_files import leads_out
from headrace.memory.disk.saved_file import GRAIN_BYTES

MANIFEST = "headrace.json"
EXTRA = "extra.pt"  # the file of everything but weights and optimizers
EXTRA_STATE = "_extra_state"  # the end of the name of a module's extra state, which may be of any kind
_FORMAT = 1
_MOST_BYTES = 256 << 20  # the largest manifest: five times that of a checkpoint of 10 TB


@dataclass(frozen=True)
class FileRecord:
    """A file: its size in bytes, and the xxh3 (64 bits) of each 4 MiB of it."""

    nbytes: int
    checksums: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's contents. Names of tensors are those of `model.state_dict()`."""

    files: Mapping[str, FileRecord]
    weights: Mapping[str, tuple[str, str]]  # (file, name in it)
    shared: Mapping[str, str] = field(default_factory=dict)  # by further name of a tensor: the saved name
    trained_only: bool = False  # whether only the weights of adapters, and others that are trained, were saved
    optimizers: Sequence[str] = ()  # the file of each optimizer
    made_by: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The manifest as JSON, with a checksum of itself at the end."""
        body = asdict(self)
        body["files"] = {
            name: {"nbytes": file.nbytes, "xxh3_64": [f"{value:016x}" for value in file.checksums]}
            for name, file in self.files.items()
        }
        content = {"format": _FORMAT, "piece_bytes": GRAIN_BYTES, **body}
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError if it or a file's size is wrong, or a file is missing."""
    path = directory / MANIFEST
    try:
        content: dict[str, Any] = json.loads(_small_file(path))
        told = content.pop("checksum")
        if content["format"] != _FORMAT or content["piece_bytes"] != GRAIN_BYTES:
            raise CheckpointError(
                f"{path} is of format {content['format']}, which this headrace does not read; use what wrote it:"
                f" {content.get('made_by')}"
            )
        if told != _checksum(content):
            raise CheckpointError(f"{path} is not as it was written; {_OTHER}")
        manifest = Manifest(
            files={
                name: FileRecord(file["nbytes"], [int(value, 16) for value in file["xxh3_64"]])
                for name, file in content["files"].items()
            },
            weights={name: (file, there) for name, (file, there) in content["weights"].items()},
            shared=content["shared"],
            trained_only=content["trained_only"],
            optimizers=content["optimizers"],
            made_by=content["made_by"],
        )
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; give the directory of a checkpoint") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not as it was written ({error}); {_OTHER}") from error
    for name in manifest.files:
        if Path(name).is_absolute() or ".." in Path(name).parts or leads_out(directory, directory / name):
            raise CheckpointError(f"{path} names {name!r}, which leads out of the checkpoint; it is not read")
    _check_types(manifest, path)
    for name, file in manifest.files.items():
        if len(file.checksums) != -(-file.nbytes // GRAIN_BYTES):
            raise CheckpointError(f"{path} has {len(file.checksums)} checksums for the {file.nbytes} bytes of {name!r}")
        try:
            found = (directory / name).stat()
        except OSError as error:
            raise CheckpointError(f"{directory / name} cannot be read: {error.strerror}; {_OTHER}") from error
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{directory / name} is no file; {_OTHER}")
        if found.st_size != file.nbytes:
            raise CheckpointError(
                f"{directory / name} has {found.st_size} bytes, and {file.nbytes} were written; {_OTHER}"
            )
    return manifest


_OTHER = "load another checkpoint, or copy this one anew from where it came"


def _small_file(path: Path) -> bytes:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
        raise CheckpointError(f"{path} is no file of a checkpoint, or has more than {_MOST_BYTES} bytes; {_OTHER}")
    return path.read_bytes()


def _check_types(manifest: Manifest, path: Path) -> None:
    """Checks the types of all entries: a checksum shows damage, not malice."""
    named = {EXTRA, *(file for file, _ in manifest.weights.values()), *manifest.optimizers}
    if (
        not all(type(file.nbytes) is int and file.nbytes >= 0 for file in manifest.files.values())
        or not isinstance(manifest.shared, dict)
        or not all(isinstance(name, str) for name in (*named, *manifest.shared.values()))
        or not named <= manifest.files.keys()
    ):
        raise CheckpointError(f"{path} does not describe a checkpoint; {_OTHER}")


def _checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
