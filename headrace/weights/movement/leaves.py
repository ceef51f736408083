"""What computes in place of a block's homes? Its leaves: views of its buffer, or of no memory while it has none."""

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch

from headrace.runtime.autograd import data_of, without_overrides
from headrace.weights.model.accumulation import is_saved
from headrace.weights.model.compound import Compound
from headrace.weights.model.home import AwayLeaf, Leaf
from headrace.weights.model.managed_param import Layout, ManagedParam

_VERSION_OF: Callable[[Leaf], int] = attrgetter("_version")
_KEPT_VERSION_OF: Callable[[ManagedParam], int] = attrgetter("kept_version")


class Leaves:
    """The leaves of one block's parameters, and of the compounds that these parameters are parts of."""

    def __init__(self, params: Sequence[ManagedParam], compounds: Sequence[Compound]) -> None:
        self._params, self._compounds = params, compounds
        self._leaves = [param.leaf for param in params]
        self._absent = [param.absent for param in params]
        self._handed_out_ids: set[int] = set()  # the ids of leaves whose `data` somebody may have
        for leaf in self._leaves:
            leaf.handed_out_ids = self._handed_out_ids
        self.note_kept_versions()
        self.with_bytes = sum(param.layout.nbytes > 0 for param in params)  # how many lie in the buffer
        by_home = {id(param.home): param.leaf for param in params}
        for compound in compounds:
            compound.make_leaf({path: by_home[id(part)] for path, part in compound.parts.items()})

    def set_present(self, *, present: bool) -> None:
        """Sets whether the leaves' memory is on the device. If not, using a leaf that was kept brings its block."""
        kind = Leaf if present else AwayLeaf
        for leaf in self._leaves:
            leaf.__class__ = kind
        for compound in self._compounds:
            compound.set_leaf_present(present=present)

    def touched(self) -> None:
        """Called when a home was written to: using a compound's leaf then brings the block again."""
        for compound in self._compounds:
            compound.set_leaf_present(present=False)

    def point(self, views: Sequence[torch.Tensor] | None) -> None:
        """Makes the leaves these views of a buffer; None: NaN of the right shape, read-only and without memory."""
        with without_overrides():
            for leaf, view in zip(self._leaves, self._absent if views is None else views, strict=True):
                data_of.__set__(leaf, view)
            for compound in self._compounds:
                compound.follow()

    def may_be_written(self) -> bool:
        """Whether the model may have written to a leaf since `note_writes_kept`. Called within `without_overrides`."""
        return bool(self._handed_out_ids) or list(map(_VERSION_OF, self._leaves)) != self._kept_versions

    def note_writes_kept(self) -> None:
        """Notes that the homes have all that was written to the leaves until now. Called within `without_overrides`."""
        for param in self._params:
            param.kept_version = param.leaf._version
        self.note_kept_versions()

    def note_kept_versions(self) -> None:
        """Called when the `kept_version` of a parameter has changed. All of them are kept as a list, too, so that
        `may_be_written`, which is asked at every visit, compares two lists.
        """
        self._kept_versions = list(map(_KEPT_VERSION_OF, self._params))

    def note_none_handed_out(self) -> None:
        """Notes that nobody has the `data` of a leaf."""
        self._handed_out_ids.clear()

    def are_saved(self) -> bool:
        """Whether autograd has saved a leaf itself, and still needs it."""
        return any(map(is_saved, self._leaves))

    def are_kept(self, references: int) -> bool:
        """Whether somebody has a leaf, beside this block and the `references` of the model."""
        own = 3 * len(self._params) + references  # each by its parameter, the list here, and the call that counts
        kept = sum(sys.getrefcount(param.leaf) for param in self._params)
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
        """The tensor for a leaf of that layout."""
        if layout.dtype not in self._scalars:
            bits = torch.full((layout.dtype.itemsize,), 255, dtype=torch.uint8, device=self._device)
            self._scalars[layout.dtype] = bits.view(layout.dtype).squeeze(0)
        return self._scalars[layout.dtype].expand(layout.shape)
