"""In which memory do blocks and gradients rest? Tiers makes it, on the host or on disk, as the placement says."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from headrace.errors import BudgetError
from headrace.memory.arena import Arena, whole_pages
from headrace.memory.disk import DiskStore, Request, copy_on_disk
from headrace.memory.ledger import Ledger
from headrace.memory.packed import available
from headrace.memory.shared import Common, SharedArena, SharedExtent, close_descriptors
from headrace.runtime.node import Node
from headrace.weights.meter import Meter
from headrace.weights.model.layout import lay_out
from headrace.weights.model.managed_param import Layout, ManagedParam
from headrace.weights.rest.filling import from_memory, memory_of
from headrace.weights.rest.materialize import Materialized
from headrace.weights.rest.packing import PackedCopy
from headrace.weights.rest.placement import Placement, grain_size, ring_size
from headrace.weights.rest.rests import CheckpointRest, DiskRest, HostRest, Rest, SharedRest

_HANDED_OUT = 4  # blocks that user code may hold memory of, and that `HandedOut` still looks after


class Tiers:
    """Makes the memory in which blocks and gradients rest, as a placement says.

    `disk`: the directory of the disk tier, if there is one; it is opened on first use. `materialized`: the parameters
    that lie in a checkpoint. `close` closes both. `node`: its ranks share the memory of blocks. `packed`: whether
    blocks that come again and again may be packed.
    """

    def __init__(
        self,
        device: torch.device,
        ledger: Ledger,
        meter: Meter,
        placement: Placement,
        disk: Path | None = None,
        materialized: Materialized | None = None,
        node: Node | None = None,
        *,
        packed: bool = True,
    ) -> None:
        self._node = node
        self.packs = packed and node is None and available()  # see PackedCopy
        self._device, self._ledger = device, ledger
        self._meter, self._placement, self._materialized, self._disk = meter, placement, materialized, disk
        self._stores: dict[Node | None, DiskStore] = {}  # by the node whose ranks share it
        self.read_in_place = HandedOut()
        # Moves blocks to disk until host memory has room for so many bytes of what comes after the model; returns
        # whether it has. `offload()` sets it to `Room.make_room`, which can move blocks; until then there is room.
        self.make_room: Callable[[int], bool] = lambda nbytes: True
        if not placement.needs_no_staging and self.store is not None and materialized is None:
            self.store.check_free(placement.disk_bytes)

    @property
    def store(self) -> DiskStore | None:
        """The disk tier, opened on first use; None when there is no directory for it."""
        return self._opened(self._node)

    @property
    def private_store(self) -> DiskStore | None:
        """As `store`, but for what this rank alone has."""
        return self._opened(None)

    def _opened(self, node: Node | None) -> DiskStore | None:
        if node not in self._stores and self._disk is not None:
            given = self._disk, self._ledger, self._meter.disk_log
            self._stores[node] = DiskStore(*given, node=node, device=self._device, alone=node is self._node)
        return self._stores.get(node)

    @property
    def most_staged_bytes(self) -> int | None:
        """The most bytes that half of the ring of gradients' staging memory may take; None: no limit."""
        return self._placement.gradient_bytes

    def rest_for(self, name: str, parameters: Sequence[nn.Parameter], layouts: Sequence[Layout], nbytes: int) -> Rest:
        """Makes the rest of a block of `nbytes`. Homes that travel in another dtype go to the tier of their block."""
        casts = [number for number, layout in enumerate(layouts) if parameters[number].dtype != layout.dtype]
        on_host = name not in self._placement.on_disk and self.make_room(whole_pages(nbytes))
        in_files = [own for own in self._names(parameters) if own is not None]
        if self._materialized is not None and not (on_host or casts) and len(in_files) == len(parameters):
            return CheckpointRest(self._materialized.checkpoint, name, in_files, layouts)
        if self._node is not None:
            shared = self._shared(self._node, name, nbytes, on_host=on_host)
            self._move_in(name, shared, parameters, layouts, casts)
            return shared
        if on_host:
            rest = self.on_host(nbytes, parameters)
            if not casts:
                self._read(parameters, rest, layouts)
            return rest
        if casts and len(in_files) < len(parameters):
            wide = [parameters[number] for number in casts]
            wide_layouts, wide_bytes = lay_out(wide, None)
            homes = self._writable(f"{name} (homes)", wide_bytes)
            for parameter, place in zip(wide, homes.tensors(wide_layouts), strict=True):
                copy_on_disk(place, parameter.detach())
                parameter.data = place
            homes.flush()
        on_disk = self._writable(name, nbytes)
        if (parts := memory_of(parameters, layouts)) is not None:
            places = on_disk.tensors(layouts)
            on_disk.fill(from_memory(parts))
            for parameter, place in zip(parameters, places, strict=True):
                parameter.data = place
        return on_disk

    def on_host(self, nbytes: int, parameters: Sequence[nn.Parameter], files: DiskRest | None = None) -> HostRest:
        """A rest in this process's memory, with what `files` hold, or empty. Raises BudgetError and DiskError."""
        trained = any(parameter.requires_grad for parameter in parameters)
        rest = HostRest(Arena(nbytes, self._device, self._ledger, "weights", computed=trained), nbytes)
        if files is not None:
            files.read(rest.memory)
            self._meter.fetch_bytes += nbytes
        return rest

    def packed_copy(self, name: str) -> PackedCopy:
        """The packed copy that a block has beside its bytes where these rest on disk; empty at first."""
        return PackedCopy(name, lambda: self.store if self.packs else None, self._meter.spilled)

    def _move_in(
        self,
        name: str,
        rest: SharedRest,
        parameters: Sequence[nn.Parameter],
        layouts: Sequence[Layout],
        casts: Sequence[int],
    ) -> None:
        """Copies the first rank's parameters to memory that the node's ranks share; those that cast, to the homes."""
        if casts:
            wide = [parameters[number] for number in casts]
            wide_layouts, wide_bytes = lay_out(wide, None)
            homes = self._add_homes(name, rest, wide_bytes, dict(zip(casts, wide_layouts, strict=True)))
            self._read(wide, homes, wide_layouts)
        as_they_are = [number for number in range(len(layouts)) if number not in casts]
        self._read([parameters[n] for n in as_they_are], rest, [layouts[n] for n in as_they_are])

    def _add_homes(self, name: str, rest: SharedRest, nbytes: int, layouts: Mapping[int, Layout]) -> SharedRest:
        """Gives `rest` a second rest, for homes that travel in another dtype: in the same tier if that has room."""
        on_host = not rest.on_disk and self.make_room(whole_pages(nbytes))
        homes = self._shared(rest.node, f"{name} (homes)", nbytes, on_host=on_host)
        rest.wide, rest.wide_layouts = homes, layouts
        return homes

    def _shared(self, node: Node, name: str, nbytes: int, *, on_host: bool) -> SharedRest:
        if on_host:
            arena = SharedArena(node, nbytes, self._device, self._ledger, "weights", by_ranks=True)
            return SharedRest(node, arena, nbytes)
        rest = self._writable(name, nbytes)
        return SharedRest(node, SharedExtent(rest.store, rest.extent), nbytes, rest)

    def _writable(self, name: str, nbytes: int) -> DiskRest:
        """A rest on disk for a block that may change. Raises BudgetError when there is no disk."""
        if self.store is None:
            raise BudgetError(
                f"weights of {name!r} change, or lie in no checkpoint as they are, and host_memory has no room; raise"
                ' it or pass a directory, such as disk="/nvme/headrace", where they can rest',
                tier="host",
            )
        chunk_bytes = self._placement.chunk_bytes or ring_size(self._ledger.host_budget_bytes or 0, 0, ())[0]
        ranks = 1 if self._node is None else self._node.size
        return DiskRest(self.store, name, nbytes, grain_size(chunk_bytes), self._meter.spilled, ranks)

    def hand_on(
        self,
        name: str,
        nbytes: int,
        before: Rest,
        params: Sequence[ManagedParam],
        left: DiskRest | None = None,
        *,
        keeps: bool,
    ) -> tuple[Rest, bool]:
        """The new rest of a block that moves from `before` to disk, and whether the caller has to copy homes there.

        `left`: files that the block had before. `keeps`: whether the contents are kept. What all ranks see is copied
        here; what this rank alone has written is for the caller to copy, and stays its own.
        """
        layouts = [param.layout for param in params]
        if self._node is None:
            rest = left or self._writable(name, nbytes)
            if keeps and all(param.in_place or param.casts for param in params):
                rest.tensors(layouts)
                if isinstance(before, CheckpointRest) and before.is_as_in_files:
                    rest.fill_from(before, layouts)
                elif isinstance(before, HostRest):
                    rest.fill(from_memory([(0, before.memory)]))
            return rest, keeps and not rest.filled
        shared = self._shared(self._node, name, nbytes, on_host=False)
        if not isinstance(before, SharedRest):
            shared.fill([param.data for param in params], layouts)
            return shared, False
        shared.fill(before.common_tensors(layouts), layouts)
        if before.wide is not None:
            home_layouts = list(before.wide_layouts.values())
            homes = self._add_homes(name, shared, len(before.wide.common), before.wide_layouts)
            homes.fill(before.wide.common_tensors(home_layouts), home_layouts)
        return shared, before.is_written

    def has_room(self, nbytes: int) -> bool:
        """Whether host memory has room for `nbytes` more. With a node all ranks agree, and each books its share."""
        if self._node is None:
            return self._ledger.has_room(nbytes)
        return self._node.all_agree(self._ledger.has_room(-(-nbytes // self._node.size)), "whether memory has room")

    def check_gradients(self, nbytes: int) -> None:
        """Raises BudgetError when host memory has no room for gradients of `nbytes` and there is no disk."""
        if self._disk is None:
            self._ledger.check_host(nbytes, "gradients")

    @property
    def short_staging_bytes(self) -> int | None:
        """The value that `most_staged_bytes` would have if blocks rested on disk; None without a disk."""
        return None if self._disk is None else 2 * ring_size(self._ledger.host_budget_bytes or 0, 0, ())[0]

    def gradient_memory(self, name: str, nbytes: int, *, missing_bytes: int = 0) -> "GradientMemory":
        """The memory for the gradients of a block: on the host while its budget has room, else on disk if there is one.

        `missing_bytes`: staging memory that is still to be made.
        """
        staging_bytes = max(missing_bytes, 2 * (self._placement.gradient_bytes or 0))  # some may be held already
        no_room = not self._ledger.has_room(whole_pages(nbytes) + staging_bytes)
        if (name in self._placement.on_disk or no_room) and self.store is not None:
            return DiskGradients(self.store, name, nbytes, self._meter.spilled)
        return Arena(nbytes, self._device, self._ledger, "gradients", computed=True)

    def common_gradient_memory(self, node: Node, name: str, nbytes: int) -> Common:
        """As `gradient_memory`, for gradients of which the ranks of a node share one copy. A collective of the node."""
        rests_on_disk = name in self._placement.on_disk or (
            self._disk is not None and not self.has_room(whole_pages(nbytes))
        )
        if rests_on_disk and self.store is not None:
            return SharedExtent(self.store, self.store.allocate(f"{name} (gradients)", nbytes, "gradients"))
        return SharedArena(node, nbytes, self._device, self._ledger, "gradients")

    def forked(self) -> None:
        """Called in a forked child process: renews locks, and makes mappings private to it."""
        self._ledger.forked()
        for store in self._stores.values():
            store.forked()

    def synchronize(self) -> None:
        """Blocks until all writes have reached the disk. Raises DiskError if one has failed since the last call."""
        for store in self._stores.values():
            store.synchronize()

    def close(self) -> None:
        """Closes the stores and the checkpoint. Their disk space is given back, except where a tensor is in use."""
        for store in self._stores.values():
            store.close()
        self._stores, self._disk = {}, None
        if self._materialized is not None:
            self._materialized.checkpoint.close()
        if self._node is not None:
            close_descriptors(self._node)

    def _names(self, parameters: Sequence[nn.Parameter]) -> list[str | None]:
        """The names of the parameters' tensors in the checkpoint; None for a parameter that is not there."""
        made = self._materialized
        return [None if made is None else made.name_of(parameter) for parameter in parameters]

    def _read(self, parameters: Sequence[nn.Parameter], rest: HostRest | SharedRest, layouts: Sequence[Layout]) -> None:
        """Reads the parameters that lie in a checkpoint into their places, past the page cache.

        Where ranks share the places, the node's first rank fills them with all parameters, also those in memory.
        """
        names, places = self._names(parameters), rest.tensors(layouts)
        reads = {name: index for index, name in enumerate(names) if name is not None}
        if self._materialized is not None and reads and (self._node is None or self._node.is_first):
            into = rest.common_tensors(layouts) if isinstance(rest, SharedRest) else places
            self._materialized.checkpoint.read({name: into[index] for name, index in reads.items()})
        moved = list(reads.values())
        if isinstance(rest, SharedRest):
            moved = list(range(len(names)))
            others = sorted(set(moved) - set(reads.values()))
            rest.fill([parameters[index].detach() for index in others], [layouts[index] for index in others])
        for index in moved:
            parameters[index].data = places[index]


class ReadInPlace(Protocol):
    """A block that may be read from a checkpoint in place."""

    rest: Rest

    def move_written(self) -> bool:
        """Moves the block to disk if it was written to. Returns False and does nothing if somebody has its memory."""


class HandedOut:
    """The blocks that are read from a checkpoint in place and whose memory user code got last (`p.data`).

    What the user writes there takes host memory that no budget counts. So a block that was written to moves to disk
    when the user asks for the memory of another one.
    """

    def __init__(self) -> None:
        self._blocks: list[weakref.ref[ReadInPlace]] = []

    def handed_out(self, block: ReadInPlace) -> None:
        """Called before user code gets the memory of a home of this block."""
        if self._blocks and self._blocks[-1]() is block:
            return
        before, self._blocks = self._blocks, []
        for one in before[-_HANDED_OUT:]:
            other = one()
            if other is not None and other is not block and not other.rest.writable and not other.move_written():
                self._blocks.append(one)
        if not block.rest.writable:
            self._blocks.append(weakref.ref(block))


class DiskGradients:
    """Gradient memory in an extent of a disk store."""

    def __init__(self, store: DiskStore, name: str, nbytes: int, spilled: Callable[[int], None]) -> None:
        self._store, self._spilled = store, spilled
        self._extent = store.allocate(f"{name} (gradients)", nbytes, "gradients")
        self._address = store.mapping(self._extent).data_ptr()

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """As `Arena.tensor`."""
        return self._store.mapping(self._extent, offset, nbytes, dtype)

    def offset_of(self, target: torch.Tensor) -> int:
        """Where memory from `tensor` begins in the extent, in bytes."""
        return target.data_ptr() - self._address

    def write(self, target: torch.Tensor, piece: torch.Tensor) -> Request:
        """Submits writing the contiguous `piece` to the place of `target`, past the page cache."""
        self._spilled(piece.nbytes)
        return self._store.write(self._extent, piece.view(torch.uint8), self.offset_of(target))

    def forget(self, written_bytes: int) -> None:
        """Called after `written_bytes` were written through the mapping: its pages leave this process's memory."""
        self._spilled(written_bytes)
        self._store.forget(self._extent)


GradientMemory = Arena | DiskGradients  # from which gradients are carved; it lives as long as any of them
