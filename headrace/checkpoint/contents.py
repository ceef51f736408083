"""What does a checkpoint hold, and where does each tensor of it lie?"""

import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.checkpoint.manifest import EXTRA, MANIFEST, read_manifest
from headrace.errors import CheckpointError
from headrace.memory.disk.safetensors_header import read_header
from headrace.memory.disk.saved_file import SavedFile, TensorInFile
from headrace.memory.disk.torch_files import TorchFile, open_torch_file, plain_values

__all__ = ["Contents", "own_contents"]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What there is to load from the files of `path`."""

    path: Path
    weights: Mapping[str, TensorInFile]  # by name in the model
    adapters: Mapping[str, Mapping[str, TensorInFile]] = field(default_factory=dict)  # adapters of PEFT, by directory
    shared: Mapping[str, str] = field(default_factory=dict)  # further names of a tensor: the saved name
    trained_only: bool = False  # whether weights that are not trained were left out
    optimizers: Sequence[TorchFile] = ()  # their trees are the state_dicts
    module_state: Mapping[str, Any] = field(default_factory=dict)
    random: Mapping[str, Any] | None = None
    extra: Any = None


def own_contents(directory: Path, stack: ExitStack) -> Contents:
    """What a checkpoint of `headrace.save` holds. Its files are open until `stack` ends. Raises CheckpointError."""
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
        extra=rest["extra"],
    )
