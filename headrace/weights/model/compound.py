"""Which weights are not one plain tensor? Those of quantisers: a class of their own around plain ones, which travel.

The user's object stays as it is, but for the memory of the tensors inside it, its *parts* (anatomy.py). Another object
of its class, made around the leaves of the parts, computes in its place.
"""

import sys
import weakref
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from headrace.errors import LayoutError, StateError
from headrace.runtime.autograd import data_of, make_subclass, without_overrides
from headrace.weights.model.anatomy import OWN_DATA, Attributes, parts_of, rebuilt
from headrace.weights.model.home import GONE, AliasParam, AwayLeaf, Home, Leaf, owner_of, raw_data

_VIEWS = frozenset(("t", "view", "detach"))
_PLAIN = frozenset((torch.Tensor, nn.Parameter, Home, Leaf, AwayLeaf, AliasParam))
_known: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()  # the compound of each weight and of each leaf, weakly


class Compound:
    """One weight. `shown` is the user's object, `parts` its plain tensors, and `leaf` the object that computes."""

    def __init__(self, name: str, shown: torch.Tensor) -> None:
        self.name = name
        self.shown = shown
        self.parts: dict[str, Any] = {
            path: AliasParam.of(part) for path, part in parts_of(shown)
        }  # homes, once it travels
        self.leaf: Any = None
        self._leaves: dict[str, Leaf] = {}
        self._kind = type(shown)
        self._away = _away_kind(self._kind)
        self.own_references = 0  # its own to the parts' leaves, and those to its leaf while they are counted
        self._views: list[weakref.ref[LeafView]] = []  # views of its leaf that may still be in use
        self._attributes: Attributes  # those of the user's object when the leaf was made
        self._seen_version = version_of(shown)
        _known[shown] = weakref.ref(self)

    @property
    def owner(self) -> Any:
        """The owner of its first part. All parts travel together."""
        return next(iter(self._leaves.values())).owner()

    @property
    def own_views(self) -> int:
        """How many tensors lie in the block's buffer for it, beside the leaves of its parts."""
        return 1 + len(self._kept_views()) if OWN_DATA in self.parts else 0

    def make_leaf(self, leaves: Mapping[str, Leaf]) -> None:
        """Makes the leaf around the leaves of the parts, which are given by the parts' names."""
        self.leaf, self._leaves = None, {}  # drops the leaf that was made before
        before = _references(leaves.values())
        with without_overrides(), torch.no_grad():
            self._leaves = dict(leaves)
            self.leaf = rebuilt(self.shown, self._leaves)
            self._attributes = Attributes(self.shown)
            if any(type(leaf) is AwayLeaf for leaf in leaves.values()):
                self.leaf.__class__ = self._away
        if OWN_DATA in self.parts:
            self.leaf.t = partial(_viewed, weakref.ref(self), "t")
            self.leaf.view = partial(_viewed, weakref.ref(self), "view")
        self.own_references = 2 + _references(leaves.values()) - before
        _known[self.leaf] = weakref.ref(self)

    def notice_writes(self) -> None:
        """Tells the parts' owners of writes in place to a wrapper, which raise its own version and no part's."""
        version = version_of(self.shown)
        if version != self._seen_version:
            self._seen_version = version
            for home in self.parts.values():
                owner_of(home).changed_untraced()

    def catch_up(self) -> None:
        """Takes over other tensors that the user put in the place of its parts (`weight.data = t`, `weight.scale = t`).

        Raises LayoutError if one of them has another shape or dtype. Called at every visit.
        """
        with without_overrides():
            if self._attributes.changed():
                now = dict(parts_of(self.shown))
                if now.keys() != self.parts.keys():
                    raise LayoutError(self._changed(f"a {self._kind.__name__} made of {', '.join(now)}"))
                self._adopt_parts({path: part for path, part in now.items() if part is not self.parts[path].tensor})
            for home in self.parts.values():
                if home.leads and home.tensor.data_ptr() != home.data_ptr():
                    home.data = data_of.__get__(home.tensor)

    def _changed(self, now: str) -> str:
        return (
            f"parameter {self.name!r} was offloaded as a {self._kind.__name__} made of {', '.join(self.parts)}, and is"
            f" {now} now. Call remove() on the handle before such a change, and offload again after it"
        )

    def adopt(self, weight: torch.Tensor) -> bool:
        """Takes over another weight that the user put in its place. False if that weight has a compound already."""
        if compound_of(weight) is not None:
            return False  # the two are tied now
        parts = dict(parts_of(weight)) if is_compound(weight) else {}
        if type(weight) is not self._kind or parts.keys() != self.parts.keys():
            raise LayoutError(self._changed(f"a {type(weight).__name__}"))
        _known.pop(self.shown, None)
        self.shown = weight
        _known[weight] = weakref.ref(self)
        self._adopt_parts(parts)
        return True

    def _adopt_parts(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Makes these its parts, and makes the leaf again, as other attributes of the weight may have changed, too."""
        for path, part in parts.items():
            owner = owner_of(self.parts[path])
            owner.adopt(AliasParam.of(part))
            self.parts[path] = owner.home
        self.make_leaf(self._leaves)

    def undo_rewrites(self) -> None:
        """Makes the leaf again if the module put other data into it. Called when a visit ends.

        bitsandbytes does so on CPUs with AVX512-BF16, in calls without gradients, to lay out weights for its kernel.
        """
        if OWN_DATA in self.parts and raw_data(self.leaf).data_ptr() != raw_data(self._leaves[OWN_DATA]).data_ptr():
            self.make_leaf(self._leaves)

    def set_leaf_present(self, *, present: bool) -> None:
        """Sets whether the memory of its parts is on the device. If it is not, using the leaf brings it back."""
        self.leaf.__class__ = self._kind if present else self._away
        for view in self._kept_views():
            view.__class__ = LeafView if present else _away_kind(LeafView)

    def follow(self) -> None:
        """Points the leaf and its views to the data of its part's leaf, which was pointed elsewhere."""
        if OWN_DATA in self.parts:
            data = raw_data(self._leaves[OWN_DATA])
            data_of.__set__(self.leaf, data)
            for view in self._kept_views():
                view.follow(data)

    def view(self, data: torch.Tensor) -> "LeafView":
        """A view of its leaf that leaves the device and returns together with the leaf.

        bitsandbytes keeps such views from forward to backward, where no hook of autograd's sees them.
        """
        made = LeafView.of(data, raw_data(self._leaves[OWN_DATA]))
        made.compound = self
        if isinstance(self.leaf, AwayCompound):
            made.__class__ = _away_kind(LeafView)
        self._views.append(weakref.ref(made))
        _known[made] = weakref.ref(self)
        return made

    def stand_in(self, leaf: torch.Tensor) -> torch.Tensor:
        """The user's object in the place of its leaf, or a view of that object in the place of a view of the leaf."""
        if not isinstance(leaf, LeafView):
            return self.shown
        with without_overrides():
            return leaf.over(self.shown.detach())

    def _kept_views(self) -> "list[LeafView]":
        found = [(reference, reference()) for reference in self._views]
        self._views = [reference for reference, view in found if view is not None]
        return [view for _, view in found if view is not None]

    @property
    def references(self) -> int:
        """The number of references to its leaf, including the one in this object."""
        return sys.getrefcount(self.leaf)

    def prepare_leaf(self) -> None:
        """Called when a visit begins. Raises LayoutError if the weight can no longer travel, or its parts changed."""
        self.check()
        self.catch_up()

    def check(self) -> None:
        """Raises LayoutError if the weight cannot travel as it is now: if it is trained."""
        if self.shown.requires_grad:
            raise LayoutError(
                f"parameter {self.name!r} cannot be offloaded: it is a {self._kind.__name__} that is trained, and"
                " weights of classes of their own travel when they are frozen. Freeze it (requires_grad_(False)) and"
                " train adapters beside it, or train plain parameters"
            )

    def release(self) -> None:
        """Stops managing the user's object, which is an ordinary weight again."""
        for known in (self.shown, self.leaf):
            _known.pop(known, None)
        self.leaf.__class__ = self._kind


class LeafView(torch.Tensor):
    """A view of a compound's leaf. It behaves like a plain tensor."""

    compound: Compound
    _offset: int  # elements from the start of the leaf
    _stride: tuple[int, ...]

    @classmethod
    def of(cls, data: torch.Tensor, leaf: torch.Tensor) -> "LeafView":
        """Makes one of `data`, which is a view of `leaf`."""
        made: LeafView = make_subclass(cls, data, False)
        made._offset = int(data.storage_offset()) - int(leaf.storage_offset())
        made._stride = data.stride()
        return made

    def over(self, leaf: torch.Tensor) -> torch.Tensor:
        """The same view of another leaf. If that leaf is away, the view has the right shape and no more."""
        if leaf.untyped_storage().nbytes() < leaf.nbytes:
            return leaf.as_strided(self.size(), (0,) * self.dim())
        return leaf.as_strided(self.size(), self._stride, int(leaf.storage_offset()) + self._offset)

    def follow(self, leaf: torch.Tensor) -> None:
        """Points the view to the leaf's data, after the leaf was pointed elsewhere."""
        data_of.__set__(self, self.over(leaf))

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_overrides():
            result = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") in _VIEWS and isinstance(args[0], LeafView):
                return args[0].compound.view(result)
        return result


class AwayCompound:
    """A base of a compound's leaf while its block is away, or on its way (weights/passes/parameter_access.py)."""


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's own version, which counts writes in place; 0 for an inference tensor, which has none."""
    with without_overrides():
        return 0 if tensor.is_inference() else int(tensor._version)


def is_compound(tensor: torch.Tensor) -> bool:
    """Whether a parameter is of a class of its own: not plain, not one of headrace's, and not lazy."""
    return type(tensor) not in _PLAIN and not is_lazy(tensor)


def compound_of(tensor: torch.Tensor) -> Compound | None:
    """The compound of which `tensor` is the user's object, the leaf or a view of the leaf; None if there is none."""
    known = _known.get(tensor)
    return None if known is None else known()


def shown_for(tensor: Any) -> Any:
    """The user's object if `tensor` is the leaf of a compound; anything else unchanged."""
    compound = compound_of(tensor) if isinstance(tensor, torch.Tensor) and type(tensor) not in _PLAIN else None
    return tensor if compound is None else compound.shown


def _viewed(compound: "weakref.ref[Compound]", name: str, *args: Any) -> torch.Tensor:
    """Calls `leaf.t()` or `leaf.view(...)` and returns a view that follows the leaf."""
    known = compound()
    if known is None:
        raise StateError(GONE)
    with without_overrides():
        viewed = getattr(torch.Tensor, name)(known.leaf, *args)
        return viewed if torch.compiler.is_compiling() else known.view(viewed)  # compiled graphs keep no tensor unseen


def _references(leaves: Iterable[Leaf]) -> int:
    return sum(sys.getrefcount(leaf) for leaf in leaves)


@cache
def _away_kind(kind: type) -> type:
    return type(f"Away{kind.__name__}", (AwayCompound, kind), {})
