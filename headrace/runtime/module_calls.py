"""How does headrace take part in what a module does? By attributes of the instance; its class stays the user's own.

`nn.Module.__call__` goes to the instance's `_compiled_call_impl` where there is one: that is the way to a module's
calls (and that of `module.compile()`, which is kept inside of ours). Unlike forward hooks it encloses the call, so an
exception cannot skip the end, checkpointing that wraps `forward` stays inside, and PyTorch's fast paths, which refuse
modules with hooks, stay on. Unlike a subclass it leaves `type(module)` alone.
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

__all__ = ["Method", "Participant", "compile_calls", "computing_methods", "participant_of", "take_part", "withdraw"]

_CALLS = "_compiled_call_impl"
Method = Callable[..., Any]  # of (module, the method as it would be without us, and its arguments)
_P = TypeVar("_P")


class Participant(Protocol):
    """Who takes part in a module's calls."""

    outer: bool  # around those who are not

    @property
    def methods(self) -> Mapping[str, Method]:
        """What takes the place of methods of the instance."""
        return {}

    def leaves_out(self) -> bool:
        """Whether `call` would do nothing of its own now. Asked at every call."""
        return False

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The module is called: `forward(*args, **kwargs)` does what it would without us."""

    def compiling(self, module: nn.Module) -> bool:
        """PyTorch's compiler goes through a call, and leaves us out of it. Whether it must not, but stops there."""

    def compile(self, module: nn.Module, compiler: Callable[[Any], Any]) -> bool:
        """Calls of the module are to be compiled. Whether something was compiled in their place."""
        return False

    def stopped(self, module: nn.Module) -> None:
        """The compiler stopped at a call of the module, which is made without it."""
        return

    def plain(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, the module's attributes are what they would be without us, to be copied or pickled."""
        return contextlib.nullcontext()


class _Calls:
    """The participants of one module, and what they keep from it."""

    def __init__(self, module: nn.Module) -> None:
        self.compiled = module.__dict__.get(_CALLS)  # by module.compile()
        self.participants: tuple[Participant, ...] = ()  # outermost first; two at most
        self.kept: dict[str, Any] = {}  # attributes of the instance, of the same names as ours
        self._module = weakref.ref(module)  # no cycle: the model goes with its last reference
        # Where `forward` is ours, too: the threads in a call that has not come to it yet.
        self.entered: set[int] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if torch.compiler.is_compiling():
            if self._stops_compiler(module):
                return _outside_of_compiler()(self, module, *args, **kwargs)
            return type(module)._call_impl(module, *args, **kwargs)
        if len(self.participants) == 1:
            only = self.participants[0]
            if self.compiled is None and self.entered is None and only.leaves_out():
                return type(module)._call_impl(module, *args, **kwargs)
            return only.call(module, self._inside, args, kwargs)
        return self.around(module, self._inside, args, kwargs)

    def _stops_compiler(self, module: nn.Module) -> bool:
        """The inner participant is asked first: weights stop the compiler, activations alone refuse it."""
        for participant in self.participants[::-1]:  # noqa: SIM110  # the compiler follows this more easily
            if participant.compiling(module):
                return True
        return False

    def stopped(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A call of which the compiler knows nothing."""
        for participant in self.participants:
            participant.stopped(module)
        return self(*args, **kwargs)

    def around(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Every participant's `call`, around `forward`."""
        for participant in self.participants[:0:-1]:
            forward = _around(participant, module, forward)
        return self.participants[0].call(module, forward, args, kwargs)

    def forward(self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """The module's `forward`: within a call that came here, or a call of its own."""
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


_outside: Callable[..., Any] | None = None


def _outside_of_compiler() -> Callable[..., Any]:
    """`_Calls.stopped`, which the compiler leaves alone. Made where it is needed: that loads the compiler."""
    global _outside  # the compiler follows no cache of functools
    if _outside is None:
        _outside = torch.compiler.disable(_Calls.stopped, reason="headrace moves weights or activations in this call")
    return _outside


def _around(participant: Participant, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A participant's call, as what the one around it calls."""
    return lambda *args, **kwargs: participant.call(module, forward, args, kwargs)


class _Bound:
    """An attribute of the instance in the place of a method."""

    def __init__(self, module: nn.Module, name: str, method: Method) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        calls = module.__dict__.get(_CALLS)
        if not isinstance(calls, _Calls):  # somebody kept it, and nobody takes part any more
            return getattr(module, self._name)(*args, **kwargs)
        own = calls.kept.get(self._name)
        if own is None and hasattr(type(module), self._name):
            own = partial(getattr(type(module), self._name), module)
        return self._method(module, own, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Its name, its signature, what was set on the function: those of the method."""
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

    Public ones that nn.Module does not have, and that take something.
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
    """From now on `participant` takes part in what the module does."""
    calls = module.__dict__.get(_CALLS)
    if not isinstance(calls, _Calls):
        calls = _Calls(module)
        module.__dict__[_CALLS] = calls
        _put(module, calls, _METHODS)
        if type(module).__call__ is not nn.Module.__call__:  # and may never come to ours
            _put(module, calls, {"forward": _forward})
            calls.entered = set()
    calls.participants = tuple(sorted((*calls.participants, participant), key=lambda one: not one.outer))
    _put(module, calls, participant.methods)


def withdraw(module: nn.Module, participant: Participant) -> None:
    """The inverse of `take_part`."""
    calls = _calls_of(module)
    calls.participants = tuple(one for one in calls.participants if one is not participant)
    _take_off(module, calls, participant.methods)
    if not calls.participants:
        _take_off(module, calls, [name for name, held in module.__dict__.items() if isinstance(held, _Bound)])
        del module.__dict__[_CALLS]
        if calls.compiled is not None:
            module.__dict__[_CALLS] = calls.compiled


def compile_calls(module: nn.Module, compiler: Callable[[Any], Any]) -> None:
    """`compiler` compiles the module's calls, inside of ours, or what a participant chooses in their place."""
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
            module.__dict__[name] = calls.kept.pop(name)


# copies and pickles: those of a plain module --------------------------------------------------------------------------
@contextlib.contextmanager
def _plain(module: nn.Module) -> Iterator[None]:
    """Inside, the module has no attribute of ours."""
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
        module.__dict__["__deepcopy__"] = None  # or a wrapper's `__getattr__` gives that of the module inside
        try:
            copied = copy.deepcopy(module, memo)
        finally:
            del module.__dict__["__deepcopy__"]
        del copied.__dict__["__deepcopy__"]
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
    """Only there: the compiler takes a short cut past `_compiled_call_impl` where it finds the method alone."""
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
