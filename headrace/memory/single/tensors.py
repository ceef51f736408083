"""Where is each of some named tensors, and how does it come to the device and go back? Budgets hold, values are kept.

A tensor rests in one tier. One that does not rest on the device visits it: `prefetch` or `get` bring a copy, `put`
gives it a new value where it rests. A copy that was written in place and has to make room goes back first.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping

import torch

from headrace.config import format_bytes
from headrace.errors import BudgetError, StateError
from headrace.memory.arena import aligned
from headrace.memory.buffers import references_beside
from headrace.memory.disk import DiskStore
from headrace.memory.ledger import Ledger, Tier
from headrace.memory.pool import HostPool
from headrace.memory.single.entries import Entry, Location, Visit, event_of, failed, flat, reached
from headrace.memory.single.moves import Moves
from headrace.memory.single.placement import Room, tiers_for

__all__ = ["TieredTensors"]

_PURPOSE = "weights"


class TieredTensors:
    """Named tensors for `device`, in at most `device_bytes` there and `host_bytes` of host memory; None: no ceiling.

    `open_disk` opens a store for those that rest on disk, when there is the first; this closes it. Their blocks of
    `block_bytes` (whole pages) pass through `blocks_in_flight` slots of host memory, fewer and smaller ones where that
    is more than a quarter of `host_bytes`; with `packs` they are packed where that takes fewer pages.
    `visiting_bytes` of the device are kept for visits where not all tensors fit. `pin`: host memory is page-locked.
    Not safe for several threads at once.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        open_disk: Callable[[Ledger], DiskStore] | None = None,
        block_bytes: int = 1 << 20,
        blocks_in_flight: int = 8,
        visiting_bytes: int = 0,
        packs: bool = False,
        pin: bool = True,
    ) -> None:
        self.device, self.device_bytes, self.packs = device, device_bytes, packs
        self.ledger = Ledger(frozenset({_PURPOSE}), host_bytes)
        self._visiting_bytes = visiting_bytes
        memory_device = device if pin else torch.device("cpu")
        self._pool = HostPool(memory_device, self.ledger, _PURPOSE)
        self.moves = Moves(device, memory_device, self.ledger, open_disk, block_bytes, blocks_in_flight)
        self._entries: dict[str, Entry] = {}
        self._leaving: list[torch.Tensor] = []  # device memory that a caller may still refer to
        self._clock = itertools.count(1)
        self._closed = False

    # what is where -------------------------------------------------------------------------------------------------
    @property
    def names(self) -> list[str]:
        """Of all tensors, in the order in which they came."""
        return list(self._entries)

    def location(self, name: str) -> Location:
        """Where that tensor is. Waits for nothing."""
        entry = self._entry(name)
        visit, rest = entry.visit, entry.rest
        return Location(
            tier=entry.tier,
            nbytes=entry.nbytes,
            on_device=entry.tier is Tier.DEVICE or visit is not None,
            is_loading=visit is not None and not reached(visit.arrival),
            is_saving=not reached(entry.saving) or (rest is not None and not all(w.query() for w in rest.writes)),
            offset=0 if rest is None else rest.extent.offset,
            stored_bytes=0 if rest is None else rest.stored_bytes,
        )

    def held_bytes(self, tier: Tier) -> int:
        """Bytes taken in that tier now: with copies that visit or that a caller still holds, and staging memory."""
        self._sweep()
        return self.ledger.held_bytes(tier)

    def like(self, name: str) -> torch.Tensor:
        """A tensor on meta of its shape and dtype."""
        return self._entry(name).like

    def place_of(self, name: str) -> torch.Tensor | None:
        """The memory in which a tensor rests, shaped; None for one on disk."""
        entry = self._entry(name)
        return None if entry.home is None else entry.shaped(entry.home)

    # tensors come and go ---------------------------------------------------------------------------------------------
    def add(self, tensors: Mapping[str, torch.Tensor], first: Tier = Tier.DEVICE) -> dict[str, Tier]:
        """Takes the values of `tensors`, from `first` on in the fastest tier with room. A tensor that is on the device
        and rests there is not copied. Raises BudgetError before anything is taken, ValueError for a name that is there.
        """
        self._refuse_closed()
        for name in tensors:
            if name in self._entries:
                raise ValueError(f"{name!r} is there already; give it a new value with put()")
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        tiers = tiers_for(sizes, first, self._room())
        if not self.moves.disk_is_open and Tier.DISK in tiers.values():
            self.moves.open_disk(max(nbytes for name, nbytes in sizes.items() if tiers[name] is Tier.DISK))
            tiers = tiers_for(sizes, first, self._room())
        host_bytes = sum(aligned(tensors[name].nbytes) for name, tier in tiers.items() if tier is Tier.HOST)
        if host_bytes:
            self._pool.grow(host_bytes)
        for name, tier in tiers.items():
            tensor = tensors[name].detach()
            entry = Entry(torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format), tier)
            self._settle_in(name, entry, tensor)
            self._entries[name] = entry
        return tiers

    def watch(self, name: str, owner: torch.Tensor) -> None:
        """`owner` shares the memory in which a tensor rests; when it was written, copies on the device are too old."""
        self._entry(name).owner = owner

    def put(self, name: str, value: torch.Tensor) -> None:
        """The tensor's new value, in place of what rests and visits. `value` may be written to once this returns.

        Where it rests on disk, writing goes on in the background. Raises ValueError for another shape or dtype.
        """
        self._refuse_closed()
        entry = self._entry(name)
        if value.shape != entry.like.shape or value.dtype != entry.like.dtype:
            raise ValueError(
                f"{name!r} is {entry.like.dtype} of shape {tuple(entry.like.shape)}; the value given is {value.dtype}"
                f" of shape {tuple(value.shape)}: give one like it"
            )
        self._drop_failed(entry)
        if entry.visit is not None:
            self.moves.wait_for(entry.visit)
            visit = entry.visit.buffer  # itself, so that nothing else refers to it for a moment
            same = value.is_contiguous() and value.data_ptr() == visit.data_ptr()
            self.moves.save(entry, visit if same else flat(value.detach()))
            self._leave(entry)
        else:
            self.moves.save(entry, flat(value.detach()))

    def take_out(self, name: str) -> torch.Tensor:
        """The tensor's value in memory of its own on the host."""
        entry = self._entry(name)
        visit = entry.visit
        if visit is not None and visit.written:
            return entry.shaped(visit.buffer).cpu().clone()
        return entry.shaped(self.moves.take_out(entry))

    # visits ----------------------------------------------------------------------------------------------------------
    def prefetch(self, names: Iterable[str]) -> list[str]:
        """Begins to bring these to the device; returns those that have no room there now. Never waits for copies.

        For room, copies leave that were used, are referred to by nobody else, and are not the last one.
        """
        self._refuse_closed()
        entries = [(name, self._entry(name)) for name in names]
        last = max((e.visit.used for e in self._entries.values() if e.visit is not None), default=0)
        left = []
        for name, entry in entries:
            self._refresh(entry)
            if entry.tier is Tier.DEVICE or entry.visit is not None:
                continue
            if self._make_room(entry.nbytes, lambda visit: 0 < visit.used < last):
                self._begin(entry)
            else:
                left.append(name)
        return left

    def get(self, name: str, *, ahead: int = 0) -> torch.Tensor:
        """The tensor on the device; what is computed with it from now on comes after its arrival.

        `ahead`: so many that follow it in order, the first ones after the last, are prefetched. Raises BudgetError when
        it has no room beside what callers still refer to.
        """
        self._refuse_closed()
        entry = self._entry(name)
        if entry.tier is Tier.DEVICE and entry.home is not None:
            place = entry.shaped(entry.home)
        else:
            place = self._visiting(name, entry)
        if ahead > 0:
            travelling = [n for n, e in self._entries.items() if e.tier is not Tier.DEVICE or n == name]
            at = travelling.index(name)
            self.prefetch((travelling[at + 1 :] + travelling[:at])[:ahead])
        return place

    def let_go(self, name: str) -> None:
        """The copy on the device is not needed any more. What was written to it goes where the tensor rests."""
        entry = self._entry(name)
        self._drop_failed(entry)
        if entry.visit is not None:
            self.moves.wait_for(entry.visit)
            self._write_back(entry)
            self._leave(entry)

    def synchronize(self) -> None:
        """Waits until nothing is under way. Raises DiskError for a write that failed and was not made good since."""
        for entry in self._entries.values():
            if entry.visit is not None:
                self.moves.wait_for(entry.visit)
                event_of(entry.visit.arrival).synchronize()
            self.moves.saved(entry)
        self.moves.synchronize()

    def close(self) -> None:
        """Waits for what is under way, and gives memory and disk back. Twice is fine."""
        if not self._closed:
            self._closed = True
            self.moves.close(list(self._entries.values()))

    # inside ----------------------------------------------------------------------------------------------------------
    def _entry(self, name: str) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            some = ", ".join(list(self._entries)[:3])
            raise KeyError(f"no tensor {name!r} among {len(self._entries)} ({some}, ...); give a name of these")
        return entry

    def _room(self) -> Room:
        return Room(
            device=self.device,
            device_bytes=self.device_bytes,
            device_taken=self.held_bytes(Tier.DEVICE),
            visiting_bytes=self._visiting_bytes,
            host_bytes=self.ledger.host_budget_bytes,
            host_taken=self.ledger.held_bytes(Tier.HOST),
            has_disk=self.moves.has_disk,
        )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StateError("these tensors were let go of by close(); make a new manager")

    def _settle_in(self, name: str, entry: Entry, tensor: torch.Tensor) -> None:
        if entry.tier is Tier.DEVICE:
            entry.home = flat(tensor.to(self.device))
            self.ledger.add(Tier.DEVICE, _PURPOSE, entry.nbytes)
        elif entry.tier is Tier.HOST:
            entry.home = self._pool.take(entry.nbytes).memory if entry.nbytes else torch.empty(0, dtype=torch.uint8)
            entry.home.copy_(flat(tensor))
        else:
            self.moves.rest(name, entry, _PURPOSE, packs=self.packs)
            self.moves.save(entry, flat(tensor))

    def _refresh(self, entry: Entry) -> None:
        """Lets go of a copy that is older than what rests."""
        visit = entry.visit
        if visit is not None and entry.owner is not None and visit.owner_version != entry.owner._version:
            self.moves.wait_for(visit)
            if visit.written:
                raise StateError("a tensor was written where it rests and on the device; put() the value that holds")
            self._leave(entry)

    def _visiting(self, name: str, entry: Entry) -> torch.Tensor:
        self._refresh(entry)
        if entry.visit is None:
            if not self._make_room(entry.nbytes, lambda visit: True):
                raise self._no_room(name, entry)
            self._begin(entry)
        visit = entry.visit
        if visit is None:
            raise StateError(f"{name!r} did not begin to load")
        try:
            self.moves.wait_for(visit)
        except BaseException:
            self._leave(entry)
            raise
        if not visit.used:
            visit.version = visit.buffer._version
        visit.used = next(self._clock)
        return entry.shaped(visit.buffer)

    def _begin(self, entry: Entry) -> None:
        """Submits bringing a tensor to the device; there is room."""
        version = None if entry.owner is None else entry.owner._version
        with torch.inference_mode(False):  # whose tensors count no versions
            buffer = torch.empty(entry.nbytes, dtype=torch.uint8, device=self.device)
        self.ledger.add(Tier.DEVICE, _PURPOSE, entry.nbytes)
        entry.visit = Visit(buffer, self.moves.bring(entry, buffer), version)

    def _write_back(self, entry: Entry) -> None:
        if entry.visit is not None and entry.visit.written:
            self.moves.save(entry, entry.visit.buffer)

    def _drop_failed(self, entry: Entry) -> None:
        """A copy that did not arrive is none. The next `get` says why."""
        if entry.visit is not None and failed(entry.visit.arrival):
            self._leave(entry)

    def _leave(self, entry: Entry) -> None:
        if entry.visit is not None:
            self._leaving.append(entry.visit.buffer)
            entry.visit = None
        self._sweep()

    def _sweep(self) -> None:
        """Counts no more what left and nobody refers to."""
        for index in reversed(range(len(self._leaving))):
            if not references_beside(self._leaving[index]):
                self.ledger.add(Tier.DEVICE, _PURPOSE, -self._leaving.pop(index).nbytes)

    def _make_room(self, nbytes: int, may_leave: Callable[[Visit], bool]) -> bool:
        """Whether there is room on the device for so many bytes more, after copies left that may."""
        while self.device_bytes is not None and self.held_bytes(Tier.DEVICE) + nbytes > self.device_bytes:
            visiting = [(e, e.visit) for e in self._entries.values() if e.visit is not None and may_leave(e.visit)]
            visiting.sort(key=lambda one: one[1].used or next(self._clock))  # those that nobody used yet stay longest
            for entry, visit in visiting:
                self._drop_failed(entry)
                if entry.visit is None:
                    break
                self.moves.wait_for(visit)
                if not references_beside(visit.buffer):
                    self._write_back(entry)
                    self._leave(entry)
                    break
            else:
                return False
        return True

    def _no_room(self, name: str, entry: Entry) -> BudgetError:
        held = [n for n, e in self._entries.items() if e.visit is not None]
        limit = self.device_bytes or 0
        return BudgetError(
            f"{name!r} needs {format_bytes(entry.nbytes)} on {self.device} beside"
            f" {format_bytes(self.ledger.held_bytes(Tier.DEVICE))} that are held; the limit is {format_bytes(limit)}."
            f" In use: {', '.join(held[:4]) or 'none'}, and {len(self._leaving)} copies that were let go of but are"
            " still referred to (a graph of autograd does that, too)."
            " Offload what is not needed and drop references to it, or raise the limit"
        )
