"""How does a model on the meta device get its weights? Its parameters become a checkpoint's tensors, read in place."""

import contextlib
import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace.errors import CheckpointError, LayoutError
from headrace.memory.disk import Checkpoint
from headrace.memory.ledger import Ledger
from headrace.weights.model.compound import is_compound
from headrace.weights.model.home import AliasParam


class Materialized:
    """Knows which parameters lie in the checkpoint. `undo()` gives the model its meta tensors back."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._names: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}  # by the id of the parameter
        self._undo = contextlib.ExitStack()
        self.undo = self._undo.close  # restores the model in place
        self.when_undone = self._undo.callback  # calls a function after what is put in place from now on was undone

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """The checkpoint's name of a parameter, or None if the parameter does not lie there unchanged."""
        known, name = self._names.get(id(parameter), (None, None))
        if known is not None and known() is parameter:  # an id may have been reused
            return name
        name = self.checkpoint.name_of(parameter.detach()) if isinstance(parameter, AliasParam) else None
        return None if name is None or self.checkpoint.written(name) else name

    def found(self, parameter: nn.Parameter, name: str) -> None:
        """Notes that the parameter is the checkpoint's tensor `name`."""
        self._names[id(parameter)] = weakref.ref(parameter), name

    def put(self, container: dict[str, Any], key: str, tensor: torch.Tensor) -> None:
        """Replaces an entry, until `undo`."""
        self._undo.callback(container.__setitem__, key, container[key])
        container[key] = tensor


def materialize(model: nn.Module, checkpoint: Checkpoint | Path, ledger: Ledger) -> Materialized:
    """Finds the parameters that lie in the checkpoint, and gives meta parameters theirs without reading a byte.

    A parameter that is a mapping of the checkpoint lies there, unless the mapping was written to. A meta parameter
    becomes the checkpoint's tensor of one of its names, in the checkpoint's dtype. Persistent meta buffers are read.
    Raises CheckpointError when a tensor is missing or has another shape, and LayoutError for meta buffers that no
    checkpoint has; the model is left as it was.
    """
    made = Materialized(Checkpoint(checkpoint, ledger) if isinstance(checkpoint, Path) else checkpoint)
    try:
        _parameters(model, made)
        _buffers(model, made)
    except BaseException:
        made.undo()
        raise
    return made


def _parameters(model: nn.Module, made: Materialized) -> None:
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    any_mapped = False
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_compound(parameter):  # its parts may lie there
            any_mapped = True
            continue
        if parameter.device.type == "meta":
            names[parameter].append(name)
        elif (mapped := made.checkpoint.name_of(parameter.detach())) is not None:
            any_mapped = True
            if not made.checkpoint.written(mapped):  # else its memory differs from the file
                made.found(parameter, mapped)
    if not names and not any_mapped:
        raise ValueError(
            "checkpoint is given, but no parameter of the model is on the meta device; build the model under"
            " torch.device('meta'), or leave checkpoint out"
        )
    found = {parameter: _record(made.checkpoint, own, parameter.shape) for parameter, own in names.items()}
    new: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, name in found.items():
        new[parameter] = nn.Parameter(made.checkpoint.tensor(name), requires_grad=parameter.requires_grad)
        new[parameter].__dict__.update(parameter.__dict__)
        made.found(new[parameter], name)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):  # keeps a list of its parameters
            made.when_undone(module._init_flat_weights)
        for key, held in list(module._parameters.items()):
            if held is not None and held in new:
                made.put(module._parameters, key, new[held])
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


def _buffers(model: nn.Module, made: Materialized) -> None:
    for prefix, module in model.named_modules():
        for key, buffer in list(module._buffers.items()):
            if buffer is None or buffer.device.type != "meta":
                continue
            name = f"{prefix}.{key}" if prefix else key
            if key in module._non_persistent_buffers_set:
                raise LayoutError(
                    f"buffer {name!r} is on the meta device, and no checkpoint has it, because it is not persistent;"
                    " build the model with its parameters on meta only, or use headrace.from_pretrained"
                )
            own = _record(made.checkpoint, [name], buffer.shape)
            made.put(module._buffers, key, made.checkpoint.tensor(own).clone())


def _record(checkpoint: Checkpoint, names: list[str], shape: torch.Size) -> str:
    """The first of `names` that the checkpoint has. Raises CheckpointError if its shape differs, or there is none."""
    for name in names:
        record = checkpoint.records.get(name)
        if record is None:
            continue
        if record.shape != tuple(shape):
            raise CheckpointError(
                f"{name!r} has shape {record.shape} in {record.path}, and {tuple(shape)} in the model; give the"
                " checkpoint of this model, or build the model with its config"
            )
        return name
    some = ", ".join(repr(name) for name in list(checkpoint.records)[:3])
    raise CheckpointError(
        f"the checkpoint has no tensor for parameter {names[0]!r}; it has {len(checkpoint.records)} such as {some}."
        " Names must be the model's own, as its state_dict() gives them"
    )
