"""How do single tensors rest in tiers and visit the device, each by its name? Limits hold, and values are kept.

`headrace.offload()` moves blocks of a model by itself. This has the same memory, lanes and disk, for code that decides
itself when tensors move. Each tensor rests in one tier. A tensor that does not rest on the device visits it: `prefetch`
or `get` bring a copy, and `put` gives the tensor a new value where it rests. If a copy that was written in place has to
make room, its value is saved first.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from headrace.compat.tutorial.blocks import DiskBlocks, DiskSettings, OnDisk
from headrace.compat.tutorial.configs import OffloadTier, TensorLocation
from headrace.config import format_bytes
from headrace.errors import BudgetError, StateError
from headrace.memory.arena import Arena, aligned, whole_pages
from headrace.memory.buffers import references_beside
from headrace.memory.ledger import Ledger, Tier
from headrace.runtime.lanes import Event, Lane, Lanes, Transfer, open_lanes
from headrace.runtime.threads import Job

__all__ = ["TIERS", "TieredTensors"]

TIERS = {Tier.DEVICE: OffloadTier.GPU, Tier.HOST: OffloadTier.CPU, Tier.DISK: OffloadTier.NVME}
_PURPOSE = "weights"


@dataclass(eq=False)
class _Visit:
    """A tensor's copy on the device, arrived or on its way."""

    buffer: torch.Tensor
    arrival: "Future[Transfer]"  # which is set once the transfer is submitted
    owner_version: int | None
    used: int = 0  # the clock when `get` asked for it last; 0: not yet
    version: int = 0  # of the buffer at the first `get`

    @property
    def is_arriving(self) -> bool:
        if not self.arrival.done():
            return True
        return self.arrival.exception() is None and not self.arrival.result().done.query()


class _InMemory:
    """The place of one tensor in `memory`, uint8 on the device or host. As an Event, it is the end of the last save."""

    offset = 0

    def __init__(self, memory: torch.Tensor, lanes: Lanes) -> None:
        self.memory, self._lanes = memory, lanes
        self._saved: Event | None = None
        self._brought: Event | None = None

    def synchronize(self) -> None:
        if self._saved is not None:
            self._saved.synchronize()

    def query(self) -> bool:
        return self._saved is None or self._saved.query()

    def save(self, source: torch.Tensor, after: Event) -> Event:
        """Copies uint8 `source`, which is not read any more after the event that this returns."""
        if source.device.type == "cpu":  # lanes order no copies within host memory
            self.synchronize()
            if self._brought is not None:
                self._brought.synchronize()
        self._saved = self._lanes.copy(Lane.OFFLOAD, [(self.memory, source)], after).done
        return self._saved

    def bring(self, target: torch.Tensor, after: Event) -> Future[Transfer]:
        """Submits filling uint8 `target`, on the device or host, after that event."""
        transfer = self._lanes.copy(Lane.ONLOAD, [(target, self.memory)], after)
        self._brought = transfer.done
        submitted: Job[Transfer] = Job()
        submitted.set_result(replace(transfer, copies=()))  # the visit alone keeps its buffer
        return submitted


@dataclass(eq=False)
class _Entry:
    """One tensor. `owner` is a tensor that shares the memory where it rests, through which it may be written."""

    like: torch.Tensor  # shape and dtype, on meta
    tier: Tier
    home: _InMemory | OnDisk
    owner: torch.Tensor | None = None
    visit: _Visit | None = None

    def shaped(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.view(self.like.dtype).view(self.like.shape)

    @property
    def written(self) -> torch.Tensor | None:
        """The bytes of the visiting copy, if it was written to since `get` returned it first."""
        visit = self.visit
        return visit.buffer if visit is not None and visit.used and visit.buffer._version != visit.version else None


class TieredTensors:
    """Named tensors for `device`, in at most `device_bytes` there and `host_bytes` of host memory; None: no ceiling.

    If not all tensors fit on the device, `visiting_bytes` of it are kept for visits. `pin`: host memory is page-locked.
    Without `disk`, no tensor rests there. The object is not safe for several threads at once.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        visiting_bytes: int = 0,
        pin: bool = True,
        disk: DiskSettings | None = None,
    ) -> None:
        self.device, self.device_bytes = device, device_bytes
        self.ledger = Ledger(frozenset({_PURPOSE}), host_bytes)
        self.disk: DiskBlocks | None = None  # made with the first tensor on disk
        self._disk_settings, self._visiting_bytes = disk, visiting_bytes
        self._memory_device = device if pin else torch.device("cpu")
        self._lanes = open_lanes(device)
        self._entries: dict[str, _Entry] = {}
        self._leaving: list[torch.Tensor] = []  # device memory of ended visits that a caller may still refer to
        self._clock = itertools.count(1)
        self._closed = False

    # what is where -------------------------------------------------------------------------------------------------
    def location(self, name: str) -> TensorLocation:
        """Where the tensor rests, and whether it is being loaded or saved. Never waits."""
        entry = self._entry(name)
        visit = entry.visit
        return TensorLocation(
            TIERS[entry.tier],
            offset=entry.home.offset,
            size=entry.like.nbytes,
            is_loading=visit is not None and visit.is_arriving,
            is_saving=not entry.home.query(),
        )

    def locations(self) -> dict[str, TensorLocation]:
        """The location of each tensor by name, in the order in which they were added."""
        return {name: self.location(name) for name in self._entries}

    @property
    def on_device(self) -> list[str]:
        """Names of the tensors that are on the device, or on their way there."""
        return [name for name, e in self._entries.items() if e.tier is Tier.DEVICE or e.visit is not None]

    def held_bytes(self, tier: Tier) -> int:
        """Bytes held in the tier now, with visiting copies, copies that callers still refer to, and staging memory."""
        for index in reversed(range(len(self._leaving))):
            if not references_beside(self._leaving[index]):
                self.ledger.add(Tier.DEVICE, _PURPOSE, -self._leaving.pop(index).nbytes)
        return self.ledger.held_bytes(tier)

    # tensors come and go ---------------------------------------------------------------------------------------------
    def add(self, tensors: Mapping[str, torch.Tensor], first: Tier = Tier.DEVICE) -> None:
        """Adds `tensors`, each in the fastest tier with room, from `first` on. A tensor that is on the device already
        and rests there is not copied. Raises BudgetError before any is added, and ValueError for a name that is known.
        """
        self._refuse_closed()
        for name in tensors:
            if name in self._entries:
                raise ValueError(f"{name!r} is there already; give it a new value with put()")
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        tiers = self._tiers_for(sizes, first)
        if self.disk is None and self._disk_settings is not None and Tier.DISK in tiers.values():
            most_bytes = max(sizes[name] for name, tier in tiers.items() if tier is Tier.DISK)
            self.disk = DiskBlocks(self._disk_settings, most_bytes, self.ledger, self._memory_device, self._lanes)
            tiers = self._tiers_for(sizes, first)  # now that its blocks take host memory
        on_host = [aligned(sizes[name]) for name, tier in tiers.items() if tier is Tier.HOST]
        arena = Arena(sum(on_host), self._memory_device, self.ledger, _PURPOSE, computed=True) if on_host else None
        places = itertools.accumulate(on_host, initial=0)
        for name, tier in tiers.items():
            tensor = tensors[name].detach()
            like = torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format)
            home: _InMemory | OnDisk
            if tier is Tier.DISK and self.disk is not None:
                home = self.disk.allocate(name, like, _PURPOSE)
                self._save(home, _flat(tensor))
            elif tier is Tier.HOST and arena is not None:
                home = _InMemory(arena.tensor(next(places), sizes[name]).copy_(_flat(tensor)), self._lanes)
            else:
                home = _InMemory(_flat(tensor.to(self.device)), self._lanes)
                self.ledger.add(Tier.DEVICE, _PURPOSE, like.nbytes)
            self._entries[name] = _Entry(like, tier, home)

    def show(self, name: str, owner: torch.Tensor) -> None:
        """Makes `owner` share the memory in which the tensor rests; if that is on disk, `owner` becomes empty.

        Writing to `owner` makes the visiting copy stale.
        """
        entry = self._entry(name)
        if entry.home.memory is None:
            owner.data = torch.empty(0, dtype=owner.dtype, device=owner.device)
        else:
            entry.owner, owner.data = owner, entry.shaped(entry.home.memory)

    def put(self, name: str, value: torch.Tensor) -> None:
        """Gives the tensor a new value where it rests, and ends its visit. `value` may be written to once this returns.

        If the tensor rests on disk, writing goes on in the background. Raises ValueError for another shape or dtype.
        """
        entry = self._entry(name)
        if value.shape != entry.like.shape or value.dtype != entry.like.dtype:
            raise ValueError(
                f"{name!r} is {entry.like.dtype} of shape {tuple(entry.like.shape)}; the value given is {value.dtype}"
                f" of shape {tuple(value.shape)}: give one like it"
            )
        self._end_visit(entry, _flat(value.detach()))

    def take_out(self, name: str) -> torch.Tensor:
        """The tensor's value, in host memory of its own."""
        entry = self._entry(name)
        if entry.written is not None:
            return entry.shaped(entry.written).cpu().clone()
        entry.home.synchronize()
        memory = torch.empty(entry.like.nbytes, dtype=torch.uint8, device="cpu")
        entry.home.bring(memory, self._lanes.mark()).result().done.synchronize()
        return entry.shaped(memory)

    # visits ----------------------------------------------------------------------------------------------------------
    def prefetch(self, names: Iterable[str]) -> list[str]:
        """Begins to bring these tensors to the device; returns names without room there now. Never waits for copies.

        To make room, copies leave that were used and that nobody else refers to, except the one used last.
        """
        last = max((e.visit.used for e in self._entries.values() if e.visit is not None), default=0)
        left = []
        for name, entry in [(name, self._entry(name)) for name in names]:
            self._refresh(entry)
            if entry.tier is not Tier.DEVICE and entry.visit is None:
                if self._make_room(entry.like.nbytes, range(1, last)):
                    entry.visit = self._begin(entry)
                else:
                    left.append(name)
        return left

    def get(self, name: str, *, ahead: int = 0) -> torch.Tensor:
        """The tensor on the device. Computation that is issued after this waits for its arrival.

        The next `ahead` tensors are prefetched (the first follow the last). Raises BudgetError if the tensor has no
        room beside the copies that callers still refer to.
        """
        entry = self._entry(name)
        on_device = entry.home.memory if entry.tier is Tier.DEVICE else None
        place = entry.shaped(self._visiting(name, entry) if on_device is None else on_device)
        if ahead > 0:
            travelling = [n for n, e in self._entries.items() if e.tier is not Tier.DEVICE or n == name]
            at = travelling.index(name)
            self.prefetch((travelling[at + 1 :] + travelling[:at])[:ahead])
        return place

    def let_go(self, name: str) -> None:
        """Ends the visit. If the copy on the device was written to, its value is saved where the tensor rests."""
        entry = self._entry(name)
        self._end_visit(entry, entry.written)

    def synchronize(self) -> None:
        """Waits until no transfer is under way. Raises DiskError for a write that failed and was not repeated since."""
        for entry in self._entries.values():
            if entry.visit is not None:
                entry.visit.arrival.result().done.synchronize()
            entry.home.synchronize()
        if self.disk is not None:
            self.disk.synchronize()

    def close(self) -> None:
        """Waits for transfers under way, even failed ones, and frees memory and disk. May be called again."""
        if self._closed:
            return
        self._closed = True
        for entry in self._entries.values():
            if entry.visit is not None:
                self._arrived(entry.visit).synchronize()
            entry.home.synchronize()
        if self.disk is not None:
            self.disk.close()
        self._lanes.close()

    # inside ----------------------------------------------------------------------------------------------------------
    def _entry(self, name: str) -> _Entry:
        self._refuse_closed()
        entry = self._entries.get(name)
        if entry is None:
            some = ", ".join(list(self._entries)[:3])
            raise KeyError(f"no tensor {name!r} among {len(self._entries)} ({some}, ...); give one of these names")
        return entry

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StateError("these tensors were let go of by close(); make a new manager")

    def _tiers_for(self, sizes: Mapping[str, int], first: Tier) -> dict[str, Tier]:
        """The tier of each tensor, by its bytes and in this order: the fastest one with room, from `first` on."""
        limit, host_limit, host_taken = self.device_bytes, self.ledger.host_budget_bytes, self.held_bytes(Tier.HOST)
        on_device, on_host, tiers = self.held_bytes(Tier.DEVICE), 0, {}
        fits = limit is None or (first is Tier.DEVICE and on_device + sum(sizes.values()) <= limit)
        resting = None if limit is None else limit - (0 if fits else self._visiting_bytes)
        for name, nbytes in sizes.items():
            host_wanted = host_taken + whole_pages(on_host + aligned(nbytes))
            if first is Tier.DEVICE and (resting is None or on_device + nbytes <= resting):
                tiers[name], on_device = Tier.DEVICE, on_device + nbytes
            elif first is not Tier.DISK and (host_limit is None or host_wanted <= host_limit):
                tiers[name], on_host = Tier.HOST, on_host + aligned(nbytes)
            elif self._disk_settings is not None:
                tiers[name] = Tier.DISK
            else:
                raise BudgetError(
                    f"{name!r} needs {format_bytes(nbytes)}: no room within {limit} bytes of {self.device} and"
                    f" {host_limit} of host memory, and no directory on a disk; raise a limit, or give a directory",
                    tier="host",
                )
            if tiers[name] is not Tier.DEVICE and limit is not None and nbytes > limit:
                raise BudgetError(
                    f"{name!r} needs {format_bytes(nbytes)} on {self.device} when it is used; the limit there is"
                    f" {format_bytes(limit)}; raise it to at least {format_bytes(nbytes, at_least=True)}"
                )
        return tiers

    def _save(self, home: _InMemory | OnDisk, source: torch.Tensor) -> None:
        """Saves uint8 `source` there, unless it is there. `source` may be written to once this returns."""
        if home.memory is not None and home.memory.data_ptr() == source.data_ptr():
            return
        read = home.save(source, self._lanes.mark())
        if source.device.type == "cpu":
            read.synchronize()
        self._lanes.wait(read)

    def _refresh(self, entry: _Entry) -> None:
        """Ends a visit whose copy is older than the value at rest."""
        visit = entry.visit
        if visit is not None and entry.owner is not None and visit.owner_version != entry.owner._version:
            if entry.written is not None:
                raise StateError("a tensor was written where it rests and on the device; put() the value that holds")
            self._end_visit(entry)

    def _visiting(self, name: str, entry: _Entry) -> torch.Tensor:
        self._refresh(entry)
        if entry.visit is None and not self._make_room(entry.like.nbytes):
            held = [n for n, e in self._entries.items() if e.visit is not None]
            raise BudgetError(
                f"{name!r} needs {format_bytes(entry.like.nbytes)} on {self.device} beside"
                f" {format_bytes(self.ledger.held_bytes(Tier.DEVICE))} that are held; the limit is"
                f" {format_bytes(self.device_bytes or 0)}. In use: {', '.join(held[:4]) or 'none'}, and"
                f" {len(self._leaving)} copies that were let go of but are still referred to (a graph of autograd does"
                " that, too). Offload what is not needed and drop references to it, or raise the limit"
            )
        visit = entry.visit = entry.visit or self._begin(entry)
        try:
            self._lanes.wait(visit.arrival.result().done)
        except BaseException:
            self._end_visit(entry)
            raise
        if not visit.used:
            visit.version = visit.buffer._version
        visit.used = next(self._clock)
        return visit.buffer

    def _begin(self, entry: _Entry) -> _Visit:
        """Begins a visit, for which there must be room."""
        version = None if entry.owner is None else entry.owner._version
        with torch.inference_mode(False):  # tensors made in inference mode count no versions
            buffer = torch.empty(entry.like.nbytes, dtype=torch.uint8, device=self.device)
        self.ledger.add(Tier.DEVICE, _PURPOSE, buffer.nbytes)
        return _Visit(buffer, entry.home.bring(buffer, self._lanes.mark()), version)

    def _end_visit(self, entry: _Entry, value: torch.Tensor | None = None) -> None:
        """Ends the visit, if there is one, and saves uint8 `value` where the tensor rests."""
        if entry.visit is not None:
            self._lanes.wait(self._arrived(entry.visit))
        if value is not None:
            self._save(entry.home, value)
        if entry.visit is not None:
            self._leaving.append(entry.visit.buffer)
            entry.visit = None

    def _arrived(self, visit: _Visit) -> Event:
        """The end of the arrival, once its transfer is submitted; if that failed, the end of what was submitted."""
        failed = visit.arrival.exception() is not None
        transfer = self._lanes.copy(Lane.ONLOAD, (), self._lanes.mark()) if failed else visit.arrival.result()
        event: Event = transfer.done
        return event

    def _make_room(self, nbytes: int, used: range | None = None) -> bool:
        """Whether the device has room for `nbytes` more, after copies that nobody else refers to were sent back: those
        used longest ago first, unused ones last. With `used`, only copies whose last use is in that range go."""
        limit = math.inf if self.device_bytes is None else self.device_bytes
        while self.held_bytes(Tier.DEVICE) + nbytes > limit:
            visiting = [(e, e.visit) for e in self._entries.values() if e.visit is not None]
            visiting.sort(key=lambda one: one[1].used or math.inf)
            candidates = (one for one in visiting if used is None or one[1].used in used)
            leaves = next((e for e, v in candidates if v.arrival.exception() or not references_beside(v.buffer)), None)
            if leaves is None:
                return False
            del visiting, candidates
            self._end_visit(leaves, leaves.written)
        return True


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, as uint8 of shape (nbytes,)."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
