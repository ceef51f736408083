"""What is a block? The parameters that travel together: one byte range in host memory, one buffer on the device."""

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from operator import attrgetter
from typing import ClassVar

import torch

from headrace.errors import StateError
from headrace.memory.buffers import references_beside
from headrace.planning import Key
from headrace.runtime.autograd import without_overrides
from headrace.runtime.capture import before_write
from headrace.runtime.lanes import Copy, Event, LateTransfer, Transfer
from headrace.runtime.pending import LostUpdate, Pending, Watcher
from headrace.weights.model.experts import Experts
from headrace.weights.model.layout import lay_out
from headrace.weights.model.managed_param import Layout, ManagedParam
from headrace.weights.model.places import Member, Places
from headrace.weights.movement.leaves import AbsentLeaves, Leaves
from headrace.weights.rest.fetching import Fetch, Fetching
from headrace.weights.rest.placement import HostTiers
from headrace.weights.rest.reads import Range

__all__ = ["Block", "BlockPart", "Presence"]

_KINDS: dict[tuple[Layout, ...], int] = {}  # of blocks that lie in their buffers alike
_VERSION_OF: Callable[[torch.Tensor], int] = attrgetter("_version")
_ADDRESS_OF = torch.Tensor.data_ptr


class Presence(Enum):
    """Where a block's device copy stands."""

    ABSENT = auto()
    RESERVED = auto()  # there is a buffer, but nothing was copied into it: the homes are being updated
    ARRIVING = auto()  # a copy into the buffer was submitted, and compute has not waited for it
    PRESENT = auto()


_NEXT = {
    Presence.ABSENT: {Presence.RESERVED},
    Presence.RESERVED: {Presence.ARRIVING, Presence.ABSENT},
    Presence.ARRIVING: {Presence.PRESENT},
    Presence.PRESENT: {Presence.ABSENT, Presence.ARRIVING},  # arriving once more: homes have changed
}


class Block:
    """At rest its bytes are one arena of exact size; on the device one buffer, of which the leaves are views."""

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        device: torch.device,
        tiers: HostTiers,
        param_dtype: torch.dtype | None = None,
    ) -> None:
        self.name = name
        self.index = -1  # among the blocks that stream; -1 for a resident one
        self.row_bytes = 0  # of a table whose rows alone travel, see movement/rows.py; 0: it travels whole
        self.experts: Experts | None = None  # that travel one by one, see movement/slices.py; None: it travels whole
        self.trains_whole = False  # they have been used otherwise than by their numbers while they were trained
        self.called: Key | None = None  # an expert that is a module, see movement/called.py: of which layer, and which
        self.buffer: torch.Tensor | None = None
        self.allocated: Event | None = None  # when whoever had the buffer's memory before is done with it
        self.arrival: Transfer | LateTransfer | None = None  # the last copy into the buffer
        self.users = 0  # visits under way that have it bound
        self.lent = False  # one of them is a module that was only asked for a parameter: it can be taken back
        self.may_be_saved = False  # autograd has saved leaves themselves, in a pass without visits
        self.updates: list[Pending] = []  # write the homes; whoever reads those waits for them
        self.watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()  # are told when gradients are complete
        self.common: object = None  # the `CommonHomes` of a node whose ranks have one copy of the homes
        self.agreed = -1  # the generation of which this rank knows whether it is its own alone
        self.order = -1  # its place among those that a forward needs first
        self.presence = Presence.ABSENT  # changes by `becomes` alone
        self._last_read: Event | None = None  # the end of the last copy that reads the homes
        self.generation = 0  # of what the homes hold, as far as anybody has looked: see `look`
        self.loaded = -1  # the generation that the device copy has; -1: there is none
        self.last_loaded = -1  # ... and that the last one had, which may be gone
        self.written = 0  # the generation at which a home was last written to, and not just handed out
        self._as_arena = -1  # at which generation a copy of the arena was all that it took
        self._tiers = tiers
        self.manager: object = tiers  # each offloaded model has one
        self._lay_down(members, device, param_dtype)
        self.packed = tiers.packed_copy(name)
        self.compounds = list(dict.fromkeys(member.compound for member in members if member.compound is not None))
        self.leaves = Leaves(self.slots, self.compounds)
        self.slots_by_offset = sorted(self.slots, key=lambda slot: slot.layout.offset)
        self.slot_offsets = [slot.layout.offset for slot in self.slots_by_offset]
        self.places = Places(
            [(place, slot) for member, slot in zip(members, self.slots, strict=True) for place in member.places]
        )
        # The modules' attributes become the leaves; `adopts`: what took the place of homes becomes the home first.
        self.bind: Callable[..., None] = self.places.bind
        self._own_references = self._references()  # to the memory of homes, beside which nobody has any yet
        self._flushed = self.generation if self.rest.filled else -1  # the generation that the files have; -1: none
        self._flushed_ranges: Sequence[Range] | None = None  # of which alone that is known; None: of all
        self._flush(self.generation)

    def _lay_down(self, members: Sequence[Member], device: torch.device, param_dtype: torch.dtype | None) -> None:
        """The homes' bytes come to where they rest, and each parameter gets a slot. For the constructor."""
        parameters = [member.parameter for member in members]
        layouts, self.nbytes = lay_out(parameters, param_dtype)
        self.layouts, self.kind = layouts, _KINDS.setdefault(tuple(layouts), len(_KINDS))
        self.rest = self._tiers.rest_for(self.name, parameters, layouts, self.nbytes)
        absent = AbsentLeaves(device)
        self.slots = [
            ManagedParam(
                member.name, member.parameter, layout, rest, absent.of(layout), self._before_touch, self._before_write
            )
            for member, layout, rest in zip(members, layouts, self.rest.places(layouts), strict=True)
        ]
        for slot in self.slots:
            slot.unit = self
            slot.on_change = self._changed
        self.rest.take_homes(self.slots)
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self.see_homes()

    def becomes(self, new: Presence) -> None:
        """The device copy stands elsewhere. Raises StateError where it cannot have come there."""
        was = self.presence
        if new not in _NEXT[was]:
            raise StateError(f"block {self.name!r} is {was.name} and cannot become {new.name}")
        if new is Presence.PRESENT:  # which it is with all of its leaves, also where Ctrl-C keeps some from following
            self.leaves.are(present=True)
        self.presence = new
        if was is Presence.PRESENT:
            self.leaves.are(present=False)

    def lost(self) -> None:
        """A copy was broken off: the block is ABSENT, whatever it was before."""
        self.presence = Presence.ABSENT
        self.leaves.are(present=False)

    def look(self) -> int:
        """The generation of what the homes hold now: another number than before where one of them may have changed.

        Writes through `data`, and those that an optimizer tells of, raise it by themselves (`_changed`). Of all others
        autograd counts the version; who puts other memory in a home's place, its address.
        """
        for compound in self.compounds:
            compound.notice_writes()
        homes = self._homes
        versions, addresses = list(map(_VERSION_OF, homes)), list(map(_ADDRESS_OF, homes))
        if versions != self._versions or addresses != self._addresses:
            self.generation += 1
            seen = zip(self.slots, versions, self._versions, addresses, self._addresses, strict=True)
            for slot, version, last_version, address, last_address in seen:
                slot.home.follow()
                if version != last_version:
                    self.written = slot.generation = self.generation
                elif address != last_address:
                    slot.generation = self.generation
            self._versions, self._addresses = versions, addresses
        return self.generation

    def see_homes(self) -> None:
        """They lie elsewhere, or are others: another generation, and what `look` compares with from now on."""
        self._homes = [slot.shown for slot in self.slots]
        self._versions = list(map(_VERSION_OF, self._homes))
        self._addresses = list(map(_ADDRESS_OF, self._homes))
        self.generation += 1
        for slot in self.slots:
            slot.generation = self.generation

    @property
    def is_current(self) -> bool:
        """Whether the device copy, if there is one, is what the homes hold."""
        return self.look() == self.loaded

    def _changed(self, slot: ManagedParam, written: bool) -> None:
        """A home may have changed: it was `written`, or just handed out."""
        self.generation += 1
        slot.generation = self.generation
        if written:
            self.written = self.generation
        self.leaves.touched()
        if self.users:
            self.places.hide_leaves()  # modules that are asked for one have it brought once more
        if self._homes[self.slots.index(slot)] is not slot.shown:
            self._homes = [one.shown for one in self.slots]

    # bytes ------------------------------------------------------------------------------------------------------------
    def copies_in(self, *, only_changes: bool = False) -> list[Copy]:
        """What to copy from host memory into the buffer so that it holds what the homes hold.

        The arena whole, and homes that the user re-pointed on top of it; with `only_changes`, into a buffer that holds
        an older state, just the parameters that changed, unless they are most. Of a block on disk, which is fetched
        whole, only homes that were re-pointed.
        """
        if self.buffer is None:
            raise StateError(f"block {self.name!r} has no buffer to copy into")
        if self.updates:
            self.wait_for_updates()
        if self.presence is Presence.PRESENT:
            self.keep_leaf_writes()  # they would be written over
        generation = self.look()
        if self._as_arena == generation and not only_changes:  # nor has a shape changed
            self.loaded = self.last_loaded = generation
            return [] if self.rest.memory is None else [(self.buffer, self.rest.memory)]
        self.make_homes_readable()
        changed = [slot for slot in self.slots if slot.generation > self.loaded or slot.others_may_write]
        copies: list[Copy] = []
        if not only_changes or self.is_fetched or 2 * len(changed) > len(self.slots):
            if self.rest.memory is not None:
                copies.append((self.buffer, self.rest.memory))
            changed = [slot for slot in self.slots if not slot.casts and not slot.in_place]
        # Detached: a view would keep its base, of which `is_free` does not know.
        copies += [(slot.layout.view(self.buffer).detach(), slot.source) for slot in changed if slot.layout.nbytes]
        self.tell_autograd()
        for slot in self.slots:
            slot.loaded_token = slot.token
        self.loaded = self.last_loaded = generation
        if any(slot.others_may_write for slot in self.slots):
            self.loaded = -1  # nobody can say
        self._as_arena = generation if all(slot.in_place for slot in self.slots) else -1
        return copies

    def tell_autograd(self) -> None:
        """Homes may have other contents than the device copy. A backward of what autograd has saved of these leaves
        itself, in a forward without visits, raises an error then, as it would of homes.
        """
        others = [slot for slot in self.slots if slot.is_old_on_device] if self.may_be_saved else []
        if others:
            with without_overrides():
                torch.autograd.graph.increment_version([slot.leaf for slot in others])
                self.leaves.note_writes_kept()  # it was none
            for slot in others:
                slot.note_version_raised()

    @property
    def memory_is_kept(self) -> bool:
        """Whether somebody refers to the memory in which homes lie (`kept = p.data`): moving them would not free it."""
        pairs = zip(self.slots, self._references(), self._own_references, strict=True)
        return any(slot.in_place and now > own for slot, now, own in pairs)

    def _references(self) -> list[int]:
        return [references_beside(slot.data) for slot in self.slots]

    @property
    def travels_in_parts(self) -> bool:
        """Whether rows of it, or experts, come when they are used, and no visit brings the whole."""
        return bool(self.row_bytes) or self.experts is not None

    def fetch(self, by: Fetching, ranges: Sequence[Range] | None = None, *, always: bool = False) -> Fetch:
        """What brings from disk what the homes hold now, in chunks of `by`; of `ranges` alone, which are `always` the
        same.
        """
        generation = self.readable_generation()
        nbytes = self.nbytes if ranges is None else sum(nbytes for _, nbytes, _ in ranges)
        pieces = self.rest.pieces(by.chunk_bytes, ranges)
        if ranges is None:
            pieces = self.packed.pieces(pieces, self.slots, by, generation, self.rest)
        flush = partial(_flush, weakref.ref(self), generation, ranges if always else None)
        fetch = Fetch(pieces, nbytes, generation, flush, by)
        self.read_until(fetch)
        return fetch

    def read_until(self, done: Event) -> None:
        """The homes are being read, and may not be written before `done`."""
        self._last_read = done

    def wait_for_reads(self) -> None:
        """The host waits until no copy reads the homes any more."""
        if self._last_read is not None:
            self._last_read.synchronize()
            self._last_read = None

    @property
    def being_updated(self) -> bool:
        """Whether an optimizer still writes the homes, or failed to and nobody was told yet."""
        for update in self.updates:  # noqa: SIM110  # asked at every visit
            if not update.done():
                return True
        return False

    def wait_for_updates(self) -> None:
        """The host waits until no optimizer writes the homes any more. Raises what failed in an update."""
        if self.updates:
            for update in list(self.updates):
                update.wait()
            self.updates = [update for update in self.updates if not update.done()]

    def wait_until_free(self) -> None:
        """The host waits until it may read and write the homes, because nobody else does."""
        self.wait_for_updates()
        self.wait_for_reads()

    def forked(self) -> None:
        """In a process that was forked: no thread is here that would end what is under way in the other one."""
        self._last_read = None
        if self.being_updated:
            self.updates = [LostUpdate(f"block {self.name!r}")]

    # files: do those that a block rests in have what its homes hold? Then it can be fetched, and updated there -------
    @property
    def is_fetched(self) -> bool:
        """Whether it has to be fetched before it can be copied to the device: it does not rest in host memory."""
        return self.rest.memory is None

    def flush(self) -> None:
        """Begins to bring to the files what was written to the homes, as the next fetch would."""
        if self.is_fetched and self.rest.writable:
            self.make_homes_readable()
            self._flush(self.look())

    def readable_generation(self) -> int:
        """What the homes hold, which may be read until the next update, and is where it can be fetched from."""
        self.make_homes_readable()
        if self.is_fetched:
            self._leave_checkpoint()
        return self.look()

    def readable_table(self) -> torch.Tensor:
        """The home of a table, whose rows may be read until the next update."""
        self.keep_leaf_writes()
        self.wait_for_updates()
        self.slots[0].check_shape()
        if self.is_fetched and self.look() != self._flushed:  # what was written leaves host memory
            self._leave_checkpoint()
            self._flush(self.look())
        return self.slots[0].data

    def _leave_checkpoint(self) -> None:
        """Homes in a checkpoint move to where changes are kept if they were written to, and not just handed out."""
        if self.look() != self._flushed and not self.rest.writable:
            if self.rest.is_as_in_files and all(slot.in_place for slot in self.slots):
                self.note_flushed()
            else:
                self.make_writable()

    def make_writable(self, *, keeps: bool = True) -> None:
        """Homes in a checkpoint move to where changes are kept, with what they hold if `keeps`. BudgetError: no disk"""
        if not self.rest.writable:
            self.spill(keeps=keeps)

    def spill(self, *, keeps: bool = True) -> None:
        """The block moves to the disk tier, from host memory or a checkpoint. Its memory goes with its last user."""
        self.wait_until_free()
        before, memory_is_kept, was_loaded = self.rest, self.memory_is_kept, self.look() == self.loaded
        rest, keeps = self._tiers.hand_on(self.name, self.nbytes, self.rest, self.slots, keeps=keeps)
        for slot, place in zip(self.slots, rest.places([slot.layout for slot in self.slots]), strict=True):
            slot.move_to(place, keeps=keeps)
        self.rest, self._flushed, self._flushed_ranges = rest, -1, None
        rest.take_homes(self.slots, keeps=keeps)
        self.see_homes()
        if was_loaded and keeps:
            self.loaded = self.generation  # they hold what they held
        if rest.filled:
            self.note_flushed()
        if not memory_is_kept:
            before.forget_writes()

    def make_homes_readable(self) -> None:
        """No update is under way, and what travels in another dtype is what the homes hold."""
        self.wait_for_updates()
        self.look()
        for slot in self.slots:
            slot.check_shape()
            if slot.cast_is_old:
                self.wait_for_reads()
                slot.cast()

    def _flush(self, generation: int, ranges: Sequence[Range] | None = None) -> None:
        """The files of a block on disk get this generation, if they have another one; `ranges`: to be read."""
        known = self._flushed_ranges in (None, ranges)
        if self.is_fetched and (generation != self._flushed or not self.rest.flushed or not known):
            self.rest.flush(ranges)
            self._flushed, self._flushed_ranges = generation, ranges

    def move_written(self) -> bool:
        """Homes that were written to in a checkpoint move to where changes are kept. False: somebody refers to their
        memory, and so they stay.
        """
        if self.memory_is_kept:
            return False
        if self.rest.is_written and self.common is None:
            self.make_writable()
        return True

    # as in Unit
    def may_be_updated_in_files(self, parameters: Collection[torch.Tensor]) -> bool:
        """Whether an update of these homes, of which nothing is under way yet, may write the files in their place.

        The files have what the homes hold then. Nobody else writes this block meanwhile: all that is trained is here.
        """
        known = {id(parameter) for parameter in parameters}
        alone = all(id(slot.home) in known or not slot.home.requires_grad for slot in self.slots)
        if not (alone and self.rest.has_own_files and all(slot.in_place and not slot.casts for slot in self.slots)):
            return False
        self.flush()
        return self.in_files

    def updated_in_files(self) -> None:
        """An update of all homes was written to the files in their place."""
        self.rest.was_written()
        self.note_flushed()

    @property
    def in_files(self) -> bool:
        """Whether the files have what the homes hold."""
        return self.rest.has_own_files and self._flushed == self.look() and self.rest.flushed

    def note_flushed(self) -> None:
        """The files have what the homes hold, although nothing was flushed."""
        self._flushed, self._flushed_ranges = self.look(), None

    # binding ----------------------------------------------------------------------------------------------------------
    def unbind(self) -> None:
        """The modules' attributes become the homes again."""
        if self.keep_leaf_writes():
            self.leaves.note_none_handed_out()
        self.places.unbind()

    def keep_leaf_writes(self) -> bool:
        """What was written to leaves is the homes', too, before these are read, or either goes. Whether any may be."""
        with without_overrides():
            if not self.leaves.may_be_written():
                return False
            if self.buffer is not None and self.presence is Presence.PRESENT:
                self.wait_until_free()
                before_write(slot.home for slot in self.slots)
                for slot in self.slots:
                    if slot.keep_leaf_writes(self.buffer):
                        self._changed_alike(slot)
            self.leaves.note_writes_kept()
        return True

    def _changed_alike(self, slot: ManagedParam) -> None:
        """What the model wrote to a leaf is in its home now: the device copy is as current as it was before."""
        was_current = self.loaded == self.generation
        self.generation += 1
        slot.generation = self.generation
        if was_current:
            self.loaded = self.generation

    def _before_touch(self) -> None:
        """The user is about to get the memory of a home, and may write to it. The host waits until nobody else does."""
        self._tiers.in_place.handed_out(self)
        self.keep_leaf_writes()
        self.wait_until_free()
        before_write(slot.home for slot in self.slots)

    def _before_write(self) -> None:
        """A home is about to be written to. From a checkpoint it moves first: changed pages would take host memory."""
        if self.common is None and not self.rest.writable:
            self.make_writable()

    def take_back(self) -> None:
        """The block is not lent any more. Whoever keeps a leaf has the block brought again by using it."""
        if self.lent:
            if self.users == 1:
                self.unbind()
            self.users, self.lent = self.users - 1, False

    @property
    def may_be_taken_back(self) -> bool:
        """Whether it is bound for nothing but a parameter that a module was asked for."""
        return self.lent and self.users == 1

    @property
    def is_in_graph(self) -> bool:
        """Whether a backward has yet to use leaves that autograd has saved itself, in a pass without visits."""
        if self.may_be_saved:
            self.may_be_saved = self.buffer is not None and self.leaves.are_saved()
        return self.may_be_saved

    @property
    def is_free(self) -> bool:
        """Whether nothing speaks against its eviction: no visit, nobody who keeps a leaf that was lent, no graph that
        has saved one, and no view of its buffer, whose memory would only be held on (by a node of backward that is just
        being computed).
        """
        if self.users and (not self.may_be_taken_back or self.leaves.are_kept(self.places.references)):
            return False
        if self.buffer is None:
            return True
        if self.may_be_saved and self.is_in_graph:
            return False
        views = self.leaves.views
        for destination, _ in () if self.arrival is None else self.arrival.copies:
            views += destination is not self.buffer
        return references_beside(self.buffer) <= views

    def release(self) -> None:
        """Homes are ordinary parameters again."""
        for slot in self.slots:
            slot.release()
        for compound in self.compounds:
            compound.release()


def _flush(block: "weakref.ref[Block]", generation: int, ranges: Sequence[Range] | None) -> None:
    """As the method, for a thread that reads a fetch: it does not keep alive a model that nobody else does."""
    present = block()
    if present is not None:
        present._flush(generation, ranges)


@dataclass(frozen=True)
class BlockPart:
    """Ranges of a block that rests on disk, which are fetched alone: as Fetching takes them."""

    block: Block
    ranges: tuple[Range, ...]
    always: ClassVar[bool] = False  # whether the same ones are fetched each time

    @property
    def own_bytes(self) -> int:
        """Of the ranges."""
        return sum(nbytes for _, nbytes, _ in self.ranges)

    @property
    def nbytes(self) -> int:
        """What it takes on the device."""
        return self.own_bytes

    def look(self) -> int:
        """As the block's."""
        return self.block.look()

    def fetch(self, by: Fetching) -> Fetch:
        """As the block's."""
        return self.block.fetch(by, self.ranges, always=self.always)
