"""How does a saved model come from its directory without being held in RAM? As mapped files, then offloaded."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.api import Offloaded, offload
from headrace.config import check_flag, directory_of, how_to_download, path_of
from headrace.errors import CheckpointError
from headrace.integrations.diffusers import open_component
from headrace.integrations.kv_cache import offload_cache
from headrace.memory.disk import Checkpoint, TensorsOnDisk
from headrace.memory.ledger import Ledger
from headrace.weights.model.compound import is_compound

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from headrace.integrations.trainer import HeadraceCallback, micro_batches_together, optimizer_cls_and_kwargs

__all__ = [
    "HeadraceCallback",
    "from_pretrained",
    "micro_batches_together",
    "offload_cache",
    "open_pretrained",
    "optimizer_cls_and_kwargs",
]

_ADAPTERS = "adapter_config.json"
_MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # in which transformers builds a model


def __getattr__(name: str) -> Any:
    """Imports what is for the Trainer when it is first used."""
    if name not in ("HeadraceCallback", "micro_batches_together", "optimizer_cls_and_kwargs"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headrace.integrations import trainer

    return getattr(trainer, name)


def from_pretrained(
    path_or_config: "str | os.PathLike[str] | PreTrainedConfig", *, trainable: bool = True, **settings: Any
) -> "tuple[PreTrainedModel, Offloaded]":
    """Loads and offloads the model that `save_pretrained` wrote to `path_or_config`; returns the model and its handle.

    `settings` are those of `headrace.offload`. Weights never take more host memory than these allow, because they stay
    memory-mapped files until placed in blocks. (Weights quantised by torchao are an exception: transformers loads them
    whole.) Weights have the dtype in which they were saved; if the files have several dtypes, they get one of them,
    preferably the config's. The model is in evaluation mode.

    `path_or_config` may also be the directory of a diffusers model (a pipeline's "unet"). To load a whole pipeline, use
    diffusers, and give the pipeline to `headrace.offload_pipeline`.

    If `path_or_config` is a transformers config, the model has random weights: the same as without headrace after the
    same `torch.manual_seed`. With `disk`, they are written to files there, which temporarily need as much space as the
    weights.

    If `path_or_config` is a directory of PEFT adapters (`headrace train --lora-rank` writes one, too), the adapters are
    put on the model that they belong to, which is loaded from the path in adapter_config.json. With `trainable`, only
    the adapters require gradients. This needs peft.

    A quantised model (from bitsandbytes, torchao and other quantisers that transformers knows) stays packed on every
    tier.

    - `trainable`: whether parameters require gradients. False is for inference and adapters: no memory is kept for
      gradients then. Quantised weights never require gradients.

    Raises CheckpointError when there is no valid config.json or safetensors file, TypeError for anything that is
    neither a directory nor a config, and what `headrace.offload` raises. Needs transformers.
    """
    check_flag(trainable, "trainable")
    disk = directory_of(settings.get("disk"))
    if not isinstance(path_or_config, str | os.PathLike):
        model = _new_model(path_or_config, disk)
        return model, offload(model.requires_grad_(trainable), **settings)
    directory = path_of(path_or_config, "path_or_config").expanduser()
    if (directory / _ADAPTERS).is_file() and not (directory / "config.json").is_file():
        return _with_adapters(directory, trainable=trainable, **settings)
    quantised = saved_config(directory).get("quantization_config")
    if isinstance(quantised, dict) and quantised.get("quant_method") == "torchao":
        config, model_class = _config_and_class(directory)  # only transformers reads how its tensors are built
        model = model_class.from_pretrained(directory, config=config, dtype="auto", local_files_only=True)
        return model, offload(_trained(model.eval(), trainable), **settings)
    model, checkpoint = open_pretrained(path_or_config, disk=disk)
    try:
        return model, offload(_trained(model, trainable), checkpoint=checkpoint, **settings)
    except BaseException:
        checkpoint.close()
        raise


def _with_adapters(directory: Path, *, trainable: bool, **settings: Any) -> "tuple[PreTrainedModel, Offloaded]":
    """The model that PEFT's adapters in the directory belong to, with these adapters on it."""
    base = _read_json(directory / _ADAPTERS).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{directory / _ADAPTERS} names no model that the adapters belong to; set base_model_name_or_path there to"
            " its directory"
        )
    if not (Path(base).expanduser() / "config.json").is_file():
        raise CheckpointError(
            f"{directory / _ADAPTERS} names {base!r}, which is no directory of a model; set base_model_name_or_path"
            f" there to where it is: {how_to_download(base)}"
        )
    if not any((directory / f"adapter_model.{kind}").is_file() for kind in ("safetensors", "bin")):
        raise CheckpointError(f"{directory} has no adapter_model.safetensors; save the adapters again")
    try:
        from peft import PeftModel
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{directory} holds adapters of PEFT, which is not installed; run: pip install peft"
        ) from error
    model, handle = from_pretrained(base, trainable=False, **settings)
    try:
        adapted: PreTrainedModel = PeftModel.from_pretrained(
            model, directory, is_trainable=trainable, torch_device="cpu", local_files_only=True
        )
    except BaseException:
        handle.remove()
        raise
    return adapted.eval(), handle


def open_pretrained(
    path: str | os.PathLike[str], *, disk: str | os.PathLike[str] | None = None
) -> "tuple[PreTrainedModel, Checkpoint]":
    """A model whose weights are mapped files, and these files, for `headrace.offload(model, checkpoint=...)`.

    Weights that transformers puts together from several in the files (experts) are written to `disk`.
    """
    directory, disk = path_of(path, "path").expanduser(), directory_of(disk)
    saved = saved_config(directory)
    if {"_diffusers_version", "_class_name"} <= saved.keys():
        return open_component(directory, saved)
    from transformers import GenerationConfig

    config, model_class = _config_and_class(directory)
    checkpoint = Checkpoint(directory, Ledger())
    try:
        weights = {name: checkpoint.tensor(name) for name in checkpoint.records}
        dtype = _dtype_to_load(config, checkpoint)
        with contextlib.nullcontext() if disk is None else TensorsOnDisk(disk, made_one=checkpoint.forget_pages):
            model = model_class.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
        weights.clear()
        if model.can_generate() and (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
        return model, checkpoint
    except BaseException:
        checkpoint.close()
        raise


def _trained(model: "PreTrainedModel", trainable: bool) -> "PreTrainedModel":
    """The model, whose parameters require gradients if `trainable`. Packed parameters never do."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and not is_compound(parameter):
            parameter.requires_grad_(trainable)
        else:
            parameter.requires_grad_(False)
    return model


def saved_config(directory: Path) -> dict[str, Any]:
    """The content of config.json. Raises CheckpointError if it is missing, or an entry that headrace reads is wrong."""
    if not directory.exists():
        raise CheckpointError(f"there is no directory {str(directory)!r}; {how_to_download(directory)}")
    if directory.is_file():
        raise CheckpointError(f"{directory} is a file; give the directory that it is in: {str(directory.parent)!r}")
    if (directory / "model_index.json").is_file():
        parts = [str(file.parent) for file in sorted(directory.glob("*/*.safetensors"))]
        raise CheckpointError(
            f"{directory} is a diffusers pipeline: load it with"
            f" diffusers.DiffusionPipeline.from_pretrained({str(directory)!r}) and give it to"
            " headrace.offload_pipeline(pipeline, device_memory=...), or name one of its models here, such as"
            f" {(parts or [str(directory / 'unet')])[0]!r}"
        )
    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{directory} has no config.json; give the directory of a transformers model")
    config = _read_json(file)
    for entry, (is_sound, wanted) in _ENTRIES.items():
        if entry in config and not is_sound(config[entry]):
            raise CheckpointError(f"{file} has {config[entry]!r:.80} for {entry!r}; {wanted}")
    return config


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable as JSON: {error}; download or save the model again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds {config!r:.80}, not an object with entries; save the model again")
    return config


def _is_dtype(entry: Any) -> bool:
    return entry is None or isinstance(entry, dict) or isinstance(getattr(torch, str(entry), None), torch.dtype)


def _is_list_of_names(entry: Any) -> bool:
    return entry is None or (isinstance(entry, list) and all(isinstance(name, str) for name in entry))


# For entries of config.json: the check that they must pass, and what to do if they do not.
_ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "_class_name": (lambda entry: isinstance(entry, str), 'give the name of a class, such as "UNet2DConditionModel"'),
    "architectures": (_is_list_of_names, 'give a list of names, such as ["LlamaForCausalLM"]'),
    "dtype": (_is_dtype, 'give the name of a dtype, such as "bfloat16"'),
    "torch_dtype": (_is_dtype, 'give the name of a dtype, such as "bfloat16"'),
    "quantization_config": (
        lambda entry: entry is None or isinstance(entry, dict),
        "give an object with quant_method, or leave it out where the weights are not quantised",
    ),
}


def _config_and_class(directory: Path) -> "tuple[PreTrainedConfig, type[PreTrainedModel]]":
    """The config, and the model class that it names. Raises CheckpointError if this transformers has no such class."""
    import transformers  # imported here because it is optional and takes seconds

    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except ValueError as error:  # an unknown model type, or one that comes with its own code
        raise CheckpointError(f"{directory / 'config.json'} is of no model that is read here: {error}") from error
    model_class = _class_of(config)
    if model_class is None and not config.architectures:
        raise CheckpointError(
            f"{directory / 'config.json'} names no architecture; set architectures there to the class of the model,"
            ' such as ["LlamaForCausalLM"]'
        )
    if model_class is None:
        raise CheckpointError(
            f"{directory / 'config.json'} names the architectures {config.architectures}, none of which is a model"
            f" of this transformers ({transformers.__version__}); install a version that has it, or set architectures"
            " there to the class of the model"
        )
    return config, model_class


def _class_of(config: "PreTrainedConfig") -> Any:
    """The first model class that the config names and this transformers has; None if it has none of them."""
    import transformers

    named = (getattr(transformers, str(name), None) for name in config.architectures or [])
    return next(
        (kind for kind in named if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)), None
    )


def _dtype_to_load(config: "PreTrainedConfig", checkpoint: Checkpoint) -> torch.dtype | str:
    """The config's dtype if the files have it, or else the dtype of most of their bytes. Weights of other dtypes are
    converted, and take host memory. "auto": the config's dtype, or for quantised weights the one that computes.
    """
    nbytes: Counter[torch.dtype] = Counter()
    for record in checkpoint.records.values():
        if record.dtype in _MODEL_DTYPES:
            nbytes[record.dtype] += record.nbytes
    quantised = getattr(config, "quantization_config", None) is not None
    if quantised or not nbytes or not isinstance(config.dtype, torch.dtype) or config.dtype in nbytes:
        return "auto"
    return nbytes.most_common(1)[0][0]


def _new_model(config: Any, disk: str | os.PathLike[str] | None) -> "PreTrainedModel":
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

    if not isinstance(config, PreTrainedConfig):
        raise TypeError(
            f"path_or_config is a {type(config).__name__}; give the directory of a model, or a config of transformers"
        )
    model_class = _class_of(config) or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ValueError(
            f"{type(config).__name__} names no architecture, and is not of a causal language model; set"
            ' config.architectures, such as ["LlamaForCausalLM"]'
        )
    with contextlib.nullcontext() if disk is None else TensorsOnDisk(disk):
        model: PreTrainedModel = model_class._from_config(config)
    return model.eval()
