"""Which weights are a PEFT model's adapters, and what are their names in the files that PEFT writes?

`adapter_model.safetensors` has one adapter, without its name: `lora_A.weight` for `lora_A.default.weight`.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headrace.checkpoint.contents import Contents
from headrace.errors import CheckpointError
from headrace.memory.disk import TensorInFile

_PREFIX = "base_model.model."  # names have no such prefix if transformers' own `add_adapter` made the adapter


def adapter_names(model: Any, adapter: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The names in the model, by name in the adapter's file. Raises CheckpointError for a tensor that PEFT computes."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    found = sys.modules["peft"].get_peft_model_state_dict(
        model, state_dict=dict(tensors), adapter_name=adapter, save_embedding_layers=False
    )
    computed = next((there for there, tensor in found.items() if id(tensor) not in names), None)
    if computed is not None:
        raise CheckpointError(
            f"PEFT saves {computed!r} of adapter {adapter!r} as something that is not in the model; save and load this"
            " kind of adapter with its own save_pretrained and load_adapter"
        )
    return {there: names[id(tensor)] for there, tensor in found.items()}


def with_names_of(contents: Contents, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Contents:
    """`contents` with its adapters as weights of the model. Raises CheckpointError if the model lacks them."""
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        raise CheckpointError(
            f"{contents.path} holds adapters of PEFT, and the model has none; put them on first (peft.get_peft_model)"
        )
    weights: dict[str, TensorInFile] = {}
    for directory, saved in contents.adapters.items():
        adapter = directory or _only(contents, model, adapters)
        if adapter not in adapters:
            raise CheckpointError(
                f"{contents.path} holds an adapter {adapter!r}, and the model has {sorted(adapters)}; add it to the"
                " model, or give the path of another one's directory"
            )
        names = adapter_names(model, adapter, tensors)
        weights |= {_name(there, names, tensors): one for there, one in saved.items()}
        lacking = [there for there, name in names.items() if name not in weights]
        if lacking:
            raise CheckpointError(
                f"{contents.path} lacks {lacking[0]!r} (and {len(lacking) - 1} more) of adapter {adapter!r}; load it"
                " into the model that was saved"
            )
    return replace(contents, weights=weights, trained_only=True)


def _only(contents: Contents, model: Any, adapters: Mapping[str, Any]) -> str:
    """The name of the adapter whose file has no directory of its own, as Trainer chooses it."""
    if contents.path.name in adapters:
        return contents.path.name
    if "default" in adapters and len(contents.adapters) > 1:
        return "default"
    active = model.active_adapters
    return str((active() if callable(active) else active)[0])


def _name(there: str, names: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    """The name in the model. Embeddings, which PEFT saves when they were resized, have the model's name already."""
    bare = there.removeprefix(_PREFIX)
    return names.get(there) or names.get(bare) or (there if there in tensors else bare)
