"""Which models do the unit tests share, and what must an error leave as it was?"""

from typing import Any

import torch
from torch import nn

from tests.support import models


class Layer(models.Layer):
    """Two linear layers, and a parameter of its own beside them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width, width, norm=False, scaled=True)


class Decoder(models.Decoder):
    """An embedding, a positional table of its own, layers, and a head, perhaps tied."""

    def __init__(self, *, layers: int = 4, width: int = 16, vocabulary: int = 64, tied: bool = False) -> None:
        super().__init__(layers, width, vocabulary, layer=Layer, positions=8, norm=nn.LayerNorm, tied=tied)


class Snapshot:
    """What a refused `offload()` must leave alone: classes, hooks, parameters and buffers of every module."""

    def __init__(self, model: nn.Module, *, addresses: bool = True) -> None:
        self._model = model
        self._addresses = addresses
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._facts = self._look()

    def assert_unchanged(self) -> None:
        """The same objects, of the same type, over the same memory, with the same values."""
        now = self._look()
        assert list(now) == list(self._facts)
        for name, fact in now.items():
            assert fact == self._facts[name], f"{name}: {fact}, before {self._facts[name]}"

    def _look(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for name, module in self._model.named_modules():
            hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("hooks")}
            facts[f"module {name!r}"] = type(module), sorted(vars(module)), hooks
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            facts[f"parameter {name!r}"] = (
                id(parameter),
                type(parameter),
                sorted(vars(parameter)),
                self._contents(parameter),
            )
            assert self._parameters[name] is parameter, f"{name} is another object"
        for name, buffer in self._model.named_buffers():
            facts[f"buffer {name!r}"] = id(buffer), self._contents(buffer)
        return facts

    def _contents(self, tensor: torch.Tensor) -> Any:
        facts = (tensor.device, tensor.dtype, tensor.requires_grad, tensor._backward_hooks)
        if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
            return facts
        if isinstance(tensor, nn.parameter.UninitializedParameter):
            return facts
        address = tensor.data_ptr() if self._addresses else 0
        return *facts, address, tensor.stride(), tensor.detach().cpu().tolist()
