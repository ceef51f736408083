"""What happens when a home is used without a call of its module? Its leaf is lent, or the use waits for an update.

`Fused.apply(x, self.child.weight)` computes with a weight that no visit brought. While a visit is under way, a module
that is asked for a parameter comes through here and gives the leaf, present until the call ends. Torch functions come
here, too, with homes that user code kept before the visit (in a list), and with leaves that it keeps while their block
is away again: they borrow likewise. While an optimizer updates homes beside the next pass, torch functions come
here as well, and wait.
"""

import threading
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from headrace.errors import StateError
from headrace.runtime.autograd import grad_of, tree_flatten, tree_map_only, without_overrides
from headrace.runtime.tensors import tensors_in
from headrace.weights.model.compound import AwayCompound, compound_of
from headrace.weights.model.home import GONE, AwayLeaf, Home, WatchedBuffer, home_of, owner_of
from headrace.weights.model.uses import Use, use_of


class Lender(Protocol):
    """Lends the leaves of one model while a visit of it is under way. They stay until the innermost call ends."""

    def lend_to_function(self, owner: Any, use: Use, beside: Collection[torch.device]) -> torch.Tensor | None:
        """The leaf for a home that a torch function takes; None: the home is not the lender's, or is to be used itself.

        `beside`: the devices of the function's other tensors.
        """

    def lend_to_module(self, owner: Any) -> torch.Tensor | None:
        """The leaf for a home that a module is asked for; None: the home is not the lender's, or not lent now."""

    def begin_method(self) -> bool:
        """Whether asking a module for a buffer outside of any pass has begun one."""


_Answer = TypeVar("_Answer")

# Torch functions that change no tensor and look at no value before they compute: for an empty input, shapes suffice.
# fmt: off
_GO_BY_SHAPE = frozenset((
    "linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "mul", "__mul__", "__rmul__",
    "add", "__add__", "__radd__", "layer_norm", "rms_norm",
))
# fmt: on
_GIVES_MEMORY = frozenset(("data_ptr", "untyped_storage", "storage"))  # to a kernel that PyTorch knows nothing of


class _Lending(NamedTuple):
    """A visit under way of some model. `lender` None: homes are left as they are, on that thread."""

    lender: Lender | None
    thread: int


_lenders: list[_Lending] = []
_waits: list[object] = []  # one entry for each model of which homes are being updated
# Held while these lists and the class `Home` change; reentrant, as the garbage collector may strike meanwhile.
_changing = threading.RLock()


class Registration:
    """Keeps `one` in the list of those that are asked about homes, from `begin()` to `end()`, or in a `with` block."""

    def __init__(self, present: list[Any], one: Any) -> None:
        self._present = present
        self._one = one

    def begin(self) -> None:
        with _changing:
            self._present.append(self._one)
            _watch()

    def end(self) -> None:
        with _changing:
            if self._present and self._present[-1] == self._one:
                self._present.pop()
            elif self._one in self._present:  # another thread's visit began later
                self._present.remove(self._one)
            _watch()

    def __enter__(self) -> None:
        try:
            self.begin()
        except BaseException:
            self.end()
            raise

    def __exit__(self, *_: object) -> None:
        self.end()


def lending_leaves(lender: Lender) -> Registration:
    """While this lasts, torch functions that take homes get the lender's leaves."""
    return Registration(_lenders, _Lending(lender, threading.get_ident()))


def is_lending(lender: Lender) -> bool:
    """Whether torch functions on this thread ask this lender first: it lends, and no other began later."""
    try:
        last = _lenders[-1]
    except IndexError:
        return False
    if last.thread == threading.get_ident():
        return last.lender is lender
    return _last_lender() is lender


def homes_as_they_are() -> Registration:
    """Until the next visit, homes are plain parameters for torch functions: `has_torch_function(home)` is False.

    Modules, too, give homes then, on this thread and not on others.
    """
    return Registration(_lenders, _Lending(None, threading.get_ident()))


def waiting_for_homes() -> Registration:
    """While this lasts, torch functions wait for a home's update before they read it, or hand out its gradient."""
    return Registration(_waits, object())


def borrow(home: Home | WatchedBuffer) -> torch.Tensor:
    """What a module gives when asked for a home, or a buffer that travels: during a pass, the leaf."""
    if not _lenders:
        return home
    with without_overrides():
        owner = owner_of(home)
        leaf = _first(lambda lender: lender.lend_to_module(owner))
    return home if leaf is None else leaf


def borrow_compound(weight: Any) -> Any:
    """Does as `borrow` does, for a weight that is not one plain tensor. Anything else is given as it is."""
    compound = compound_of(weight) if _lenders and _last_lender() is not None else None
    if compound is None or (weight is compound.leaf and not isinstance(weight, AwayCompound)):
        return weight
    owner = compound.owner
    return compound.shown if _first(lambda lender: lender.lend_to_module(owner)) is None else compound.leaf


def pass_begins() -> bool:
    """Whether asking a module for a buffer has begun a pass, and put another buffer in its place."""
    return _first(lambda lender: lender.begin_method() or None) is not None


def _first(ask: Callable[[Lender], _Answer | None]) -> _Answer | None:
    """The answer of the innermost lender that has one; None where homes are left as they are on this thread."""
    if _last_lender() is not None:
        for lender in dict.fromkeys(one.lender for one in reversed(_lenders.copy())):
            answer = None if lender is None else ask(lender)
            if answer is not None:
                return answer
    return None


def _last_lender() -> Lender | None:
    """The lender that began last; None: none lends, or homes are left as they are on this thread."""
    this, lenders = threading.get_ident(), _lenders.copy()[::-1]  # other threads begin and end meanwhile
    for one in lenders:
        if one.thread == this:
            if one.lender is None:
                return None
            break
    for one in lenders:
        if one.lender is not None:
            return one.lender
    return None


def stop_lending(lender: Lender) -> None:
    """Ends all lending of this lender, after an interrupt that kept visits from ending."""
    with _changing:
        _lenders[:] = [other for other in _lenders if other.lender is not lender]
        _watch()


def _watch() -> None:
    """Has torch functions that take homes come here just while one lends or waits. Called with `_changing` held."""
    wanted = bool(_waits) or bool(_lenders and _lenders[-1].lender is not None)
    if wanted == ("__torch_function__" in Home.__dict__):
        return
    if wanted:
        Home.__torch_function__ = classmethod(_torch_function)  # type: ignore[assignment]
    else:
        del Home.__torch_function__


def _torch_function(_cls: type, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A torch function takes a home, on any thread: it waits for the home's update, and gets a leaf if one is lent."""
    kwargs = kwargs or {}
    with without_overrides():
        use = _use_of(func, args, kwargs)
        if _waits and (use in (Use.COMPUTE, Use.WRITE) or func == grad_of.__get__):
            for home in tree_flatten((args, kwargs))[0]:
                if isinstance(home, Home):
                    owner_of(home).wait_for_updates()
        if use in (Use.ASK, Use.HOLD) or _last_lender() is None:
            return func(*args, **kwargs)
        written = args[0] if args and use_of(func) is Use.WRITE else None
        beside = _devices_beside(args, kwargs)
        args, kwargs = tree_map_only(Home, lambda home: _lent(home, use, beside), (args, kwargs))
        result = func(*args, **kwargs)
        return written if isinstance(written, Home) and result is args[0] else result


def _use_away_leaf(_cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A torch function takes a leaf whose block is away: its home is used instead, for which the leaf is lent again."""
    name, kwargs = getattr(func, "__name__", ""), kwargs or {}
    with without_overrides():
        if name == "__hash__":
            return func(*args)
        if name in _GO_BY_SHAPE and (found := _of_no_elements(func, args, kwargs)) is not None:
            return found
        stand_in = _brought_back if name in _GIVES_MEMORY else home_of
        args, kwargs = tree_map_only(AwayLeaf, stand_in, (args, kwargs))
    return _torch_function(Home, func, types, args, kwargs)


def _of_no_elements(func: Any, args: Any, kwargs: Any) -> Any:
    """A torch function's result, if it has no elements, and gives leaves no gradient; None otherwise."""
    given = list(tensors_in((args, kwargs)))
    trains = torch.is_grad_enabled() and any(isinstance(one, AwayLeaf) and one.requires_grad for one in given)
    if trains or all(one.numel() for one in given):
        return None
    args, kwargs = tree_map_only(AwayLeaf, torch.Tensor.detach, (args, kwargs))
    found = func(*args, **kwargs)
    return None if any(one.numel() for one in tensors_in(found)) else found


def _brought_back(leaf: AwayLeaf) -> torch.Tensor:
    """What is used for a leaf that is away: during a pass, the leaf, present again; otherwise its home."""
    with without_overrides():
        return _lent(home_of(leaf), Use.COMPUTE, {leaf.device})


AwayLeaf.__torch_function__ = classmethod(_use_away_leaf)  # type: ignore[assignment]
AwayLeaf.brought_back = staticmethod(_brought_back)


def _use_away_compound(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A torch function takes a compound's leaf that is away: the leaf is lent again, or the user's own is used."""
    kwargs = kwargs or {}
    if getattr(func, "__name__", "") == "__hash__":
        with without_overrides():
            return func(*args, **kwargs)
    beside = _devices_beside(args, kwargs)

    def lent(leaf: Any) -> Any:
        compound = compound_of(leaf)
        if compound is None:
            raise StateError(GONE)
        owner = compound.owner
        found = _first(lambda lender: lender.lend_to_function(owner, Use.COMPUTE, beside))
        return compound.stand_in(leaf) if found is None else leaf

    args, kwargs = tree_map_only(AwayCompound, lent, (args, kwargs))
    return func(*args, **kwargs)


AwayCompound.__torch_function__ = classmethod(_use_away_compound)  # type: ignore[attr-defined]


def _use_of(func: Any, args: Any, kwargs: Any) -> Use:
    """What `use_of` says, but Use.WRITE only if a home is written to with nothing but numbers; else Use.COMPUTE."""
    use = use_of(func)
    if use is not Use.WRITE:
        return use
    others = tree_flatten((args[1:], kwargs))[0]
    alone = bool(args) and isinstance(args[0], Home) and not any(isinstance(one, torch.Tensor) for one in others)
    return Use.WRITE if alone else Use.COMPUTE


def _devices_beside(args: Any, kwargs: Any) -> set[torch.device]:
    """The devices of the tensors that are no homes."""
    others = tree_flatten((args, kwargs))[0]
    return {one.device for one in others if isinstance(one, torch.Tensor) and not isinstance(one, Home | AwayCompound)}


def _lent(home: Home, use: Use, beside: Collection[torch.device]) -> torch.Tensor:
    """What a torch function uses for a home: the leaf that is lent for it, or the home itself."""
    owner = owner_of(home)
    leaf = _first(lambda lender: lender.lend_to_function(owner, use, beside))
    return home if leaf is None else leaf
