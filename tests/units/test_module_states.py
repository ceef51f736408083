"""What counts as a change of what modules have noted?"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from headrace.weights.passes.module_states import ModuleStates


def scaled(factor: float) -> Callable[..., torch.Tensor]:
    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * factor

    return hook


def itself() -> Callable[..., None]:
    def hook(*_: Any) -> None:
        hook.__doc__ = ""

    return hook


def put_on(*makes: Callable[[], Any]) -> Callable[[nn.Module], None]:
    """Hooks of a module are exchanged for these."""

    def write(module: nn.Module) -> None:
        module._forward_hooks.clear()
        for make in makes:
            module.register_forward_hook(make())

    return write


def note(make: Callable[[], Any]) -> Callable[[nn.Module], None]:
    return lambda module: setattr(module, "noted", make())


@pytest.mark.parametrize(
    ("before", "after", "is_changed"),
    [
        (put_on(lambda: scaled(2.0)), put_on(lambda: scaled(2.0)), False),
        (put_on(lambda: scaled(2.0)), put_on(lambda: scaled(3.0)), True),
        (put_on(lambda: scaled(2.0)), put_on(lambda: scaled(2.0), lambda: scaled(2.0)), True),
        (put_on(lambda: scaled(2.0), lambda: scaled(3.0)), put_on(lambda: scaled(3.0), lambda: scaled(2.0)), True),
        (put_on(itself), put_on(itself), True),  # encloses another function each time: not known to be the same
        (note(lambda: partial(scaled, 2.0)), note(lambda: partial(scaled, 2.0)), False),
        (note(lambda: partial(scaled, 2.0)), note(lambda: partial(scaled, factor=2.0)), True),
        (note(lambda: [1, 2]), note(lambda: [1, 2]), False),
        (note(lambda: [1, 2]), note(lambda: [2, 1]), True),
        (note(lambda: {"a": 1}), note(lambda: {"b": 1}), True),
        (note(lambda: 1), note(lambda: True), True),
        (note(lambda: None), lambda module: delattr(module, "noted"), True),
    ],
)
def test_change(before: Callable[[nn.Module], None], after: Callable[[nn.Module], None], is_changed: bool) -> None:
    module = nn.Linear(2, 2)
    before(module)
    states = ModuleStates(module.named_modules())
    assert states.changed_attribute() is None
    after(module)
    assert (states.changed_attribute() is not None) == is_changed
