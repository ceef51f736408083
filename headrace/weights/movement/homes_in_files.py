"""Do the files in which a block rests have what its homes hold? Then it can be fetched, and updated there."""

from collections.abc import Collection, Sequence

import torch

from headrace.weights.model.compound import Compound
from headrace.weights.model.slot import Slot
from headrace.weights.rest.pieces import Range
from headrace.weights.rest.placement import Shelf
from headrace.weights.rest.tiers import Rest

__all__ = ["HomesInFiles"]


class HomesInFiles:
    """The part of a block that knows where its homes rest."""

    name: str
    nbytes: int
    slots: Sequence[Slot]
    compounds: Sequence[Compound]
    rest: Rest
    common: object
    _shelf: Shelf
    generation: int  # see Block
    loaded: int
    _flushed: int  # the generation that the files have; -1: none
    _flushed_ranges: Sequence[Range] | None = None  # of which alone that is known; None: of all

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
        """Homes in a checkpoint that were written to move to where that is kept; not if they were only handed out."""
        if self.look() != self._flushed and not self.rest.writable:
            if self.rest.is_as_in_files and all(slot.in_place for slot in self.slots):
                self.is_flushed()
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
        rest, keeps = self._shelf.hand_on(self.name, self.nbytes, self.rest, self.slots, keeps=keeps)
        for slot, place in zip(self.slots, rest.places([slot.layout for slot in self.slots]), strict=True):
            slot.move_to(place, keeps=keeps)
        self.rest, self._flushed, self._flushed_ranges = rest, -1, None
        rest.take_homes(self.slots, keeps=keeps)
        self.see_homes()
        if was_loaded and keeps:
            self.loaded = self.generation  # they hold what they held
        if rest.filled:
            self.is_flushed()
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
        """What may have been written to a checkpoint in place moves, unless somebody has it; whether nobody has."""
        if self.memory_is_kept:
            return False
        if self.rest.is_written and self.common is None:
            self.make_writable()
        return True

    # as in Unit -------------------------------------------------------------------------------------------------------
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
        """That was done."""
        self.rest.was_written()
        self.is_flushed()

    @property
    def in_files(self) -> bool:
        """Whether the files have what the homes hold."""
        return self.rest.has_own_files and self._flushed == self.look() and self.rest.flushed

    def is_flushed(self) -> None:
        """The files have what the homes hold, whoever has had a look at them."""
        self._flushed, self._flushed_ranges = self.look(), None

    @property
    def memory_is_kept(self) -> bool:
        """Whether somebody refers to the memory in which homes lie."""
        raise NotImplementedError

    def keep_leaf_writes(self) -> bool:
        """What the model wrote to leaves is the homes', too. Whether there may have been any."""
        raise NotImplementedError

    def wait_for_updates(self) -> None:
        """The host waits until no optimizer writes the homes any more."""
        raise NotImplementedError

    def wait_for_reads(self) -> None:
        """The host waits until no copy reads the homes any more."""
        raise NotImplementedError

    def wait_until_free(self) -> None:
        """The host may read and write the homes: nobody else does."""
        raise NotImplementedError

    def look(self) -> int:
        """The generation of what the homes hold now."""
        raise NotImplementedError

    def see_homes(self) -> None:
        """They lie elsewhere, or are others: another generation, and what `look` compares with from now on."""
        raise NotImplementedError
