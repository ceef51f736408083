"""How does a saved model come from its directory without being held in RAM? As mapped files, then offloaded."""

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.api import Offloaded, offload
from millrace.errors import CheckpointError
from millrace.integrations.diffusers import open_component
from millrace.memory.disk import Checkpoint, TensorsOnDisk
from millrace.memory.ledger import Ledger
from millrace.weights.model.compound import is_compound

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from millrace.integrations.trainer import MillraceCallback, optimizer_cls_and_kwargs

__all__ = ["MillraceCallback", "from_pretrained", "open_pretrained", "optimizer_cls_and_kwargs"]


def __getattr__(name: str) -> Any:
    """What is for the Trainer, which is not imported before."""
    if name not in ("MillraceCallback", "optimizer_cls_and_kwargs"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from millrace.integrations import trainer

    return getattr(trainer, name)


def from_pretrained(
    path_or_config: "str | os.PathLike[str] | PreTrainedConfig", *, trainable: bool = True, **settings: Any
) -> "tuple[PreTrainedModel, Offloaded]":
    """The model that `save_pretrained` wrote to the directory `path_or_config`, and the handle of its offloading.

    Its weights are never held in host memory beside what `settings`, those of `millrace.offload`, allow: until blocks
    take their places they are mapped files. They have the dtype that they were saved in. The model is in evaluation
    mode.

    The directory of a model of diffusers (a pipeline's "unet") is taken, too; that of a whole pipeline is loaded by
    diffusers and given to `millrace.offload_pipeline`.

    For a config of transformers, the model has random weights, the ones that `torch.manual_seed` gives it without
    millrace too. With `disk`, they are drawn into files there, which need as much space as the weights for a while.

    A quantised model (bitsandbytes, torchao and others of transformers' quantisers) stays packed, on every tier.

    - `trainable`: whether parameters want gradients. False, for inference and adapters: no room is kept for them.
      Quantised weights never do.

    Raises CheckpointError when there is no config.json or no sound safetensors file, and what `millrace.offload`
    raises. Needs transformers.
    """
    if not isinstance(path_or_config, str | os.PathLike):
        model = _new_model(path_or_config, settings.get("disk"))
        return model, offload(model.requires_grad_(trainable), **settings)
    if (model := _from_its_files(path_or_config)) is not None:
        return model, offload(_trained(model, trainable), **settings)
    model, checkpoint = open_pretrained(path_or_config, disk=settings.get("disk"))
    try:
        return model, offload(_trained(model, trainable), checkpoint=checkpoint, **settings)
    except BaseException:
        checkpoint.close()
        raise


def open_pretrained(
    path: str | os.PathLike[str], *, disk: str | os.PathLike[str] | None = None
) -> "tuple[PreTrainedModel, Checkpoint]":
    """The model whose weights are mapped files, and the files: for `millrace.offload(model, checkpoint=...)`.

    Weights that the library puts together of several in the files (experts) are written to `disk` for that.
    """
    directory = Path(path).expanduser()
    if (directory / "model_index.json").is_file():
        raise CheckpointError(
            f"{directory} is a diffusers pipeline: load it with"
            f" diffusers.DiffusionPipeline.from_pretrained({str(path)!r}) and give it to"
            " millrace.offload_pipeline(pipeline, device_memory=...), or name one of its models here, such as"
            f" {_some_component(directory)!r}"
        )
    if _is_of_diffusers(directory):
        return open_component(directory)
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json; give the directory of a transformers model")
    import transformers  # here, because it is optional and takes seconds

    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    model_class = _class_of(config)
    if model_class is None:
        raise CheckpointError(
            f"{directory / 'config.json'} names the architectures {config.architectures or []}, none of which this"
            f" transformers ({transformers.__version__}) has; install a version that does"
        )
    checkpoint = Checkpoint(directory, Ledger())
    try:
        weights = {name: checkpoint.tensor(name) for name in checkpoint.records}
        with contextlib.nullcontext() if disk is None else TensorsOnDisk(disk, made_one=checkpoint.forget_pages):
            model = model_class.from_pretrained(None, config=config, state_dict=weights, dtype="auto")
        weights.clear()
        if model.can_generate():
            _take_generation_config(model, directory)
        return model, checkpoint
    except BaseException:
        checkpoint.close()
        raise


def _trained(model: "PreTrainedModel", trainable: bool) -> "PreTrainedModel":
    """The model, whose parameters want gradients or not; packed ones cannot."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and not is_compound(parameter):
            parameter.requires_grad_(trainable)
        else:
            parameter.requires_grad_(False)
    return model


def _from_its_files(directory: str | os.PathLike[str]) -> "PreTrainedModel | None":
    """A model of torchao's, for which transformers reads the files' own headers; None for any other."""
    path = Path(directory).expanduser() / "config.json"
    quantised = json.loads(path.read_text()).get("quantization_config") if path.is_file() else None
    if quantised is None or quantised.get("quant_method") != "torchao":
        return None
    import transformers

    config = transformers.AutoConfig.from_pretrained(path.parent, local_files_only=True)
    model_class = _class_of(config) or transformers.AutoModelForCausalLM
    model: PreTrainedModel = model_class.from_pretrained(path.parent, dtype="auto", local_files_only=True)
    return model.eval()


def _is_of_diffusers(directory: Path) -> bool:
    """Whether the directory is that of one model of a diffusers pipeline."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):  # what is wrong with it transformers says
        return False
    return isinstance(config, dict) and "_diffusers_version" in config and "_class_name" in config


def _some_component(directory: Path) -> str:
    weights = sorted(directory.glob("*/*.safetensors"))
    return str(weights[0].parent if weights else directory / "unet")


def _class_of(config: "PreTrainedConfig") -> Any:
    """The class that the config's first architecture names; None when this transformers has none of that name."""
    import transformers

    return getattr(transformers, config.architectures[0], None) if config.architectures else None


def _new_model(config: "PreTrainedConfig", disk: str | os.PathLike[str] | None) -> "PreTrainedModel":
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = _class_of(config) or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ValueError(
            f"{type(config).__name__} names no architecture, and is not of a causal language model; set"
            ' config.architectures, such as ["LlamaForCausalLM"]'
        )
    with contextlib.nullcontext() if disk is None else TensorsOnDisk(disk):
        model: PreTrainedModel = model_class._from_config(config)
    return model.eval()


def _take_generation_config(model: "PreTrainedModel", directory: Path) -> None:
    from transformers import GenerationConfig

    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
