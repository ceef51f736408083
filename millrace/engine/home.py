"""What is the parameter that a user sees? Its home: a host tensor that notices when it may have been written to.

`p.data.copy_()`, `p.data.mul_()` and `p.data = t` leave no trace in `_version`, and EMA swaps and LoRA merges write so.
A home is therefore a Parameter whose `data` tells whoever manages it. The class is put on the user's own Parameter
object and taken off again, so optimizers and ties that refer to the object stay right.
"""

from typing import Any, Protocol

import torch
from torch import nn

from millrace.runtime.pending import OWNER

__all__ = ["Home", "Leaf", "Owner", "as_home", "as_parameter", "owner_of", "raw_data"]

_data: Any = torch._C.TensorBase.data  # the property that nn.Parameter inherits


class Owner(Protocol):
    """Who manages a home."""

    def touch(self) -> None:
        """The home's data is about to be handed out or re-pointed."""

    def wait_for_updates(self) -> None:
        """The host waits until no optimizer writes the home any more."""


class Home(nn.Parameter):
    """A managed parameter. It behaves as nn.Parameter does; its copies and pickles are plain parameters."""

    @property
    def data(self) -> torch.Tensor:
        owner_of(self).touch()
        return raw_data(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        owner_of(self).touch()
        _data.__set__(self, value)

    def point(self, value: torch.Tensor) -> None:
        """`self.data = value`, unnoticed."""
        _data.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            owner_of(self).wait_for_updates()
            copied = raw_data(self).clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        owner_of(self).wait_for_updates()
        plain = nn.Parameter(raw_data(self), self.requires_grad)
        plain.__dict__.update({name: value for name, value in self.__dict__.items() if name != OWNER})
        return plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        owner_of(self).wait_for_updates()
        return nn.Parameter(raw_data(self), self.requires_grad).__repr__()


class Leaf(nn.Parameter):
    """What a module computes with. Its `data` notices that it was handed out: the module may write to its weight."""

    handed_out: bool

    @property
    def data(self) -> torch.Tensor:
        self.handed_out = True
        return raw_data(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.handed_out = True
        _data.__set__(self, value)

    def point(self, value: torch.Tensor) -> None:
        """`self.data = value`, unnoticed."""
        _data.__set__(self, value)


def as_home(parameter: nn.Parameter, owner: Owner) -> Home:
    """Makes the object itself a home of `owner`."""
    parameter.__class__ = Home
    parameter.__dict__[OWNER] = owner
    return parameter  # type: ignore[return-value]


def as_parameter(home: nn.Parameter) -> nn.Parameter:
    """The inverse of `as_home`."""
    home.__dict__.pop(OWNER, None)
    home.__class__ = nn.Parameter
    return home


def owner_of(home: Home) -> Any:
    """The Owner that was given to `as_home`."""
    return home.__dict__[OWNER]


def raw_data(parameter: nn.Parameter) -> torch.Tensor:
    """`parameter.data`, unnoticed."""
    return _data.__get__(parameter)  # type: ignore[no-any-return]
