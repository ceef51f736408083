"""Where are the buffers of modules? Like parameters: on the host for the user, on the device while the model computes.

The device's copies stay there between passes. What a pass writes to them is copied to the host when somebody looks.
Until then the user's tensor is a `StaleBuffer`, which any torch function brings up to date first. So BatchNorm's
statistics cost no copy in a step, and reading, writing, keeping or saving a buffer works as with a CPU model.
"""

import itertools
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from headrace.memory.ledger import Ledger, Tier
from headrace.runtime.autograd import data_of, no_override, without_overrides
from headrace.weights.model.home import PlainCopies, WatchedBuffer
from headrace.weights.model.uses import StandIn

_Key = tuple[int, str]  # identifies a place: the id of a module's `_buffers`, and the name


class HostBuffer(PlainCopies):
    """A buffer as the user sees it, on the host. It notices when it may have been written to."""

    __torch_function__ = no_override

    on_device: torch.Tensor | None  # its copy on the device; None before the first pass
    seen: int  # the version at which both were the same
    touched: bool  # whether its `data` was handed out since

    @property
    def data(self) -> torch.Tensor:
        self.touched = True
        return data_of.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.touched = True
        data_of.__set__(self, value)

    def plain(self) -> torch.Tensor:
        """As `PlainCopies.plain`, with the contents of the device's copy."""
        self.make_good()
        return data_of.__get__(self)  # type: ignore[no-any-return]

    def stale(self) -> None:
        """Makes this a StaleBuffer, as the device's copy may have other contents from now on."""
        here, there = data_of.__get__(self), self.on_device
        self.__class__ = StaleBuffer
        if there is not None and (here.shape, here.dtype) != (there.shape, there.dtype):
            self.make_good()  # a stale one answers questions about these itself

    def make_good(self) -> None:
        """Copies the device's copy to the host if that is newer."""
        if type(self) is StaleBuffer and self.on_device is not None:
            with without_overrides(), torch.inference_mode(False), torch.no_grad():
                if self.shape != self.on_device.shape or self.dtype != self.on_device.dtype:
                    data_of.__set__(self, torch.empty_like(self.on_device, device="cpu"))
                self.copy_(self.on_device)
                self.seen, self.touched = self._version, False
            self.__class__ = HostBuffer  # type: ignore[assignment]  # last: until then it is still stale

    def renewed(self, device: torch.device) -> torch.Tensor:
        """The device's copy, updated with what the user wrote to this buffer."""
        copied = self.on_device
        if copied is None or (type(self) is HostBuffer and (self.touched or self._version != self.seen)):
            with torch.inference_mode(False), torch.no_grad():
                if copied is None or self.shape != copied.shape or self.dtype != copied.dtype:
                    self.on_device = copied = data_of.__get__(self).to(device)
                else:
                    copied.copy_(data_of.__get__(self))
            self.seen, self.touched = self._version, False
        return copied


class StaleBuffer(StandIn, HostBuffer):
    """A HostBuffer whose copy on the device may be newer."""

    def used(self) -> torch.Tensor:
        """As `StandIn.used`: this buffer, brought up to date."""
        self.make_good()
        return self

    @property
    def data(self) -> torch.Tensor:
        self.make_good()
        return self.data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.make_good()
        self.data = value


def plain_buffer(buffer: torch.Tensor | None) -> torch.Tensor | None:
    """The buffer as a plain tensor on the host."""
    if isinstance(buffer, PlainCopies):
        buffer = buffer.plain().detach()
    return buffer if buffer is None else buffer.to("cpu")


class ModuleBuffers:
    """Manages all buffers of one model that do not lie where it computes."""

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self.users = 0  # passes under way, counted as for a block
        self._device = device
        self._ledger = ledger
        self._places: dict[_Key, tuple[dict[str, Any], HostBuffer]] = {}
        self._lent: set[_Key] = set()  # places that hold another tensor during a pass
        self._common: list[tuple[weakref.ref[nn.Module], str]] = []  # places of all buffers that ranks have alike
        self.nbytes = 0  # bytes that all of them take on the device in a pass
        self._booked_bytes = 0

    def take_in(self, modules: Mapping[nn.Module, str], of_each_rank: Collection[str] = ()) -> None:
        """Manages the buffers of these modules, by name, and no others. Not called during a pass; the next pass brings
        them to the device. `of_each_rank`: as `names_of_each_rank` has them."""
        self._common = [
            (weakref.ref(module), name)
            for module, prefix in modules.items()
            for name, buffer in module._buffers.items()
            if not isinstance(buffer, WatchedBuffer) and f"{prefix}.{name}".removeprefix(".") not in of_each_rank
        ]
        containers = {id(module._buffers) for module in modules}
        self._drop([key for key in self._places if key[0] not in containers or self._is_gone(key)])
        overlapping = overlapping_buffers(modules)
        for module in modules:
            self._take_in(module, overlapping)
        self._book()

    def _take_in(self, module: nn.Module, overlapping: Collection[int]) -> None:
        for name, buffer in module._buffers.items():
            if buffer is None or isinstance(buffer, HostBuffer | WatchedBuffer) or buffer.device == self._device:
                continue
            if may_rest_on_host(buffer) and id(buffer) not in overlapping:
                self._manage(module._buffers, name, buffer)
                continue
            with torch.inference_mode(False):
                wants_gradient = buffer.requires_grad and buffer.is_leaf
                moved = (buffer.detach() if wants_gradient else buffer).to(self._device)
                module._buffers[name] = moved.requires_grad_(wants_gradient) if wants_gradient else moved
        for name, buffer in module._buffers.items():  # it may be another module's as well
            if isinstance(buffer, HostBuffer):
                self._places[id(module._buffers), name] = module._buffers, buffer

    def bind(self, *, adopts: bool) -> None:
        """Gives modules the device's copies. Leaves a tensor that `torch.func.functional_call` has put there alone."""
        self._lent.clear()
        for (key, name), (container, buffer) in self._places.items():
            held = container.get(name)
            if held is buffer:
                with without_overrides():
                    container[name] = buffer.renewed(self._device)
            elif held is not None and held is not buffer.on_device:
                self._lent.add((key, name))
        self._book()

    def common(self) -> list[torch.Tensor]:
        """In a pass: the buffers of which all ranks of a mesh have the first rank's, where the model computes."""
        modules = ((module, name) for reference, name in self._common if (module := reference()) is not None)
        held = (found for module, name in modules if (found := module._buffers.get(name)) is not None)
        return [one for one in {id(one): one for one in held}.values() if may_be_common(one)]

    def unbind(self) -> None:
        """Gives modules the user's buffers again. A tensor that a module put in the place of one becomes managed."""
        replaced = {}
        for key, (container, buffer) in self._places.items():
            held = container.get(key[1])
            if held is buffer or key in self._lent:
                continue
            if buffer.on_device is not None:
                buffer.stale()
            if held is not None and held is buffer.on_device:
                container[key[1]] = buffer
            else:
                replaced[key] = container
        self._drop(replaced)
        for (_, name), container in replaced.items():
            held = container.get(name)
            if type(held) is torch.Tensor and held.device == self._device:
                host = torch.empty_like(held, device="cpu")
                self._manage(container, name, host, held.detach() if held.requires_grad else held).stale()
        self._book()

    def sleep(self) -> None:
        """Frees the device's copies, unless a pass uses them. The next pass brings them again."""
        if self.users:
            return
        for _, buffer in self._places.values():
            buffer.make_good()
            buffer.on_device = None
        self._book()

    def release(self) -> None:
        """Makes all buffers ordinary tensors on the host again."""
        self.unbind()
        self._drop(list(self._places))
        self._book()

    def _drop(self, keys: Iterable[_Key]) -> None:
        """Stops managing these places. A buffer that is in no other place becomes an ordinary tensor again."""
        buffers = [weakref.ref(self._places.pop(key)[1]) for key in keys]  # weakly: the host needs none that nobody has
        kept = {id(buffer) for _, buffer in self._places.values()}
        for weak_buffer in buffers:
            buffer = weak_buffer()
            if isinstance(buffer, HostBuffer) and id(buffer) not in kept:
                buffer.make_good()
                buffer.__class__ = torch.Tensor  # type: ignore[assignment]
                for attribute in ("on_device", "seen", "touched"):
                    buffer.__dict__.pop(attribute, None)

    def _manage(
        self, container: dict[str, Any], name: str, tensor: torch.Tensor, on_device: torch.Tensor | None = None
    ) -> HostBuffer:
        with torch.inference_mode(False):
            if tensor.is_inference():
                tensor = tensor.clone()
        buffer: Any = tensor
        buffer.__class__ = HostBuffer
        buffer.on_device, buffer.seen, buffer.touched = on_device, tensor._version, False
        container[name] = buffer
        self._places[id(container), name] = container, buffer
        return buffer  # type: ignore[no-any-return]

    def _book(self) -> None:
        """Books the bytes of the copies that are on the device now, and drops places that are gone."""
        self._drop([key for key in self._places if self._is_gone(key)])
        with without_overrides():
            buffers = {id(buffer): buffer for _, buffer in self._places.values()}.values()
            self.nbytes = sum(buffer.nbytes for buffer in buffers)
            held_bytes = sum(buffer.on_device.nbytes for buffer in buffers if buffer.on_device is not None)
        self._ledger.add(Tier.DEVICE, "buffers", held_bytes - self._booked_bytes)
        self._booked_bytes = held_bytes

    def _is_gone(self, key: _Key) -> bool:
        """Whether something else has taken the place, for longer than one call."""
        container, buffer = self._places[key]
        held = container.get(key[1])
        return held is not buffer and (held is None or held is not buffer.on_device) and key not in self._lent


def may_rest_on_host(buffer: torch.Tensor) -> bool:
    """Whether a buffer may be copied to the device and back: it is plain and dense, wants no gradient, and no two of
    its elements share memory. All others go to the device for good, and so do those of `overlapping_buffers`.
    """
    if type(buffer) is not torch.Tensor or buffer.layout != torch.strided or buffer.requires_grad:
        return False
    return bool(torch.ops.aten.is_non_overlapping_and_dense(buffer))


def may_be_common(buffer: torch.Tensor) -> bool:
    """Whether ranks may get a buffer of the first rank: it is plain, and has values."""
    plain = type(buffer) is torch.Tensor and buffer.layout == torch.strided
    return plain and buffer.device.type != "meta" and buffer.numel() > 0


def names_of_each_rank(model: nn.Module) -> Collection[str]:
    """The names of the buffers of which each rank has its own: those that DistributedDataParallel would ignore."""
    return frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def overlapping_buffers(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of the modules' buffers that share memory with others of these."""
    buffers = {
        id(buffer): buffer
        for module in modules
        for buffer in module._buffers.values()
        if buffer is not None and buffer.numel() and may_rest_on_host(buffer) and not isinstance(buffer, HostBuffer)
    }
    in_order = sorted(buffers.values(), key=torch.Tensor.data_ptr)
    found: set[int] = set()
    for one, other in itertools.pairwise(in_order):
        if other.data_ptr() < one.data_ptr() + one.nbytes:
            found |= {id(one), id(other)}
    return found
