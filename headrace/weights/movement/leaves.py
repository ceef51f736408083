"""What computes in the place of a block's homes? Its leaves: views of its buffer, or of nothing while that is away."""

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch

from headrace.runtime.autograd import data_of, without_overrides
from headrace.weights.model.accumulation import is_saved
from headrace.weights.model.compound import Compound
from headrace.weights.model.home import AwayLeaf, Leaf
from headrace.weights.model.managed_param import Layout, ManagedParam

__all__ = ["AbsentLeaves", "Leaves"]

_VERSION_OF: Callable[[Leaf], int] = attrgetter("_version")
_HANDED_OUT: Callable[[Leaf], bool] = attrgetter("handed_out")


class Leaves:
    """The leaves of one block's slots, and of the compounds that these are parts of."""

    def __init__(self, slots: Sequence[ManagedParam], compounds: Sequence[Compound]) -> None:
        self._slots, self._compounds = slots, compounds
        self._leaves = [slot.leaf for slot in slots]
        self._absent = [slot.absent for slot in slots]
        self._with_bytes = sum(slot.layout.nbytes > 0 for slot in slots)
        with without_overrides():
            self.note_writes_kept()
        by_home = {id(slot.home): slot.leaf for slot in slots}
        for compound in compounds:
            compound.make_leaf({path: by_home[id(part)] for path, part in compound.parts.items()})

    def are(self, *, present: bool) -> None:
        """Whether their memory is on the device; else who keeps one has its block brought when it is used."""
        kind = Leaf if present else AwayLeaf
        for leaf in self._leaves:
            leaf.__class__ = kind
        for compound in self._compounds:
            compound.leaf_is(present=present)

    def touched(self) -> None:
        """A home was written to: what is made of several tensors is brought once more, as that leaf is."""
        for compound in self._compounds:
            compound.leaf_is(present=False)

    def point(self, views: Sequence[torch.Tensor] | None) -> None:
        """They become these views of a buffer; without, NaN of the right shape, of no memory and read-only."""
        with without_overrides():
            for leaf, view in zip(self._leaves, self._absent if views is None else views, strict=True):
                data_of.__set__(leaf, view)
            for compound in self._compounds:
                compound.follow()

    @property
    def views(self) -> int:
        """How many of them lie in the buffer."""
        own = sum(compound.own_views for compound in self._compounds) if self._compounds else 0
        return own + self._with_bytes

    def may_be_written(self) -> bool:
        """Whether the model may have written to one since `note_writes_kept`. Where torch functions are off."""
        return list(map(_VERSION_OF, self._leaves)) != self._kept_versions or True in map(_HANDED_OUT, self._leaves)

    def note_writes_kept(self) -> None:
        """What was written to them until now is the homes', too."""
        self._kept_versions = list(map(_VERSION_OF, self._leaves))

    def note_none_handed_out(self) -> None:
        """Nobody has the `data` of one any more."""
        for leaf in self._leaves:
            leaf.handed_out = False

    def are_saved(self) -> bool:
        """Whether autograd has saved one itself, and still needs it."""
        return any(map(is_saved, self._leaves))

    def are_kept(self, references: int) -> bool:
        """Whether somebody has one, beside this block and `references` of the model."""
        own = 3 * len(self._slots) + references  # the slot, the list here, and looking
        kept = sum(sys.getrefcount(slot.leaf) for slot in self._slots)
        for compound in self._compounds:
            own += compound.own_references
            kept += compound.references
        return kept > own


class AbsentLeaves:
    """What leaves hold while their block is away: one scalar for each dtype, expanded to any shape.

    All its bits are set: NaN in every floating-point format, and no sensible integer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scalars: dict[torch.dtype, torch.Tensor] = {}

    def of(self, layout: Layout) -> torch.Tensor:
        """For a leaf of that layout."""
        if layout.dtype not in self._scalars:
            bits = torch.full((layout.dtype.itemsize,), 255, dtype=torch.uint8, device=self._device)
            self._scalars[layout.dtype] = bits.view(layout.dtype).squeeze(0)
        return self._scalars[layout.dtype].expand(layout.shape)
