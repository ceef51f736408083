"""How does headrace take part in what a module does? By attributes of the instance; its class stays the user's own.

`nn.Module.__call__` calls the instance's `_compiled_call_impl` if it has one, so headrace sets that attribute. (So does
`module.compile()`, whose value is kept inside of ours.) Unlike forward hooks it encloses the call: an exception cannot
skip the end, checkpointing that wraps `forward` stays inside, and PyTorch's fast paths, which refuse modules with
hooks, stay on. Unlike a subclass it leaves `type(module)` alone.
"""

import contextlib
import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from headrace.errors import StateError

_CALLS = "_compiled_call_impl"
Method = Callable[..., Any]  # takes the module, its method as it would be without us, and that method's arguments
_P = TypeVar("_P")


class Participant(Protocol):
    """Takes part in a module's calls."""

    outer: bool  # whether its `call` encloses that of a participant that is not outer

    @property
    def methods(self) -> Mapping[str, Method]:
        """Replacements for methods of the instance, by name."""
        return {}

    def leaves_out(self) -> bool:
        """Whether `call` would do nothing of its own now. Asked at every call; if so, the call goes without it."""
        return False

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Called when the module is called. `forward(*args, **kwargs)` does what the call would do without us."""

    def stops_compiler(self, module: nn.Module) -> bool:
        """Called while PyTorch's compiler traces a call: whether it must stop, not trace the call without us."""

    def compile(self, module: nn.Module, compiler: Callable[[Any], Any]) -> bool:
        """Called to compile the module's calls. Returns whether it has compiled something else in their place."""
        return False

    def stopped(self, module: nn.Module) -> None:
        """Called before a call of the module at which the compiler stopped, and which runs uncompiled."""
        return

    def plain(self, module: nn.Module) -> AbstractContextManager[None]:
        """Within this context, the module's attributes are as they would be without us, to be copied or pickled."""
        return contextlib.nullcontext()


class _Calls:
    """The `_compiled_call_impl` of one module: its participants, and the attributes that they replace."""

    def __init__(self, module: nn.Module) -> None:
        self.compiled = module.__dict__.get(_CALLS)  # made by module.compile()
        self.participants: tuple[Participant, ...] = ()  # outermost first; three at most
        self.kept: dict[str, Any] = {}  # the instance's own attributes that ours replace
        self._module = weakref.ref(module)  # no cycle: the model goes with its last reference
        # Where `forward` is replaced, too: the threads in a call that has not reached `forward` yet.
        self.entered: set[int] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if torch.compiler.is_compiling():
            if self._stops_compiler(module):
                return _outside_of_compiler()(self, module, *args, **kwargs)
            return type(module)._call_impl(module, *args, **kwargs)
        if len(self.participants) == 1:
            only = self.participants[0]
            if not only.leaves_out():
                return only.call(module, self._inside, args, kwargs)
            if self.compiled is None and self.entered is None:
                return type(module)._call_impl(module, *args, **kwargs)
            return self._inside(*args, **kwargs)
        return self.around(module, self._inside, args, kwargs)

    def _stops_compiler(self, module: nn.Module) -> bool:
        """Whether a participant stops the compiler here; raises StateError if one does so in an export. The inner
        participant is asked first: where weights stop the compiler, activations need not refuse it.
        """
        for participant in self.participants[::-1]:
            if participant.stops_compiler(module):
                refuse_export()
                return True
        return False

    def stopped(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Makes a call that the compiler does not trace."""
        for participant in self.participants:
            participant.stopped(module)
        return self(*args, **kwargs)

    def around(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Calls `forward` within the `call` of every participant that does not leave it out."""
        for participant in self.participants[::-1]:
            forward = _around(participant, module, forward)
        return forward(*args, **kwargs)

    def forward(self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """The module's `forward`. If user code calls it directly, the participants take part in it as in a call."""
        if torch.compiler.is_compiling():
            if self._stops_compiler(module):
                return _outside_of_compiler()(self, module, *args, **kwargs)
            return own(*args, **kwargs)
        this = threading.get_ident()
        if self.entered is None or this not in self.entered:
            return self.around(module, own, args, kwargs)
        self.entered.discard(this)
        return own(*args, **kwargs)

    def _inside(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if self.entered is not None:
            self.entered.add(threading.get_ident())
        try:
            if self.compiled is not None:
                return self.compiled(*args, **kwargs)
            return type(module)._call_impl(module, *args, **kwargs)
        finally:
            if self.entered is not None:
                self.entered.discard(threading.get_ident())


def refuse_export() -> None:
    """Raises StateError in an export; also in one that the compiler traces (strict=True)."""
    if torch.compiler.is_exporting():
        raise StateError(
            "torch.export does not see how headrace moves weights and activations; export copy.deepcopy(model), which"
            " is a plain model, or call remove() on the handle first"
        )


_outside: Callable[..., Any] | None = None


def _outside_of_compiler() -> Callable[..., Any]:
    """`_Calls.stopped`, hidden from the compiler. It is made at first use, because that loads the compiler."""
    global _outside  # the compiler cannot trace a cache of functools
    if _outside is None:
        _outside = torch.compiler.disable(_Calls.stopped, reason="headrace moves weights or activations in this call")
    return _outside


def _around(participant: Participant, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A participant's `call` as the `forward` of the participant around it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if participant.leaves_out() else participant.call(module, forward, args, kwargs)

    return call


class _Bound:
    """An attribute of the instance that takes the place of a method."""

    def __init__(self, module: nn.Module, name: str, method: Method) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        calls = module.__dict__.get(_CALLS)
        if not isinstance(calls, _Calls):  # user code kept this, and no participant is left
            return getattr(module, self._name)(*args, **kwargs)
        own = calls.kept.get(self._name)
        if own is None and hasattr(type(module), self._name):
            own = partial(getattr(type(module), self._name), module)
        return self._method(module, own, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The method's own attributes: its name, its signature, and what was set on the function."""
        return getattr(self._plain(), name)

    @property
    def __wrapped__(self) -> Any:
        return self._plain()

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return self._plain().__doc__

    def __reduce__(self) -> Any:
        return getattr, (self._module(), self._name)

    def _plain(self) -> Any:
        """The method as it would be without us."""
        module: Any = self._module()
        calls = module.__dict__.get(_CALLS)
        kept = calls.kept.get(self._name) if isinstance(calls, _Calls) else None
        return getattr(type(module), self._name).__get__(module) if kept is None else kept


_computing: "weakref.WeakKeyDictionary[type, tuple[str, ...]]" = weakref.WeakKeyDictionary()


def computing_methods(kind: type[nn.Module]) -> tuple[str, ...]:
    """The methods of a class that may compute as `forward` does: `encode`, `forward_features`, `get_image_features`.

    These are its public methods that nn.Module does not have, and that take an argument.
    """
    if kind not in _computing:
        names = [name for name in dir(kind) if not name.startswith("_") and not hasattr(nn.Module, name)]
        _computing[kind] = tuple(name for name in names if _takes_something(inspect.getattr_static(kind, name)))
    return _computing[kind]


def _takes_something(function: Any) -> bool:
    if not isinstance(function, FunctionType) or function.__code__.co_flags & _COMPUTE_LATER:
        return False
    code = function.__code__
    several = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return bool(several) or code.co_argcount + code.co_kwonlyargcount > 1


_COMPUTE_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def take_part(module: nn.Module, participant: Participant) -> None:
    """Makes `participant` take part in what the module does from now on."""
    calls = module.__dict__.get(_CALLS)
    if not isinstance(calls, _Calls):
        calls = _Calls(module)
        module.__dict__[_CALLS] = calls
        _put(module, calls, _METHODS)
        if type(module).__call__ is not nn.Module.__call__:  # so a call may bypass ours
            _put(module, calls, {"forward": _forward})
            calls.entered = set()
    calls.participants = tuple(sorted((*calls.participants, participant), key=lambda one: not one.outer))
    _put(module, calls, participant.methods)


def withdraw(module: nn.Module, participant: Participant) -> None:
    """The inverse of `take_part`. If Ctrl-C cuts it short, the participant stays until this is repeated."""
    calls = _calls_of(module)
    others = tuple(one for one in calls.participants if one is not participant)
    _take_off(module, calls, participant.methods)
    if not others:
        _take_off(module, calls, [name for name, held in module.__dict__.items() if isinstance(held, _Bound)])
        if calls.compiled is None:
            del module.__dict__[_CALLS]
        else:
            module.__dict__[_CALLS] = calls.compiled
    calls.participants = others


def compile_calls(module: nn.Module, compiler: Callable[[Any], Any]) -> None:
    """Compiles the module's calls, inside of ours, with `compiler`; or what a participant chooses in their place."""
    calls = _calls_of(module)
    for participant in calls.participants:
        if participant.compile(module, compiler):
            return
    calls.compiled = compiler(MethodType(type(module)._call_impl, module))


def participant_of(module: nn.Module, kind: type[_P]) -> _P | None:
    """The participant of that kind in what the module does; None where there is none."""
    calls = module.__dict__.get(_CALLS)
    if isinstance(calls, _Calls):
        for participant in calls.participants:
            if isinstance(participant, kind):
                return participant
    return None


def _calls_of(module: nn.Module) -> _Calls:
    return module.__dict__[_CALLS]  # type: ignore[no-any-return]


def _put(module: nn.Module, calls: _Calls, methods: Mapping[str, Method]) -> None:
    for name, method in methods.items():
        if name in module.__dict__:
            calls.kept[name] = module.__dict__[name]
        module.__dict__[name] = _Bound(module, name, method)


def _take_off(module: nn.Module, calls: _Calls, names: Iterable[str]) -> None:
    for name in names:
        if isinstance(module.__dict__.get(name), _Bound):
            del module.__dict__[name]
        if name in calls.kept:
            module.__dict__[name] = calls.kept[name]
            del calls.kept[name]


# copies and pickles: those of a plain module --------------------------------------------------------------------------
@contextlib.contextmanager
def _plain(module: nn.Module) -> Iterator[None]:
    """Within this context, the module has none of our attributes."""
    calls = _calls_of(module)
    ours = {name: held for name, held in module.__dict__.items() if isinstance(held, _Bound | _Calls)}
    with contextlib.ExitStack() as stack:
        for participant in calls.participants:
            stack.enter_context(participant.plain(module))
        try:
            for name in ours:
                del module.__dict__[name]
            module.__dict__.update({name: kept for name, kept in calls.kept.items() if name in ours})
            yield
        finally:
            module.__dict__.update(ours)


def _deepcopy(module: nn.Module, _own: Any, memo: dict[int, Any]) -> Any:
    with _plain(module):
        if hasattr(type(module), "__deepcopy__"):
            return copy.deepcopy(module, memo)
        module.__dict__["__deepcopy__"] = None  # else a wrapper's `__getattr__` would find the inner module's
        try:
            copied = copy.deepcopy(module, memo)
        finally:
            del module.__dict__["__deepcopy__"]
        copied.__dict__.pop("__deepcopy__", None)  # a class may make copies without it, as that of torch.compile does
        return copied


def _reduce_ex(module: nn.Module, _own: Any, protocol: Any) -> Any:
    with _plain(module):
        reduced = module.__reduce_ex__(protocol)
        return tuple(dict(part) if part is module.__dict__ else part for part in reduced)


def _getstate(module: nn.Module, _own: Any) -> Any:
    with _plain(module):
        return copy.copy(module.__getstate__())


def _compile(module: nn.Module, _own: Any, *args: Any, **kwargs: Any) -> None:
    compile_calls(module, partial(torch.compile, *args, **kwargs))


def _call_impl(_module: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
    """Changes nothing. It is here so that the compiler does not bypass `_compiled_call_impl`, as it would otherwise."""
    return own(*args, **kwargs)


def _forward(module: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
    return _calls_of(module).forward(module, own, args, kwargs)


_METHODS: Mapping[str, Method] = {
    "__deepcopy__": _deepcopy,
    "__reduce_ex__": _reduce_ex,
    "__getstate__": _getstate,
    "_call_impl": _call_impl,
    "compile": _compile,
}
