"""Where do visiting blocks lie on the device? In buffers: each is the device bytes of one block."""

import contextlib
import gc
import sys
from collections.abc import Iterable
from typing import Protocol

import torch

from headrace.memory.ledger import Ledger, Tier
from headrace.memory.pages import map_pages
from headrace.runtime.autograd import (
    address_of,
    dispatch_modes,
    innermost_transform,
    storage_use_count,
    tensor_use_count,
    without_modes,
    without_transforms,
)
from headrace.runtime.device import is_accelerator
from headrace.runtime.lanes import entered

_PURPOSE = "weights"
_VIEWS = "headrace_views"  # attribute of a buffer: its views, so that they live as long as it does
SAVED = "headrace_saved"  # attribute of a buffer: the views that autograd has saved, for the same reason
_MOST_SAVED = 64  # the most saved views that a buffer keeps: slices that differ in each pass would pile up
_OWN = "headrace_own"  # attribute of a buffer: how many of its views refer to its memory (empty ones do not)

SavedView = tuple[torch.dtype, torch.Size, tuple[int, ...], int]  # dtype; size, stride and offset in its elements


class Viewed(Protocol):
    """Where a tensor lies in a buffer."""

    def view(self, block_bytes: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of the buffer `block_bytes`."""


class DeviceBuffers:
    """Allocates and releases buffers on one device, and books them.

    Released buffers that nobody else refers to are kept and handed out again, as far as all buffers together stay
    within `budget_bytes`. Fresh memory costs page faults on the CPU (a quarter of a second for each GiB, as much as a
    copy), and new views on any device. On an accelerator, a buffer is booked from allocation to release; on the CPU,
    until its memory is freed, so that a stray reference shows.
    """

    def __init__(self, device: torch.device, ledger: Ledger, budget_bytes: int) -> None:
        self._device = device
        self._ledger = ledger
        self._budget_bytes = budget_bytes
        self._on_cpu = not is_accelerator(device)
        self._free: list[torch.Tensor] = []  # released buffers that are kept, the latest last
        # On an accelerator: the stream on which all buffers are allocated. Their memory returns to it when freed.
        self._home: torch.Stream | None = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A buffer: a uint8 tensor of shape (nbytes,) with arbitrary contents."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        buffer = None
        for index in reversed(range(len(self._free))):
            if self._free[index].nbytes == nbytes:
                buffer = self._free.pop(index)
                break
        if buffer is None:
            while self._is_over_with(nbytes) and self._free:
                del self._free[0]
            if self._on_cpu:
                return self._mapped(nbytes)
            buffer = self._of_home(nbytes)
        if not self._on_cpu:
            self._ledger.add(Tier.DEVICE, _PURPOSE, nbytes)
        return buffer

    def views(self, buffer: torch.Tensor, kind: object, layouts: Iterable[Viewed]) -> list[torch.Tensor]:
        """The views that `layouts` make of a buffer; the buffer keeps them. `kind` is the same for equal layouts."""
        known: dict[object, list[torch.Tensor]] = buffer.__dict__.setdefault(_VIEWS, {})
        if kind not in known:
            known[kind] = views = [layout.view(buffer).detach() for layout in layouts]
            buffer.__dict__[_OWN] = buffer.__dict__.get(_OWN, _looking) + sum(view.nbytes > 0 for view in views)
        return known[kind]

    def release(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back. The caller does not use it any more; other references keep its memory alive."""
        if not self._on_cpu:
            self._ledger.add(Tier.DEVICE, _PURPOSE, -buffer.nbytes)
            current = torch.accelerator.current_stream(self._device)
            if self._home is not None and self._home != current:
                self._home.wait_stream(current)
        if buffer.nbytes and not references_beside(buffer):
            self._free.append(buffer)

    def rebook(self, nbytes: int) -> None:
        """Called after Ctrl-C, which may have cut an allocation or a release short: books the `nbytes` in use."""
        if not self._on_cpu:  # on the CPU, the memory itself is booked
            self._ledger.add(Tier.DEVICE, _PURPOSE, nbytes - self._ledger.held_bytes(Tier.DEVICE, _PURPOSE))

    def limit(self, budget_bytes: int) -> None:
        """Sets the budget. Kept buffers are freed until all buffers together stay within it."""
        self._budget_bytes = budget_bytes
        while self._is_over_with(0) and self._free:
            del self._free[0]

    def close(self) -> int:
        """Frees the kept buffers. Returns their bytes."""
        freed_bytes = sum(buffer.nbytes for buffer in self._free)
        self._free.clear()
        return freed_bytes

    @property
    def device_bytes(self) -> int:
        """The bytes that the ledger books for its budget, and those of kept buffers."""
        kept_bytes = 0 if self._on_cpu else sum(buffer.nbytes for buffer in self._free)  # on the CPU they are booked
        return self._ledger.budgeted_bytes + kept_bytes

    def _is_over_with(self, nbytes: int) -> bool:
        held_bytes = self._ledger.held_bytes(Tier.DEVICE, _PURPOSE)
        if not self._on_cpu:
            held_bytes += sum(buffer.nbytes for buffer in self._free)
        return held_bytes + nbytes > self._budget_bytes

    def _of_home(self, nbytes: int) -> torch.Tensor:
        """Memory from the accelerator's allocator. The current stream waits for the memory's earlier users."""
        current = torch.accelerator.current_stream(self._device)
        self._home = self._home or current
        if self._home == current:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        with entered(self._home):
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        current.wait_stream(self._home)
        return buffer

    def _mapped(self, nbytes: int) -> torch.Tensor:
        if self._is_over_with(nbytes):
            gc.collect(1)  # an interrupt's frames may still refer to released buffers
        mapping = map_pages(nbytes, touched=False)
        self._ledger.book(mapping, Tier.DEVICE, _PURPOSE, nbytes)
        return torch.frombuffer(mapping, dtype=torch.uint8)


def saved_view(buffer: torch.Tensor, view: SavedView) -> torch.Tensor:
    """A view of a buffer: one that the buffer keeps (at most `_MOST_SAVED`), or a new one. Hot paths read `SAVED`."""
    known: dict[SavedView, torch.Tensor] = buffer.__dict__.setdefault(SAVED, {})
    if view in known:
        return known[view]
    dtype, size, stride, offset = view
    made = torch.empty(0, dtype=dtype, device=buffer.device).set_(buffer.untyped_storage(), offset, size, stride)
    if len(known) < _MOST_SAVED:
        known[view] = made
        buffer.__dict__[_OWN] = buffer.__dict__.get(_OWN, _looking) + 1
    return made


def references_beside(buffer: torch.Tensor) -> int:
    """How many references to the memory of a buffer there are, beside the buffer and the views that it keeps.

    A reference to one of these views counts, too, such as that of a graph made by a backward with `create_graph=True`,
    or of a Function that keeps what it saved.
    """
    storage = buffer.untyped_storage()  # counted: tensors in C++, and references to its one Python object
    own: int = buffer.__dict__.get(_OWN, _looking)
    beside = storage_use_count(address_of(storage)) + sys.getrefcount(storage) - own
    for view in buffer.__dict__.get(SAVED, _NONE).values():
        beside += tensor_use_count(view) + sys.getrefcount(view) - _looking_at_view
    return beside


_NONE: dict[SavedView, torch.Tensor] = {}
_looking = _looking_at_view = 0
_looking = references_beside(torch.empty(1, device="cpu"))


def _references_to_kept_view() -> int:
    buffer = torch.empty(1, dtype=torch.uint8, device="cpu")
    saved_view(buffer, (torch.uint8, torch.Size([1]), (1,), 0))
    return references_beside(buffer)


_looking_at_view = _references_to_kept_view()


def plain_tensors() -> contextlib.AbstractContextManager[object]:
    """Within this context, new tensors are plain even in inference mode and in `torch.func` transforms, and no dispatch
    mode sees what is done, not even a FakeTensorMode. Inference tensors would make a leaf untrainable for good; a
    transform's tensors would end with it; and a selective checkpoint counts operators, and those used here may differ
    between forward and recomputation.
    """
    if innermost_transform() is None and not dispatch_modes():
        return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_THEY_ARE
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(without_transforms())
    stack.enter_context(without_modes())
    return stack


_AS_THEY_ARE = contextlib.nullcontext()
