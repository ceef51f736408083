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
from headrace.runtime.capture import before_write, has_written
from headrace.runtime.lanes import Copy, Event, LateTransfer, Transfer
from headrace.runtime.pending import LostUpdate, Manager, Pending, Watcher
from headrace.runtime.threads import wait_asleep
from headrace.weights.model.experts import Experts
from headrace.weights.model.layout import lay_out
from headrace.weights.model.managed_param import REMOVED, Layout, ManagedParam
from headrace.weights.model.places import Member, Places
from headrace.weights.model.precision import ParamDtype
from headrace.weights.movement.leaves import AbsentLeaves, Leaves
from headrace.weights.rest.fetching import Fetch, Fetching
from headrace.weights.rest.reads import Range
from headrace.weights.rest.rests import DiskRest, HostRest, Rest
from headrace.weights.rest.tiers import Tiers

_KINDS: dict[tuple[Layout, ...], int] = {}  # a number for each layout: blocks of one kind have the same layout
_VERSION_OF: Callable[[torch.Tensor], int] = attrgetter("_version")
_ADDRESS_OF = torch.Tensor.data_ptr


class Presence(Enum):
    """The state of a block's device copy."""

    ABSENT = auto()  # `buffer` is None exactly then, but while Residency makes or frees it
    RESERVED = auto()  # there is a buffer, but no copy into it was submitted yet
    ARRIVING = auto()  # a copy into the buffer was submitted, and compute has not waited for it
    PRESENT = auto()


_NEXT = {
    Presence.ABSENT: {Presence.RESERVED},
    Presence.RESERVED: {Presence.ARRIVING, Presence.ABSENT},
    Presence.ARRIVING: {Presence.PRESENT},
    Presence.PRESENT: {Presence.ABSENT, Presence.ARRIVING},  # it arrives once more where homes have changed
}


class Block:
    """Parameters that travel together: their bytes rest in one arena, and are one buffer of leaves on the device."""

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        device: torch.device,
        tiers: Tiers,
        param_dtype: ParamDtype = None,
    ) -> None:
        self.name = name
        self.device = device
        # How it travels: `offload()` sets `index`, `row_bytes`, `experts` and `expert_key` of blocks that stream.
        self.index = -1  # its number among the blocks that stream; -1: it is resident
        self.may_stay_at_home = False  # the device reads host memory: leaves may be views of where the block rests
        self.row_bytes = 0  # the size of a row, if only rows of it travel (movement/rows.py); 0: it travels whole
        self.experts: Experts | None = None  # if they travel one by one (movement/slices.py); None: it travels whole
        self.trains_whole = False  # whether its experts were used as a whole weight while they were trained
        self.expert_key: Key | None = None  # of an expert that is a module: layer, number (module_experts.py)
        self.buffer: torch.Tensor | None = None
        self.allocated: Event | None = None  # when the last user of the buffer's memory is done with it
        self.arrival: Transfer | LateTransfer | None = None  # the last copy into the buffer
        self.users = 0  # how many visits under way have it bound
        self.lent = False  # one user is a module that was only asked for a parameter: `take_back` can end that
        self.model_writes: bool | None = None  # whether the model ever wrote to its leaves; None: it has not run yet
        self.may_be_saved = False  # autograd may have saved the leaves themselves, in a pass without visits
        self.updates: list[Pending] = []  # these write the homes; whoever reads the homes waits for them
        self.watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()  # they are told when gradients are complete
        self.common: object = None  # the `CommonHomes` of a node whose ranks have one copy of the homes
        self.order = -1  # its place in the order in which a forward needs blocks
        self.presence = Presence.ABSENT  # only `becomes` and `lost` change it
        self.last_read: Event | None = None  # when homes have been read for the last copy; not to be written before
        self.generation = 0  # a number for what the homes held at the last look, see `look`
        self.loaded_generation = -1  # that of the device copy; -1: there is none, or it cannot be known
        self.last_loaded_generation = -1  # that of the last device copy, which may be gone
        self.written_generation = 0  # that at which a home was last written (handing one out does not count)
        self._as_arena = -1  # the generation for which a copy of the arena alone was enough
        self._tiers = tiers
        self._left: DiskRest | None = None  # the files that it had before it returned to host memory
        self.manager: Manager  # set by `Engine`, of which each offloaded model has one
        self._lay_down(members, device, param_dtype)
        self.packed = tiers.packed_copy(name)
        self.compounds = list(dict.fromkeys(member.compound for member in members if member.compound is not None))
        self.leaves = Leaves(self.params, self.compounds)
        self.params_by_offset = sorted(self.params, key=lambda param: param.layout.offset)
        self.param_offsets = [param.layout.offset for param in self.params_by_offset]
        self.places = Places(
            [(place, param) for member, param in zip(members, self.params, strict=True) for place in member.places]
        )
        # Makes leaves the modules' attributes; with `adopts`, what users put in place of homes becomes the home first.
        self.bind: Callable[..., None] = self.places.bind
        for param in self.params:
            param.count_references()
        self._flushed = self.generation if self.rest.filled else -1  # the generation that the files hold; -1: none
        self._flushed_ranges: Sequence[Range] | None = None  # the ranges that `_flushed` is known of; None: all
        self._flush(self.generation)

    def _lay_down(self, members: Sequence[Member], device: torch.device, param_dtype: ParamDtype) -> None:
        """Called by the constructor: moves the homes' bytes to where they rest, and makes a ManagedParam for each."""
        parameters = [member.parameter for member in members]
        layouts, self.nbytes = lay_out(parameters, param_dtype)
        self.layouts, self.kind = layouts, _KINDS.setdefault(tuple(layouts), len(_KINDS))
        self.rest = self._tiers.rest_for(self.name, parameters, layouts, self.nbytes)
        absent = AbsentLeaves(device)
        self.params = [
            ManagedParam(
                member.name, member.parameter, layout, rest, absent.of(layout), self._before_touch, self._before_write
            )
            for member, layout, rest in zip(members, layouts, self.rest.tensors(layouts), strict=True)
        ]
        for param in self.params:
            param.unit = self
            param.on_change = self._changed
        self.rest.take_homes(self.params)
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self.see_homes()

    def becomes(self, new: Presence) -> None:
        """Changes the state of the device copy. Raises StateError where `new` cannot follow the present state."""
        was = self.presence
        if new not in _NEXT[was]:
            raise StateError(f"block {self.name!r} is {was.name} and cannot become {new.name}")
        if new is Presence.PRESENT:  # leaves first: Ctrl-C must not leave a PRESENT block with leaves that are away
            self.leaves.set_present(present=True)
        self.presence = new
        if was is Presence.PRESENT:
            self.leaves.set_present(present=False)

    def lost(self) -> None:
        """Makes the block ABSENT, whatever its state: a copy was broken off."""
        self.presence = Presence.ABSENT
        self.leaves.set_present(present=False)

    def look(self) -> int:
        """The generation of what the homes hold now. It is a new number where a home may have changed.

        Writes through `data`, and those that an optimizer announces, raise it at once (`_changed`). Other writes raise
        the version that autograd counts; other memory in a home's place shows in the address. This compares both.
        """
        for compound in self.compounds:
            compound.notice_writes()
        homes = self._homes
        versions, addresses = list(map(_VERSION_OF, homes)), list(map(_ADDRESS_OF, homes))
        if versions != self._versions or addresses != self._addresses:
            self.generation += 1
            seen = zip(self.params, versions, self._versions, addresses, self._addresses, strict=True)
            for param, version, last_version, address, last_address in seen:
                param.home.follow()
                if version != last_version:
                    self.written_generation = param.generation = self.generation
                elif address != last_address:
                    param.generation = self.generation
            self._versions, self._addresses = versions, addresses
        return self.generation

    def see_homes(self) -> None:
        """Called when homes have moved or were replaced: begins a generation for `look` to compare with."""
        self._homes = [param.shown for param in self.params]
        self._versions = list(map(_VERSION_OF, self._homes))
        self._addresses = list(map(_ADDRESS_OF, self._homes))
        self.generation += 1
        for param in self.params:
            param.generation = self.generation

    @property
    def is_current(self) -> bool:
        """Whether there is a device copy, and it has what the homes hold. Looks at the homes now (`look`)."""
        return self.look() == self.loaded_generation

    def _changed(self, param: ManagedParam, written: bool) -> None:
        """Called when a home may have changed: it was `written`, or its memory was handed out."""
        self.generation += 1
        param.generation = self.generation
        if written:
            self.written_generation = self.generation
        self.leaves.touched()
        if self.users:
            self.places.hide_leaves()  # a module that is asked for a leaf brings the block once more
        if self._homes[self.params.index(param)] is not param.shown:
            self._homes = [one.shown for one in self.params]

    # bytes ------------------------------------------------------------------------------------------------------------
    def prepare_copies(self, *, only_changes: bool = False) -> list[Copy]:
        """Prepares the homes to be read, and returns the copies from host memory that bring the buffer up to them.

        Notes the copies as made: the caller submits them at once or, where that fails, gives up the buffer
        (`Residency._undo`).

        The copies are the whole arena, and then the homes that the user re-pointed; at home, only the homes that moved
        to memory which processes share. With `only_changes`, the buffer holds an older state: only the parameters that
        changed are copied, unless most have. A block on disk is fetched whole, so that only its re-pointed homes are
        copied.
        """
        if self.buffer is None:
            raise StateError(f"block {self.name!r} has no buffer to copy into")
        if self.updates:
            self.wait_for_updates()
        if self.presence is Presence.PRESENT:
            self.keep_leaf_writes()  # the copies would overwrite them
        generation = self.look()
        memory = None if self.buffer is self.rest.memory else self.rest.memory
        if self._as_arena == generation and not only_changes:  # so no shape has changed either
            self.loaded_generation = self.last_loaded_generation = generation
            return [] if memory is None else [(self.buffer, memory)]
        self.make_homes_readable()
        changed = [
            param for param in self.params if param.generation > self.loaded_generation or param.others_may_write
        ]
        copies: list[Copy] = []
        if self.buffer is self.rest.memory:  # the homes are there, but for those that were shared since
            changed = [param for param in changed if param.is_shared and not param.casts]
        elif not only_changes or self.is_fetched or 2 * len(changed) > len(self.params):
            if memory is not None:
                copies.append((self.buffer, memory))
            changed = [param for param in self.params if not param.casts and not param.in_place]
        # Detached: a view would hold a reference to its base that `is_free` does not expect.
        copies += [(param.layout.view(self.buffer).detach(), param.source) for param in changed if param.layout.nbytes]
        self.tell_autograd()
        for param in self.params:
            param.loaded_token = param.token
        self.loaded_generation = self.last_loaded_generation = generation
        if any(param.others_may_write for param in self.params):
            self.loaded_generation = -1  # it cannot be known
        self._as_arena = generation if all(param.in_place for param in self.params) else -1
        return copies

    @property
    def is_at_home(self) -> bool:
        """Whether its buffer is the memory in which it rests: there is no other copy of it."""
        return self.buffer is not None and self.buffer is self.rest.memory

    @property
    def stays_at_home(self) -> bool:
        """Whether its buffer is to be the memory in which it rests; asked where it may be (`may_stay_at_home`). Not if
        updates begin within backward, which reads the old weights, nor if a user has re-pointed a home and may hold its
        old memory.
        """
        return not any(watcher.begins_updates for watcher in self.watchers) and all(
            param.casts or param.in_place or param.is_shared for param in self.params
        )

    def tell_autograd(self) -> None:
        """Called when homes may hold other values than the device copy. Raises the version of such leaves if autograd
        may have saved them in a forward without visits: backward then raises an error, as it would for homes.
        """
        others = [param for param in self.params if param.is_old_on_device] if self.may_be_saved else []
        if others:
            with without_overrides():
                torch.autograd.graph.increment_version([param.leaf for param in others])
            for param in others:
                param.kept_version += 1  # raising a version wrote nothing
            self.leaves.note_kept_versions()

    @property
    def memory_is_kept(self) -> bool:
        """Whether a user refers to the memory in which homes lie (`kept = p.data`), so that a move frees nothing."""
        return any(param.in_place and param.memory_is_kept for param in self.params)

    @property
    def travels_in_parts(self) -> bool:
        """Whether its rows or experts come when they are used, so that no visit brings the whole block."""
        return bool(self.row_bytes) or self.experts is not None

    def fetch(self, by: Fetching, ranges: Sequence[Range] | None = None, *, always: bool = False) -> Fetch:
        """A fetch from disk of what the homes hold now, in chunks of `by`. With `ranges`, it fetches only these;
        `always`: each fetch of this block has the same ranges.
        """
        generation = self.readable_generation()
        nbytes = self.nbytes if ranges is None else sum(one.nbytes for one in ranges)
        pieces = self.rest.pieces(by.chunk_bytes, ranges)
        if ranges is None:
            pieces = self.packed.pieces(pieces, self.params, by, generation, self.rest)
        flush = partial(_flush, weakref.ref(self), generation, ranges if always else None)
        fetch = Fetch(pieces, nbytes, generation, flush, by)
        self.last_read = fetch
        return fetch

    def wait_for_reads(self) -> None:
        """The host waits until no copy reads the homes. A fetch that nobody has asked for is withdrawn."""
        if self.last_read is not None:
            wait_asleep(self.last_read)
            self.last_read = None

    @property
    def being_updated(self) -> bool:
        """Whether an optimizer is still writing the homes, or has failed to and nobody has been told."""
        for update in self.updates:  # noqa: SIM110  # asked at every visit
            if not update.done():
                return True
        return False

    def wait_for_updates(self) -> None:
        """The host waits until no optimizer is writing the homes. Raises what failed in an update."""
        if self.updates:
            for update in list(self.updates):
                update.wait()
            self.updates = [update for update in self.updates if not update.done()]

    def wait_until_free(self) -> None:
        """The host waits until nobody else reads or writes the homes, so that it may."""
        self.wait_for_updates()
        self.wait_for_reads()

    def forked(self) -> None:
        """Called in a forked process, where no thread ends what was under way: forgets reads, marks updates as lost."""
        self.last_read = None
        if self.being_updated:
            self.updates = [LostUpdate(f"block {self.name!r}")]

    # files: where they hold what the homes hold, the block can be fetched from them, and updated in them -------------
    @property
    def is_fetched(self) -> bool:
        """Whether it must be fetched before it can be copied to the device, as it does not rest in host memory."""
        return self.rest.memory is None

    def flush(self) -> None:
        """Begins to write to the files what was written to the homes, as the next fetch would."""
        if self.is_fetched and self.rest.writable:
            self.make_homes_readable()
            self._flush(self.look())

    def readable_generation(self) -> int:
        """Prepares the homes to be read or fetched until the next update, and returns their generation."""
        self.make_homes_readable()
        if self.is_fetched:
            self._leave_checkpoint()
        return self.look()

    def readable_table(self) -> torch.Tensor:
        """The home of a table, prepared so that its rows may be read until the next update."""
        self.keep_leaf_writes()
        self.wait_for_updates()
        self.params[0].check_shape()
        if self.is_fetched and self.look() != self._flushed:  # frees the host memory that writes took
            self._leave_checkpoint()
            self._flush(self.look())
        return self.params[0].data

    def _leave_checkpoint(self) -> None:
        """Moves homes from a checkpoint to where changes are kept, if they were written to, not just handed out."""
        if self.look() != self._flushed and not self.rest.writable:
            if self.rest.is_as_in_files and all(param.in_place for param in self.params):
                self.note_flushed()
            else:
                self.make_writable()

    def make_writable(self, *, keeps: bool = True) -> None:
        """Moves homes from a checkpoint to where changes are kept; `keeps`: with their values. BudgetError: no disk."""
        if not self.rest.writable:
            self.spill(keeps=keeps)

    def spill(self, *, keeps: bool = True) -> None:
        """Moves the block to disk, from host memory or a checkpoint. Its memory is freed with its last user."""
        among = self.name, self.nbytes, self.rest, self.params, self._left
        self._move(partial(self._tiers.hand_on, *among, keeps=keeps))

    def return_to_host(self) -> None:
        """Moves the block from the disk tier to host memory; its files stay for another `spill`.

        Raises BudgetError where there is no room, and DiskError if the drive fails; the block stays on disk then.
        """
        left = self.rest
        if not isinstance(left, DiskRest):
            return
        self.flush()
        self._move(partial(self._read_from, left))
        self._left, left.filled = left, False  # from now on, the homes change elsewhere

    def _read_from(self, files: DiskRest) -> tuple[HostRest, bool]:
        """See `_move`: a rest in host memory, read past the page cache where the files hold what the homes hold."""
        keeps = not (self.in_files and all(param.in_place or param.casts for param in self.params))
        homes = [param.home for param in self.params]
        return self._tiers.on_host(self.nbytes, homes, None if keeps else files), keeps

    def _move(self, make: Callable[[], tuple[Rest, bool]]) -> None:
        """Moves the block to another rest. `make`: returns it, and whether the homes have to be copied there."""
        if self.common is None:
            self.make_homes_readable()  # casts move as they are
        self.wait_until_free()
        before, memory_is_kept, was_loaded = self.rest, self.memory_is_kept, self.look() == self.loaded_generation
        rest, keeps = make()
        places = [param.rest for param in self.params]
        try:
            for param, place in zip(self.params, rest.tensors([param.layout for param in self.params]), strict=True):
                param.move_to(place, keeps=keeps)
            self.rest, self._flushed, self._flushed_ranges = rest, -1, None
            rest.take_homes(self.params, keeps=keeps)
            self.see_homes()
        except BaseException:  # Ctrl-C, or the drive: the block is as a whole where it was
            for param, place in zip(self.params, places, strict=True):
                param.move_to(place, keeps=False)
            self.rest, self._flushed, self._flushed_ranges, rest.filled = before, -1, None, False
            self.see_homes()
            raise
        for param in self.params:
            param.count_references()
            if param.casts and self.common is None:
                param.note_cast()
        if was_loaded and keeps:
            self.loaded_generation = self.generation  # their values are unchanged
        if rest.filled:
            self.note_flushed()
        if not memory_is_kept:
            before.forget_writes()

    def make_homes_readable(self) -> None:
        """Waits for updates, and casts anew the homes that travel in another dtype, where their casts are old."""
        self.wait_for_updates()
        self.look()
        for param in self.params:
            param.check_shape()
            if param.cast_is_old:
                self.wait_for_reads()
                param.cast()

    def _flush(self, generation: int, ranges: Sequence[Range] | None = None) -> None:
        """Writes this generation to the files of a block on disk, unless they have it; `ranges`: what will be read."""
        known = self._flushed_ranges in (None, ranges)
        if self.is_fetched and (generation != self._flushed or not self.rest.flushed or not known):
            self.rest.flush(ranges)
            self._flushed, self._flushed_ranges = generation, ranges

    def move_written(self) -> bool:
        """Moves homes that were written to from a checkpoint to where changes are kept. False: a user refers to their
        memory, so they stay.
        """
        if self.memory_is_kept:
            return False
        if self.rest.is_written and self.common is None:
            self.make_writable()
        return True

    # `may_be_updated_in_files` and `updated_in_files` are part of the protocol `Unit` -------------------------------
    def may_be_updated_in_files(self, parameters: Collection[torch.Tensor]) -> bool:
        """Whether an update of these homes that has not begun may write the files instead of the homes.

        If so, the files hold what the homes hold, and `parameters` are all that is trained of this block: nobody else
        writes it meanwhile.
        """
        known = {id(parameter) for parameter in parameters}
        alone = all(id(param.home) in known or not param.home.requires_grad for param in self.params)
        if not (alone and self.rest.has_own_files and all(param.in_place and not param.casts for param in self.params)):
            return False
        self.flush()
        return self.in_files

    def updated_in_files(self) -> None:
        """Called when an update of all homes was written to the files instead."""
        self.rest.was_written()
        self.note_flushed()

    @property
    def in_files(self) -> bool:
        """Whether the files hold what the homes hold. Looks at the homes now (`look`)."""
        return self.rest.has_own_files and self._flushed == self.look() and self.rest.flushed

    def note_flushed(self) -> None:
        """Notes that the files hold what the homes hold, although nothing was flushed."""
        self._flushed, self._flushed_ranges = self.look(), None

    # binding ----------------------------------------------------------------------------------------------------------
    def unbind(self) -> None:
        """Makes the homes the modules' attributes again."""
        if self.keep_leaf_writes():
            self.leaves.note_none_handed_out()
        if self.model_writes is None:
            self.model_writes = False  # seen now, and nothing was written
        self.places.unbind()

    def keep_leaf_writes(self) -> bool:
        """Copies what the model wrote to leaves into the homes. Called before homes are read, or homes or leaves go.

        Returns whether anything may have been written.
        """
        with without_overrides():
            if not self.leaves.may_be_written():
                return False
            if self.buffer is not None and self.presence is Presence.PRESENT:
                self.wait_until_free()
                if self.is_at_home and self.model_writes is False:  # else it was asked before the pass
                    has_written(param.home for param in self.params)
                before_write(param.home for param in self.params)
                for param in self.params:
                    if param.keep_leaf_writes(self.buffer):
                        self.model_writes = True
                        self._changed_alike(param)
            self.leaves.note_writes_kept()
        return True

    def _changed_alike(self, param: ManagedParam) -> None:
        """Called when a home got what the model wrote to its leaf: the device copy is as current as it was before."""
        was_current = self.loaded_generation == self.generation
        self.generation += 1
        param.generation = self.generation
        if was_current:
            self.loaded_generation = self.generation

    def _before_touch(self) -> None:
        """Called before the user gets the memory of a home, and may write to it: waits until nobody else uses it."""
        self._tiers.read_in_place.handed_out(self)
        self.keep_leaf_writes()
        self.wait_until_free()
        before_write(param.home for param in self.params)

    def _before_write(self) -> None:
        """Called before a home is written to: waits until no copy reads it, and moves it out of a checkpoint, where
        changed pages take host memory.
        """
        self.wait_for_reads()
        if self.common is None and not self.rest.writable:
            self.make_writable()

    def take_back(self) -> None:
        """Ends the lending of the block. Where a user keeps a leaf, using that leaf brings the block again."""
        if self.lent:
            if self.users == 1:
                self.unbind()
            self.users, self.lent = self.users - 1, False

    @property
    def may_be_taken_back(self) -> bool:
        """Whether it is bound only because a module was asked for a parameter."""
        return self.lent and self.users == 1

    @property
    def is_in_graph(self) -> bool:
        """Whether a backward has yet to use leaves themselves, which autograd saved in a pass without visits. Clears
        `may_be_saved` where none has.
        """
        if self.may_be_saved:
            self.may_be_saved = self.buffer is not None and self.leaves.are_saved()
        return self.may_be_saved

    @property
    def is_free(self) -> bool:
        """Whether it may be evicted: no visit has it bound, no user keeps a leaf that was lent, no graph has saved one,
        and no view of its buffer exists elsewhere (in a node that backward is computing), which would keep the memory.
        """
        if self.users and (not self.may_be_taken_back or self.leaves.are_kept(self.places.references)):
            return False
        if self.buffer is None:
            return True
        if self.may_be_saved and self.is_in_graph:
            return False
        views = self.leaves.with_bytes
        for compound in self.compounds:
            views += compound.own_views
        for destination, _ in () if self.arrival is None else self.arrival.copies:
            views += destination is not self.buffer
        return references_beside(self.buffer) <= views

    def release(self) -> None:
        """Makes the homes ordinary parameters again. Afterwards the block has no parameters, and no memory where they
        rest. May be called again, also after Ctrl-C in it.
        """
        for param in self.params:
            param.release()
        for compound in self.compounds:
            compound.release()
        self.places, self.leaves = Places(()), Leaves((), ())
        self.bind = self.places.bind
        self._homes, self._versions, self._addresses = [], [], []
        self.params_by_offset, self.param_offsets = [], []
        vars(self).pop("rest", None)
        self.compounds, self.params = [], []


def block_of(param: ManagedParam) -> Block:
    """The block that a parameter travels in. Raises StateError after the model was let go of."""
    if not isinstance(param.unit, Block):
        raise StateError(REMOVED)
    return param.unit


def _flush(block: "weakref.ref[Block]", generation: int, ranges: Sequence[Range] | None) -> None:
    """Calls `Block._flush` on the thread that reads a fetch, which must not keep the model alive."""
    present = block()
    if present is not None:
        present._flush(generation, ranges)


@dataclass(frozen=True)
class BlockPart:
    """Ranges of a block on disk that are fetched without the rest of it. `Fetching` treats this like a block."""

    block: Block
    ranges: tuple[Range, ...]
    always: ClassVar[bool] = False  # whether each fetch of the block has the same ranges

    @property
    def own_bytes(self) -> int:
        """The bytes of the ranges."""
        return sum(one.nbytes for one in self.ranges)

    @property
    def nbytes(self) -> int:
        """The bytes that the ranges take on the device."""
        return self.own_bytes

    def look(self) -> int:
        """The generation of what the block's homes hold, see `Block.look`."""
        return self.block.look()

    def fetch(self, by: Fetching) -> Fetch:
        """A fetch of these ranges, see `Block.fetch`."""
        return self.block.fetch(by, self.ranges, always=self.always)
