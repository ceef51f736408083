"""What does autograd get instead of an activation? A handle, which knows the item and how the tensor lies in it.

These hooks are active while the outermost call runs. The hooks of a block's visit (weights/passes/handles.py) lie on
top of them, keep weights to themselves, and hand everything else on to these. A checkpoint inside the call puts its own
hooks on top; the tensors that it keeps come here.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from headrace.activations.choices import Choices, ValueKind
from headrace.activations.item import Item
from headrace.activations.plan_cache import PlanCache
from headrace.activations.selection import Selection
from headrace.activations.stash import Stash
from headrace.activations.trace import ForwardTrace
from headrace.memory.arena import KERNEL_ALIGNMENT_BYTES
from headrace.runtime.autograd import (
    address_of,
    check_version,
    hooks_are_enabled,
    pop_hooks,
    push_hooks,
    top_hooks,
    unseen,
)
from headrace.runtime.lanes import Lanes

_WHOLE_SHARE = 0.5  # if the first view saved of a storage has this share, all of that is saved: others mostly follow


class _Kept(NamedTuple):
    """A tensor that stays where it is, and its version: hooks bypass autograd's own check of versions."""

    tensor: torch.Tensor
    version: int

    @property
    def is_stale(self) -> bool:
        """Whether the tensor has been written to since."""
        return self.tensor._version != self.version


class _Handle:
    """A view of an item that autograd saved."""

    __slots__ = (
        "__weakref__",
        "counter",
        "dtype",
        "item",
        "offset_bytes",
        "ref",
        "size",
        "stash",
        "stride",
        "version",
    )

    def __init__(self, item: Item, tensor: torch.Tensor, stash: Stash) -> None:
        self.item = item
        self.stash = stash
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
        self.counter = tensor.detach()  # shares the version counter; from the next line on, it holds no memory
        self.counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.version = tensor._version
        self.ref = stash.note_handle(item, self)

    @property
    def is_stale(self) -> bool:
        """Whether the tensor has been written to since it was saved."""
        return bool(self.counter._version != self.version)

    def tensor(self) -> torch.Tensor:
        """The tensor as it was saved, as a view of the item's device memory that shares its version counter."""
        item = self.item
        memory = self.stash.memory_of(item)
        check_version(memory, item.version if memory is item.memory else memory._version, self.size)
        offset_bytes = self.offset_bytes - (item.start if item.returned else 0)
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        tensor.set_(memory.untyped_storage(), offset_bytes // self.dtype.itemsize, self.size, self.stride)
        counted = memory.detach()
        counted.data = tensor
        return counted


class Forward:
    """One forward: its hooks on saved tensors, which may be put on top and removed several times, and its end.

    `on_use` is told that an item is needed, and makes it present.
    """

    def __init__(
        self,
        trace: ForwardTrace,
        stash: Stash,
        selection: Selection,
        on_use: Callable[[Item], None],
        plans: PlanCache,
        choices: Choices,
    ) -> None:
        self.trace = trace
        self.choices = choices
        self.computed: Counter[ValueKind] = Counter()  # values of each kind in its checkpoints, so far
        self._stash = stash
        self._selection = selection
        self._on_use = on_use
        self._plans = plans
        self._begun = stash.lanes.tick()
        self._count = 0
        self._items: weakref.WeakValueDictionary[tuple[int, ...], Item] = weakref.WeakValueDictionary()
        self._together: dict[int, list[weakref.ref[Item]]] = {}  # items by the address of their storage
        # Items of whole storages, with a tensor that shares the version counter of what was saved, and its version.
        self._whole: dict[int, tuple[weakref.ref[Item], torch.Tensor, int]] = {}

    @property
    def name(self) -> str:
        """The name of the module that computes now."""
        return self._selection.name

    @property
    def lanes(self) -> Lanes:
        """The lanes of its device."""
        return self._stash.lanes

    def push(self) -> None:
        """Puts these hooks on top: autograd saves through them."""
        push_hooks(self.pack, self.unpack)

    def pop(self) -> None:
        """Removes these hooks if they are on top; after an interrupt they may not be."""
        hooks = top_hooks(True)
        if hooks is not None and getattr(hooks[0], "__self__", None) is self:
            pop_hooks()

    @property
    def is_gone(self) -> bool:
        """Whether autograd has let go of everything that this forward saved."""
        self._stash.guard(self._stash.settle)
        return self.trace.is_gone

    def end(self, *, completed: bool) -> None:
        """Ends the forward: nothing more is saved."""
        with self._stash.lock:
            if completed:
                self.trace.end_forward()
            self._stash.meter.forward_ended(self._begun, self.trace.basis)
            if self.trace.strayed:
                self._plans.strayed(self.trace.entry)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor may leave, now that it is saved."""
        return not self.trace.is_over and self._selection.wants(tensor)

    @unseen
    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps instead of the tensor."""
        if not self.takes(tensor):
            # Detached: an output that is saved by the very node that made it would keep the graph alive for good.
            return _Kept(tensor.detach(), tensor._version)
        return self._stash.guard(self._handle_of, tensor)

    def _handle_of(self, tensor: torch.Tensor) -> _Handle:
        self._stash.settle()
        storage = tensor.untyped_storage()
        start, nbytes = _range_of(tensor)
        # Tensors with a common version counter surely share memory. Others may not: recurrent cells write
        # into parts of a storage whose other parts were saved, through views that know nothing of each other.
        root = tensor if tensor._base is None else tensor._base
        memory = (address_of(storage), address_of(root), tensor._version)
        item = self._items.get((*memory, 0, storage.nbytes())) or self._items.get((*memory, start, nbytes))
        together = self._together.setdefault(memory[0], [])
        if nbytes >= _WHOLE_SHARE * storage.nbytes():
            item = item or self._same_memory(tensor, memory[0])
            if not any(ref() is not None for ref in together):
                start, nbytes = 0, storage.nbytes()
        key = (*memory, start, nbytes)
        if item is not None and item.handles:  # without handles, the item was given up, whoever may still refer to it
            self._items[key] = item
            return _Handle(item, tensor, self._stash)
        stream, name = self._stash.streams.now(), self._selection.name
        item = Item(self.trace, self._count, storage, start, nbytes, root, together, stream, name)
        whole = nbytes == storage.nbytes()
        del storage  # else `is_alone` would count it as another holder
        self._count += 1
        self._items[key] = item
        handle = _Handle(item, tensor, self._stash)
        if whole:
            self._whole[key[0]] = weakref.ref(item), handle.counter, handle.version
        self.trace.saved(item)
        return handle

    def _same_memory(self, tensor: torch.Tensor, address: int) -> Item | None:
        """The item of the whole storage at this address, unless the version counters show a write since the save.

        Compiled code saves a tensor and returns another one over the same memory, with a counter of its own.
        """
        known = self._whole.get(address)
        item = None if known is None else known[0]()  # while it lives, no other storage has this address
        if known is None or item is None:
            return None
        _, counter, version = known
        return item if tensor._version == 0 and counter._version == version else None

    @unseen
    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor, on the device again."""
        if isinstance(packed, _Kept):
            check_version(packed.tensor, packed.version)
            return packed.tensor
        return self._stash.guard(self._tensor_of, packed)

    def _tensor_of(self, handle: _Handle) -> torch.Tensor:
        check_version(handle.counter, handle.version, handle.size)
        self._stash.settle()
        self._stash.streams.now()
        item = handle.item
        self._on_use(item)
        item.seen.add(handle.ref)
        tensor = handle.tensor()
        if len(item.seen) >= len(item.handles):
            self._stash.put_back(item)
        return tensor


def may_save() -> bool:
    """Whether a call may put its hooks on top.

    It may not when there are hooks already: those of a checkpoint around the model, of the user, or of a call around
    this one. Nor may it inside of `torch.func.grad` and similar transforms, which allow no hooks.
    """
    return hooks_are_enabled() and top_hooks(True) is None


def forward_below() -> Forward | None:
    """The forward whose hooks lie under those of checkpoints and visits, on this thread."""
    above = []
    try:
        while (hooks := top_hooks(True)) is not None:
            owner = getattr(hooks[0], "__self__", None)
            if isinstance(owner, Forward):
                return owner
            pop_hooks()  # an interrupt here loses hooks, and does not leave any behind
            above.append(hooks)
        return None
    finally:
        for hooks in reversed(above):
            push_hooks(*hooks)


def pop_left_over(stash: Stash) -> None:
    """Removes the hooks of calls of this stash that an interrupt kept from ending."""
    while (hooks := top_hooks(True)) is not None:
        owner = getattr(hooks[0], "__self__", None)
        if not isinstance(owner, Forward) or owner._stash is not stash:
            return
        pop_hooks()


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that the tensor spans: where they begin, and how many there are."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
    start = offset_bytes // KERNEL_ALIGNMENT_BYTES * KERNEL_ALIGNMENT_BYTES  # kernels are chosen by alignment
    return start, offset_bytes + elements * tensor.element_size() - start
