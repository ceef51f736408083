"""Are two results the same, bit for bit? Tensors, whatever holds tensors, models, and what a run gave.

Tensors are compared on the CPU, wherever they are: a test that means a device asserts that beside it.
"""

from collections.abc import Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_SEQUENCES = (list, tuple, Iterator, ValuesView)


def bits(tensor: Tensor) -> Tensor:
    """Its bytes: equal only where the signs of zeros, and NaNs, are equal too."""
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return dense.resolve_conj().contiguous().view(-1).view(torch.uint8)


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal in dtype, in shape and in every bit."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return torch.equal(bits(found.cpu()), bits(expected.cpu()))


def assert_same(found: Any, expected: Any, what: str = "result") -> None:
    """Order, names, presence and bits of whatever holds tensors; plain values by type and value.

    A list may equal a tuple.
    """
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), f"{what} is {found!r}"
        assert same(found, expected), f"{what} differs{_how(found, expected)}"
    elif isinstance(expected, Outcome):
        assert_same(vars(found), vars(expected), what)
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), f"{what}: other names"
        for name, value in expected.items():
            assert_same(found[name], value, f"{what}: {name}")
    elif isinstance(expected, _SEQUENCES):
        found, expected = list(found), list(expected)
        assert len(found) == len(expected), f"{what}: {len(found)}, not {len(expected)}"
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{what}: {index}")
    else:
        assert type(found) is type(expected), f"{what} is {found!r}, not {expected!r}"
        assert found == expected, what


def _how(found: Tensor, expected: Tensor) -> str:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f": {found.dtype} of {list(found.shape)}, not {expected.dtype} of {list(expected.shape)}"
    differ = (bits(on_cpu(found)) != bits(on_cpu(expected))).view(found.numel(), -1).any(1)
    return f" in {int(differ.sum())} of {found.numel()} elements"


def assert_same_models(model: nn.Module, expected: nn.Module, *, some_missing: bool = False) -> None:
    """Parameters, buffers and gradients by name; each parameter has a gradient, unless some are missing in both."""
    assert_same_weights(model, expected)
    assert_same_gradients(model, expected, some_missing=some_missing)
    assert_same(dict(model.named_buffers()), dict(expected.named_buffers()), "buffers")


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    """Parameters by name; those of `model`, which is or was offloaded, are on the host."""
    assert_on_host(model)
    assert_same(_named(model), _named(expected), "parameters")


def assert_same_gradients(model: nn.Module, expected: nn.Module, *, some_missing: bool = False) -> None:
    """By name, on the host; each parameter has one, unless some are missing in both."""
    assert_on_host(model)
    gradients = gradients_of(expected)
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert some_missing or not missing, f"no gradients of {missing}"
    assert_same(gradients_of(model), gradients, "gradients")


def assert_on_host(model: nn.Module) -> None:
    """Parameters and gradients are where users look for them: on the CPU."""
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cpu", name
        assert parameter.grad is None or parameter.grad.device.type == "cpu", f"the gradient of {name}"


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """As they are now, where they are now."""
    return {name: parameter.grad for name, parameter in _named(model).items()}


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """As they are called without the modules that torch.compile() puts around others."""
    return {name.replace("_orig_mod.", ""): parameter for name, parameter in model.named_parameters()}


def on_cpu(value: Any) -> Any:
    """A copy that nothing changes later, of a tensor, or of what lists and dicts hold."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: on_cpu(item) for name, item in value.items()}
    if isinstance(value, _SEQUENCES):
        return [on_cpu(item) for item in value]
    return value


@dataclass
class Outcome:
    """What must not depend on offloading; all on the CPU."""

    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)  # of each step
    parameters: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[Any, Any] = field(default_factory=dict)  # its state

    def read(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> "Outcome":
        """Takes over parameters and state."""
        self.parameters = on_cpu(dict(model.named_parameters()))
        self.state = on_cpu(model.state_dict())
        self.optimizer = {} if optimizer is None else on_cpu(optimizer.state_dict()["state"])
        return self

    def read_gradients(self, model: nn.Module) -> "Outcome":
        """Takes over the gradients of one step."""
        self.gradients.append(on_cpu(gradients_of(model)))
        return self
