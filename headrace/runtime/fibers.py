"""How do several computations take turns? Each has a thread of its own, and one of these runs at a time.

They are threads, not generators, so that each computation has its own copy of what PyTorch keeps for a thread (whether
gradients are on, autocast, hooks on saved tensors, overrides), however deep inside of user code it pauses.
"""

import _thread
import contextlib
import contextvars
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from headrace.runtime.autograd import function_modes, pop_hooks, push_hooks, top_hooks
from headrace.runtime.device import is_accelerator

_fibers = threading.local()


def calling_thread() -> int:
    """The identifier of this thread; in a fiber, that of the thread that the fiber runs for."""
    return getattr(_fibers, "of", 0) or threading.get_ident()


class _Abandoned(BaseException):
    """Unwinds a fiber whose result is not needed any more."""


class Fiber:
    """Runs `function()`, which stops where it calls `pause()` and goes on at `resume()`.

    It begins with what PyTorch keeps for the thread that made it, and has random states of its own: fiber number 0 has
    the present states; the states of the others are derived from these and their number.
    """

    def __init__(self, function: Callable[[], Any], number: int, device: torch.device) -> None:
        self.is_over = False
        self.result: Any = None
        self._function = function
        self._error: BaseException | None = None
        self._abandoned = False
        self._device = device if is_accelerator(device) else None
        self._random = self._random_states(number)
        self._begin = _state_of_thread(device, self._device)
        self._context = contextvars.copy_context()
        self._of = calling_thread()
        # Turns are counted, and locks only wake a waiting thread: Ctrl-C may interrupt the resuming thread between any
        # two of its instructions, and repeating one of these does no harm.
        self._given = self._taken = self._ended = 0
        self._wake, self._back, self._only = threading.Lock(), threading.Lock(), threading.Lock()
        self._wake.acquire()
        self._back.acquire()

    def resume(self) -> None:
        """Lets the function run until it pauses or is over; raises what it raised."""
        outside = self._states()
        self._set_states(self._random)
        try:
            self._run()
        finally:
            self._random = self._states()
            self._set_states(outside)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def keep_random_states(self) -> None:
        """Sets the calling thread's random states to this fiber's, so that random numbers go on as in the fiber."""
        self._set_states(self._random)

    def pause(self) -> None:
        """Called within the fiber: the thread that resumed it goes on. Returns when the fiber is resumed again."""
        self._ended = self._taken
        self._back.release()
        while self._taken == self._given:
            self._wake.acquire()
        self._taken = self._given
        if self._abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """Unwinds the function, so that what it has begun ends. To be called while the fiber does not run."""
        self._abandoned = True
        while self._given and not self.is_over:  # user code may call the model once more while it unwinds
            self._run()
        self._error = None

    def _run(self) -> None:
        turn = self._ended + 1
        interrupt: BaseException | None = None
        while self._ended < turn:
            try:
                self._given = turn
                if self._taken == 0:
                    _thread.start_new_thread(self._perform, ())
                elif self._wake.locked():
                    self._wake.release()
                self._back.acquire()
            except BaseException as error:  # Ctrl-C while the fiber computes: it goes on to where it may stop
                if interrupt is not None:  # a second one: the fiber may wait for what never comes
                    self.is_over = True
                    raise
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _perform(self) -> None:
        if not self._only.acquire(blocking=False):
            return  # because of Ctrl-C, the thread was started twice
        _fibers.of = self._of
        self._taken = self._given
        try:
            self.result = self._context.run(self._begin, self._function)
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            del self._function  # and the memory that it refers to
            self.is_over = True
            self._ended = self._taken
            self._back.release()

    def _states(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device is not None:
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    def _set_states(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)

    def _random_states(self, number: int) -> list[torch.Tensor]:
        states = self._states()
        if number == 0:
            return states
        seeded = []
        for state, device in zip(states, (torch.device("cpu"), self._device), strict=False):
            digest = hashlib.blake2b(state.numpy().tobytes() + number.to_bytes(8, "little"), digest_size=8).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
            seeded.append(generator.get_state())
        return seeded


def _state_of_thread(device: torch.device, accelerator: torch.device | None) -> Callable[[Callable[[], Any]], Any]:
    """Captures what PyTorch keeps for this thread. Returns a function that runs another one with it elsewhere."""
    gradients, modes = torch.is_grad_enabled(), function_modes()
    kinds = dict.fromkeys(("cpu", device.type))
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    caches = torch.is_autocast_cache_enabled()
    hooks = top_hooks(True)
    stream = None if accelerator is None else torch.accelerator.current_stream(accelerator)

    def run(function: Callable[[], Any]) -> Any:
        torch.set_grad_enabled(gradients)
        for kind, enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(caches)
        if accelerator is not None and stream is not None:
            torch.accelerator.set_device_index(accelerator.index)
            torch.accelerator.set_stream(stream)
        if hooks is not None:
            push_hooks(*hooks)
        try:
            with contextlib.ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(mode)
                return function()
        finally:
            if hooks is not None:
                pop_hooks()

    return run
