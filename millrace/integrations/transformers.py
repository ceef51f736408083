"""How does a transformers model come from its directory without being held in RAM? As mapped files, then offloaded."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.api import Offloaded, offload
from millrace.errors import CheckpointError
from millrace.memory.disk import Checkpoint
from millrace.memory.ledger import Ledger

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["from_pretrained", "open_pretrained"]


def from_pretrained(
    path: str | os.PathLike[str], *, trainable: bool = True, **settings: Any
) -> "tuple[PreTrainedModel, Offloaded]":
    """The model that `save_pretrained` wrote to the directory `path`, and the handle of its offloading.

    Its weights are never held in host memory beside what `settings`, those of `millrace.offload`, allow: until blocks
    take their places they are mapped files. They have the dtype that they were saved in. The model is in evaluation
    mode.

    - `trainable`: whether parameters want gradients. False, for inference and adapters: no room is kept for them.

    Raises CheckpointError when there is no config.json or no sound safetensors file, and what `millrace.offload`
    raises. Needs transformers.
    """
    model, checkpoint = open_pretrained(path)
    try:
        model.requires_grad_(trainable)
        return model, offload(model, checkpoint=checkpoint, **settings)
    except BaseException:
        checkpoint.close()
        raise


def open_pretrained(path: str | os.PathLike[str]) -> "tuple[PreTrainedModel, Checkpoint]":
    """The model whose weights are mapped files, and the files: for `millrace.offload(model, checkpoint=...)`."""
    directory = Path(path).expanduser()
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json; give the directory of a transformers model")
    import transformers  # here, because it is optional and takes seconds

    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    names = config.architectures or []
    model_class = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        raise CheckpointError(
            f"{directory / 'config.json'} names the architectures {names}, none of which this transformers"
            f" ({transformers.__version__}) has; install a version that does"
        )
    checkpoint = Checkpoint(directory, Ledger())
    try:
        weights = {name: checkpoint.tensor(name) for name in checkpoint.records}
        model = model_class.from_pretrained(None, config=config, state_dict=weights, dtype="auto")
        weights.clear()
        if model.can_generate():
            _take_generation_config(model, directory)
        return model, checkpoint
    except BaseException:
        checkpoint.close()
        raise


def _take_generation_config(model: "PreTrainedModel", directory: Path) -> None:
    from transformers import GenerationConfig

    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
