"""Which tensors of a model are saved, in which file, and under which names? As Hugging Face's libraries have them."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace.checkpoint.adapters import adapter_names
from headrace.checkpoint.manifest import EXTRA_STATE
from headrace.checkpoint.sources import check_plain

_STATISTICS_BYTES = 1 << 20


@dataclass(kw_only=True)
class SavedModel:
    """What is saved of a model. Names are those in its state_dict."""

    files: dict[str, dict[str, str]] = field(default_factory=dict)  # by file stem: names in the model, by name there
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)  # by further name of a tensor: the saved name
    extra_state: dict[str, Any] = field(default_factory=dict)  # the extra state of modules
    trained_only: bool = False


def saved_model(model: nn.Module, directory: Path) -> SavedModel:
    """What is saved of `model`. Its configuration is written into `directory`, as its library writes it.

    Of a PEFT model, adapters and what else is trained or may change are saved. Raises CheckpointError for tensors that
    are not plain bytes (on meta, sparse, lazy).
    """
    model = unwrapped(model)
    saved = SavedModel()
    state = _state_of(model)
    saved.extra_state = {name: value for name, value in state.items() if name.endswith(EXTRA_STATE)}
    tensors = tensors_of(model)
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        _take_adapters(model, tensors, saved, directory)
    else:
        _take_all(model, tensors, saved, stem=_write_configuration(model, directory))
    return saved


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers themselves, by their names in the state_dict."""
    return {name: value for name, value in _state_of(model).items() if not name.endswith(EXTRA_STATE)}


def plain_name(name: str) -> str:
    """The name of a module or tensor without what torch.compile puts around modules."""
    return name.replace("_orig_mod.", "")


def _state_of(model: nn.Module) -> dict[str, Any]:
    return {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}


def check_model(model: object) -> None:
    """Raises TypeError if `model` is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give the nn.Module whose weights the checkpoint holds")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without the module that torch.compile puts around it."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner


def _take_all(model: nn.Module, tensors: Mapping[str, torch.Tensor], saved: SavedModel, stem: str) -> None:
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    first: dict[Any, str] = {}
    # Buffers come first in the file: a forward may write to them, so they are read before saving returns.
    # Of several names of one tensor, a name that is saved comes first.
    order = sorted(
        tensors, key=lambda name: (isinstance(tensors[name], nn.Parameter), name in tied or name in left_out)
    )
    for name in order:
        tensor = tensors[name]
        if name not in left_out:
            check_plain(name, tensor)
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        known = first.setdefault(place, name) if tensor.numel() and not tensor.is_meta else name
        if known != name:
            saved.shared[name] = known
        elif name not in left_out:
            saved.tensors[name] = tensor
    saved.shared = {name: there for name, there in saved.shared.items() if there in saved.tensors}
    saved.files = {stem: {name: name for name in saved.tensors}}


def _take_adapters(model: Any, tensors: Mapping[str, torch.Tensor], saved: SavedModel, directory: Path) -> None:
    for adapter, config in model.peft_config.items():
        within = "" if adapter == "default" else f"{adapter}/"
        (directory / within).mkdir(exist_ok=True)
        config.save_pretrained(directory / within)
        files = adapter_names(model, adapter, tensors)
        saved.files[f"{within}adapter_model"] = files
        saved.tensors |= {name: tensors[name] for name in files.values()}
    trained = [
        name
        for name, tensor in tensors.items()
        if name not in saved.tensors and (tensor.requires_grad or _may_change(tensor))
    ]
    saved.files["trained"] = {name: name for name in trained}
    saved.tensors |= {name: tensors[name] for name in trained}
    for name, tensor in saved.tensors.items():
        check_plain(name, tensor)
    saved.trained_only = True


def _may_change(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a buffer that a forward may write to; large buffers are packed weights."""
    return not isinstance(tensor, nn.Parameter) and tensor.numel() * tensor.itemsize <= _STATISTICS_BYTES


def _write_configuration(model: nn.Module, directory: Path) -> str:
    """Writes what `from_pretrained` needs beside the weights, if it can read them. Returns their file's stem."""
    transformers, diffusers = sys.modules.get("transformers"), sys.modules.get("diffusers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        with _without_progress(transformers):
            if getattr(model, "_hf_peft_config_loaded", False):  # with it, save_pretrained would save adapters alone
                model.config.save_pretrained(directory)
            else:
                model.save_pretrained(directory, state_dict={}, save_original_format=False)
        return "model"
    if diffusers is not None and isinstance(model, diffusers.ModelMixin):
        model.save_config(directory)
        return "diffusion_pytorch_model"
    return "model"


@contextlib.contextmanager
def _without_progress(transformers: Any) -> Iterator[None]:
    logging = transformers.utils.logging
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
