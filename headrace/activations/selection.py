"""Which of the tensors that autograd saves may leave? Large ones that the model made, where the user says so."""

import threading
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from headrace.runtime.autograd import address_of, without_overrides

_marked: dict[int, StorageWeakRef] = {}  # by the address of the storage, which stays unique while the reference lives


def mark_not_offload(*tensors: torch.Tensor) -> None:
    """Keeps these tensors, and views of their memory, on the device when autograd saves them.

    Raises TypeError for anything that is not a tensor.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"mark_not_offload() was given a {type(tensor).__name__}; give tensors")
    for address in [address for address, reference in _marked.items() if reference.expired()]:
        del _marked[address]
    for tensor in tensors:
        storage = tensor.untyped_storage()
        _marked[address_of(storage)] = StorageWeakRef(storage)


class _Calls(threading.local):
    """The module calls under way on this thread; several calls of one forward may take turns."""

    def __init__(self, filters: int) -> None:
        self.inside = [0] * filters  # how many modules of each filter are being called
        self.names: list[str] = []


class Selection:
    """Decides for each saved tensor. `layers`, `modules`: it must be saved inside one of each; None: anywhere."""

    def __init__(
        self,
        model: nn.Module | None,
        device: torch.device,
        min_bytes: int,
        layers: Iterable[nn.Module] | None = None,
        modules: Iterable[nn.Module] | None = None,
    ) -> None:
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self._device = device
        self._min_bytes = min_bytes
        self._filters = [weakref.WeakSet(group) for group in (layers, modules) if group is not None]
        # Storages of parameters and buffers, which stay; None: not looked up yet.
        self._own: frozenset[int] | None = None
        self._calls = _Calls(len(self._filters))
        self.skipped_kinds = 0  # tensors that are not plain, or are parts of a storage without a common version counter

    @property
    def name(self) -> str:
        """The name of the innermost watched module that is being called."""
        return self._calls.names[-1] if self._calls.names else ""

    def begin(self) -> None:
        """Called when an outermost call begins."""
        self._calls = _Calls(len(self._filters))
        self._own = None

    def _is_own(self, storage: torch.UntypedStorage) -> bool:
        """Whether a parameter or buffer of the model has this memory. They are looked up within the call: before it, an
        offloaded model's buffers are on the host.
        """
        if self._own is None:
            model = self._model()
            with without_overrides():
                self._own = frozenset(
                    address_of(tensor.untyped_storage())
                    for tensors in (() if model is None else (model.parameters(), model.buffers()))
                    for tensor in tensors
                    if _is_plain(tensor) and tensor.device == self._device
                )
        return address_of(storage) in self._own

    def gradient_bytes(self) -> int:
        """The bytes that the gradients of the model's parameters take on the device now."""
        model = self._model()
        gradients = [] if model is None else [parameter.grad for parameter in model.parameters()]
        here = [gradient for gradient in gradients if gradient is not None and gradient.device == self._device]
        return sum(gradient.nbytes for gradient in here if _is_plain(gradient))

    def enter(self, module: nn.Module, name: str) -> None:
        """Called when the call of a module begins."""
        self._calls.names.append(name)
        for index, group in enumerate(self._filters):
            self._calls.inside[index] += module in group

    def leave(self, module: nn.Module) -> None:
        """Called when the call of a module ends."""
        self._calls.names.pop()
        for index, group in enumerate(self._filters):
            self._calls.inside[index] -= module in group

    def wants(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor may leave the device."""
        if tensor.device != self._device or not all(self._calls.inside):
            return False
        base = tensor._base
        if isinstance(tensor, nn.Parameter) or (base is not None and isinstance(base, nn.Parameter)):
            return False
        if not _is_plain(tensor):  # first: some kinds do not support what follows
            self.skipped_kinds += 1
            return False
        if base is None and tensor.nbytes < self._min_bytes:  # most tensors end here
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < max(1, self._min_bytes) or tensor.numel() == 0:
            return False
        if base is None and tensor.nbytes < storage.nbytes():
            # A part of a storage that does not share a version counter with the other parts: their holders may write to
            # them, as recurrent cells do, while a copy reads.
            self.skipped_kinds += 1
            return False
        marked = _marked.get(address_of(storage))
        return (marked is None or marked.expired()) and not self._is_own(storage)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor can be made again from its bytes and strides alone."""
    kind = type(tensor)
    return (
        (kind is torch.Tensor or issubclass(kind, nn.Parameter))
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not tensor._is_zerotensor()  # zeros without memory, as forward-mode derivatives have them
    )
