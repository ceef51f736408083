"""What is the parameter that a user sees? Its home: a host tensor that notices when it may have been written to.

`p.data.copy_()`, `p.data.mul_()` and `p.data = t` leave no trace in `_version`, and EMA swaps and LoRA merges write so.
A home is therefore a Parameter whose `data` tells whoever manages it. The class is put on the user's own Parameter
object and taken off again, so optimizers and ties that refer to the object stay right.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from headrace.errors import StateError
from headrace.runtime.autograd import (
    FunctionNode,
    data_of,
    grad_of,
    make_subclass,
    no_override,
    running_node,
    without_overrides,
)
from headrace.runtime.pending import OWNER, name_of

GONE = (
    "a weight that a pass over an offloaded model had handed out was kept, and the model is no longer offloaded; ask"
    " the module for its parameter again"
)
_MOVES = (
    "headrace moves weights by itself. Leave out what else does (p.data = p.data.to(device), fully_shard, accelerate's"
    " cpu_offload, dispatch_model and device_map, diffusers' enable_sequential_cpu_offload and group offloading), or"
    " call remove() on the handle first"
)


class PlainCopies(torch.Tensor):
    """A tensor of a class of ours in a user's hands: its copies, pickles and text are those of a plain tensor."""

    def plain(self) -> torch.Tensor:
        """A plain tensor or parameter over the same memory."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            plain = self.plain()
            copied = plain.detach().clone()
            memo[id(self)] = nn.Parameter(copied, plain.requires_grad) if isinstance(plain, nn.Parameter) else copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.plain())


class Home(PlainCopies, nn.Parameter):
    """A managed parameter. It behaves like an nn.Parameter; its copies and pickles are plain parameters."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        """Makes a plain parameter: user code calls `type(parameter)(tensor)` to replace a parameter."""
        if data is not None and data.device.type != "cpu":
            raise StateError(f"a parameter of an offloaded model would be replaced by one on {data.device}: {_MOVES}")
        return nn.Parameter(data, requires_grad)

    @property
    def data(self) -> torch.Tensor:
        owner_of(self).touch()
        return raw_data(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.device.type != "cpu":
            raise StateError(f"parameter {name_of(self)!r} of an offloaded model would go to {value.device}: {_MOVES}")
        owner = owner_of(self)
        owner.touch()
        owner.give(value)
        data_of.__set__(self, value)

    @property
    def shown(self) -> torch.Tensor:
        """The tensor that the user's module holds, and that the leaf replaces during a visit."""
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "grad" and value is None:
            owner_of(self).discard_gradient()
        super().__setattr__(name, value)

    def point(self, value: torch.Tensor) -> None:
        """Does `self.data = value` without telling the owner."""
        data_of.__set__(self, value)

    def follow(self) -> None:
        """Takes over the memory and shape of `shown`, which may have changed in a way that nobody was told of."""

    def plain(self) -> nn.Parameter:
        """As `PlainCopies.plain`. Blocks the calling thread until no optimizer writes the home any more."""
        owner_of(self).wait_for_updates()
        plain = nn.Parameter(raw_data(self), self.requires_grad)
        plain.__dict__.update({name: value for name, value in self.__dict__.items() if name != OWNER})
        return plain


_NO_WRITES = frozenset(("requires_grad_", "detach_", "share_memory_", "rename_", "set_", "resize_", "resize_as_"))
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")


# Horovod, Apex, Megatron and `torch.autograd.graph` call these to find the node that accumulates the gradient.
_FIND_NODES = ("expand_as", "view_as")


def _announced(name: str, notice: Callable[[Any], None]) -> Callable[..., Any]:
    """A method of tensors that calls `notice` with the home's owner first."""
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def announced(home: Home, *args: Any, **kwargs: Any) -> Any:
        notice(owner_of(home))
        return method(home, *args, **kwargs)

    return announced


_METHODS = {name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")} - _NO_WRITES
for _name in (*_METHODS, "__setitem__", *(f"__i{name}__" for name in _OPERATORS)):
    setattr(Home, _name, _announced(_name, lambda owner: owner.before_write()))
for _name in _FIND_NODES:
    setattr(Home, _name, _announced(_name, lambda owner: owner.watch_node()))


class AliasParam(nn.Parameter):
    """A parameter over a tensor inside of a weight (compound.py), or over a buffer that travels.

    It shares the tensor's memory and version counter.
    """

    tensor: torch.Tensor  # the one inside of the weight, or the buffer
    is_buffer: bool  # whether the tensor is a buffer of a module
    leads: bool  # whether the tensor is pointed where this is; if several weights hold it, one of their parts leads

    @classmethod
    def of(cls, tensor: torch.Tensor, *, is_buffer: bool = False) -> "AliasParam":
        """Makes the parameter over `tensor`."""
        with without_overrides():
            part: AliasParam = make_subclass(cls, tensor.detach(), False)
        part.tensor, part.is_buffer = tensor, is_buffer
        leader = _leaders.get(tensor)
        part.leads = leader is None or leader() is None
        if part.leads:
            _leaders[tensor] = weakref.ref(part)
        return part


class AliasHome(Home):
    """A managed AliasParam. When it is pointed to other memory, so is the tensor inside of the weight."""

    tensor: torch.Tensor
    is_buffer: bool
    leads: bool

    @property
    def shown(self) -> torch.Tensor:
        """As `Home.shown`: the buffer itself where this is one."""
        return self.tensor if self.is_buffer else self

    def follow(self) -> None:
        """As `Home.follow`, for a buffer."""
        if self.is_buffer:
            shown = data_of.__get__(self.tensor)
            if not lie_alike(shown, raw_data(self)):
                owner_of(self).give(shown)
                data_of.__set__(self, shown)

    def point(self, value: torch.Tensor) -> None:
        """As `Home.point`, and the same for the tensor that follows this home."""
        super().point(value)
        if self.leads:
            data_of.__set__(self.tensor, value)


_leaders: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()  # the part that leads each tensor, weakly


class WatchedBuffer(PlainCopies):
    """A large buffer with a module's packed weights (GPTQ, AWQ), as the user sees it; it travels with its block. When
    it is given other memory (`data`, `set_`, `resize_`), its home gets the same memory.
    """

    __torch_function__ = no_override

    @property
    def data(self) -> torch.Tensor:
        self.__dict__[OWNER].touch()
        return data_of.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.__dict__[OWNER].home.data = value
        data_of.__set__(self, value)

    def set_(self, *args: Any, **kwargs: Any) -> Self:
        super().set_(*args, **kwargs)
        self.__dict__[OWNER].home.data = data_of.__get__(self)
        return self

    def resize_(self, *args: Any, **kwargs: Any) -> Self:
        super().resize_(*args, **kwargs)
        self.__dict__[OWNER].home.data = data_of.__get__(self)
        return self

    def plain(self) -> torch.Tensor:
        return data_of.__get__(self)  # type: ignore[no-any-return]


class Leaf(PlainCopies, nn.Parameter):
    """The parameter that a module computes with. Its `data` notes the leaf in `handed_out_ids`, as the module may write
    through it.
    """

    handed_out_ids: set[int]  # the ids of those leaves of a block whose `data` somebody may have
    owner: "weakref.ref[Any]"  # the ManagedParam, whose `home` is the home of this leaf
    got_nested_gradient: str | None = None  # the parameter's name, once a nested backward had a gradient for it

    @property
    def grad(self) -> torch.Tensor | None:
        function = None if self.got_nested_gradient is None else running_node()
        if isinstance(function, FunctionNode):
            raise StateError(
                f"{function.name()} calls backward() for parameter {self.got_nested_gradient!r} and reads its"
                " `.grad`: that gradient leaves the device; use torch.autograd.grad(output, [..., weight]) there, and"
                " return that"
            )
        return grad_of.__get__(self)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        grad_of.__set__(self, value)

    @property
    def data(self) -> torch.Tensor:
        self.handed_out_ids.add(id(self))
        return raw_data(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.device != self.device:
            raise StateError(f"a weight that computes on {self.device} would go to {value.device}: {_MOVES}")
        self.handed_out_ids.add(id(self))
        data_of.__set__(self, value)

    def point(self, value: torch.Tensor) -> None:
        """Does `self.data = value` without counting as a write by the module."""
        with without_overrides():
            data_of.__set__(self, value)

    def plain(self) -> nn.Parameter:
        return nn.Parameter(raw_data(self), self.requires_grad)


class AwayLeaf(Leaf):
    """A leaf whose block is away, or on its way. Code that still holds the leaf may use it: during a pass the leaf is
    brought back, at other times the home is used (weights/passes/parameter_access.py).
    """

    # The leaf, once it is present, during a pass; the home otherwise. Set by weights/passes/parameter_access.py, which
    # can lend leaves.
    brought_back: "ClassVar[Callable[[AwayLeaf], torch.Tensor]]"

    @property
    def data(self) -> torch.Tensor:
        return AwayLeaf.brought_back(self).data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        home_of(self).data = value

    def plain(self) -> nn.Parameter:
        """As `PlainCopies.plain`, called on the home."""
        return home_of(self).plain()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return home_of(self).__deepcopy__(memo)


def as_home(parameter: nn.Parameter, owner: Any) -> Home:
    """Turns the object itself into a home that `owner`, a `ManagedParam`, manages."""
    home: Any = parameter
    home.__class__ = AliasHome if isinstance(parameter, AliasParam) else Home
    home.__dict__[OWNER] = owner
    if home.shown is not home:
        home.shown.__class__ = WatchedBuffer
        home.shown.__dict__[OWNER] = owner
    return home  # type: ignore[no-any-return]


def as_parameter(home: nn.Parameter) -> nn.Parameter:
    """Turns a home back into an ordinary parameter: the inverse of `as_home`."""
    if isinstance(home, AliasHome) and home.is_buffer:
        home.tensor.__dict__.pop(OWNER, None)
        home.tensor.__class__ = torch.Tensor
    home.__dict__.pop(OWNER, None)
    home.__class__ = nn.Parameter
    return home


def lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    if one.data_ptr() != other.data_ptr() or one.shape != other.shape:
        return False
    strides = one.stride(), other.stride()
    return strides[0] == strides[1] or all(
        size == 1 or stride == its for size, stride, its in zip(one.shape, *strides, strict=True)
    )


def owner_of(home: Home | WatchedBuffer) -> Any:
    """The `ManagedParam` that was given to `as_home`."""
    return home.__dict__[OWNER]


def home_of(leaf: Leaf) -> Home:
    """The home of a leaf that is away. Raises StateError when its model is no longer offloaded."""
    owner = leaf.owner()
    if owner is None or not isinstance(owner.home, Home):
        raise StateError(GONE)
    return owner.home


def raw_data(parameter: nn.Parameter) -> torch.Tensor:
    """`parameter.data`, without telling the owner or counting as handed out."""
    return data_of.__get__(parameter)  # type: ignore[no-any-return]
