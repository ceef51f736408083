"""What does headrace know of one managed parameter? Its home, its leaf, and the place of its bytes in a block."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.errors import LayoutError, StateError
from headrace.memory.buffers import references_beside
from headrace.memory.disk import copy_on_disk
from headrace.runtime.autograd import without_overrides
from headrace.runtime.pending import Unit
from headrace.weights.model.accumulation import node_is_kept
from headrace.weights.model.data_parallel import ADVICE
from headrace.weights.model.home import AliasParam, AwayLeaf, Home, Leaf, as_home, as_parameter, lie_alike, raw_data

REMOVED = (
    "the model was let go of (remove() on its handle) between this forward and its backward; run backward before"
    " remove(), or the forward again"
)


class Token(NamedTuple):
    """Identifies the contents of a home: two equal tokens mean the same contents, as far as autograd would notice."""

    version: int  # its _version
    untraced_changes: int  # writes that leave no trace in `_version`
    data_number: int  # which data the home was given (`p.data = t`); 0: its own


_NEVER = Token(-1, 0, 0)  # no contents have this token


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a parameter lies in its block, and how its elements are laid out there."""

    offset: int  # bytes from the start of the block
    nbytes: int
    region: tuple[int, int]  # bytes (first, one past the last) of its storage, which other parameters may share
    dtype: torch.dtype  # the dtype in which it travels and computes
    shape: torch.Size
    stride: tuple[int, ...]  # elements

    def view(self, block_bytes: torch.Tensor, *, first_byte: int = 0) -> torch.Tensor:
        """A view of the parameter in the bytes of its block, or in a part of these that begins at `first_byte`. The
        bytes are given as uint8 or in the parameter's dtype.
        """
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype, device=block_bytes.device)
        typed = block_bytes if block_bytes.dtype == self.dtype else block_bytes.view(self.dtype)
        return typed.as_strided(self.shape, self.stride, (self.offset - first_byte) // self.dtype.itemsize)


class ManagedParam:
    """One managed parameter.

    `home` is the user's own Parameter, on the host, until `adopt` makes another one the home. `leaf` is the Parameter
    that autograd sees, on the device, as long as the model is offloaded. `rest` is the parameter's place in the block's
    arena. The home's data lies there, unless the user re-pointed it (`p.data = t`), shared it with other processes, or
    it travels in another dtype.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        layout: Layout,
        rest: torch.Tensor,
        absent: torch.Tensor,
        before_touch: Callable[[], None],
        before_write: Callable[[], None],
    ) -> None:
        self.name = name
        # The home's dtype. It is kept because the home itself answers with the leaf's dtype during a visit.
        self.dtype = parameter.dtype
        self.layout = layout
        self._keep(rest)
        self.absent = absent  # what the leaf's data is while there is no device copy
        self._home_place: torch.Tensor | None = None  # where the ranks' one copy of a home that casts lies
        self.untraced_changes = 0  # writes that a hook reported: fused optimizers leave no trace in _version
        self.unit: Unit | None = None  # the block that it travels in
        self.on_change: Callable[[ManagedParam, bool], None] = _nothing  # called when the home may have changed
        self.generation = 0  # the block's generation when the home's contents last changed
        self._before_touch = before_touch
        self.before_write = before_write  # called when the home is about to be written in place
        self._times_given = 0  # how often the home was given other data (`p.data = t`)
        self.data_number = 0  # which of these data it has; 0: its own
        self._cast = -1  # the generation of the contents from which the cast in `rest` was made
        self.loaded_token: Token = _NEVER  # the token of the contents from which the device copy was made
        self.on_gradient: Callable[[Leaf], None] | None = None  # called when the leaf's gradient is complete
        self._hook: RemovableHandle | None = None
        self.kept_gradient: torch.Tensor | None = None  # over the storage of the gradient that headrace gave the home
        self.node_is_watched = True  # assumed until `look_for_watchers` has looked
        fresh = torch.empty(0, dtype=layout.dtype, device=absent.device)  # with a version counter of its own
        self.leaf = Leaf(fresh, requires_grad=parameter.requires_grad)
        self.leaf.__dict__.update(
            {key: value for key, value in parameter.__dict__.items() if not key.startswith("_headrace")}
        )
        self.leaf.handed_out_ids = set()  # `Leaves` gives all leaves of a block one set
        self.leaf.owner = weakref.ref(self)
        self.kept_version = self.leaf._version  # the leaf's version when the home last had all that was written to it
        self.leaf.point(absent)
        self.leaf.__class__ = AwayLeaf
        self.home: Home = as_home(parameter, self)
        self._move_in()
        self._own_references = 0  # to its place

    @property
    def shown(self) -> torch.Tensor:
        """The tensor that the user's modules hold, and that the leaf replaces during a visit."""
        return self.home.shown

    @property
    def casts(self) -> bool:
        """Whether the parameter travels in another dtype than its home has."""
        return self.dtype != self.layout.dtype

    @property
    def in_place(self) -> bool:
        """Whether the home's data lies in the arena, so that the one copy of the whole block carries it."""
        return self.home.data_ptr() == self._rest_address and lie_alike(self.home, self.rest)

    @property
    def memory_is_kept(self) -> bool:
        """Whether anything beside the home refers to its place in the arena, such as a user's `kept = p.data`."""
        return references_beside(self.rest) > self._own_references + self.in_place

    @property
    def token(self) -> Token:
        """The token of the home's present contents."""
        return Token(self.home._version, self.untraced_changes, self.data_number)

    @property
    def is_old_on_device(self) -> bool:
        """Whether the home's contents have changed since the last device copy was made, as far as autograd notices."""
        return self.loaded_token is not _NEVER and self.loaded_token != self.token

    @property
    def is_shared(self) -> bool:
        """Whether its place was moved to memory that processes share (`share_memory_`): nobody but headrace has the
        bytes in the arena then.
        """
        return self.rest.data_ptr() != self._rest_address

    @property
    def others_may_write(self) -> bool:
        """Whether other processes share the home's data, and so may write to it at any time, unnoticed."""
        return not self.in_place and self.data.untyped_storage().is_shared()

    @property
    def gradient_is_watched(self) -> bool:
        """Whether somebody may have a hook that sees a gradient before or while it is accumulated."""
        return self.node_is_watched or bool(self.home._backward_hooks)

    def discard_gradient(self) -> None:
        """Called when the home's gradient is set to None: discards those that wait to be averaged over ranks, too."""
        if self.unit is not None and self.unit.common is not None:
            self.unit.common.discard([self.home])

    def watch_node(self) -> None:
        """Called when somebody may hook into the node that accumulates the home's gradient: autograd now does that."""
        self.node_is_watched = True

    def look_for_watchers(self) -> None:
        """Looks whether the home's node is still watched: graphs that held it, and whoever asked for it, may be gone.

        Called when a pass with gradients begins. Nobody can find the node of a frozen home before it is thawed.
        """
        if self.node_is_watched and self.home.requires_grad:
            self.node_is_watched = node_is_kept(self.home)

    @property
    def data(self) -> torch.Tensor:
        """The home's data. Asking for it here does not count as handing it out."""
        return raw_data(self.home)

    @property
    def source(self) -> torch.Tensor:
        """The tensor that a copy to the device reads: the home's data, or its cast."""
        return self.rest if self.casts else self.data

    @property
    def leaf_may_be_written(self) -> bool:
        """Whether the model may have written to the leaf since its writes were last kept."""
        return self.leaf._version != self.kept_version or id(self.leaf) in self.leaf.handed_out_ids

    def keep_leaf_writes(self, buffer: torch.Tensor) -> bool:
        """Copies to the home what the model wrote to the leaf (nn.Embedding's max_norm, a codebook's `weight.data`).

        Returns whether it copied. A leaf whose `data` was handed out counts as written, unless its home was touched
        after the device copy was made: the home is newer then.
        """
        touched = type(self.leaf) is AwayLeaf
        if not self.leaf_may_be_written or (touched and self.leaf._version == self.kept_version):
            return False
        self.kept_version = self.leaf._version
        written = raw_data(self.leaf)
        self.check_shape(written)
        self.keep(self.data, written)  # leaves no trace in the home's version: the device copy is current
        self._cast = -1
        place = self.layout.view(buffer)
        if written.data_ptr() != place.data_ptr():  # `weight.data = t`
            place.copy_(written)
            self.leaf.point(place)
        return True

    def keep(self, data: torch.Tensor, written: torch.Tensor) -> None:
        """Copies `written`, the leaf's values, to `data`, the home's data or a part of it. A home that casts keeps its
        own, more precise values wherever the model wrote nothing.
        """
        if self.casts:
            written = written.to("cpu")
            written = torch.where(data.to(written.dtype) == written, data, written)
        data.copy_(written)

    @property
    def cast_is_old(self) -> bool:
        """Whether the home may have changed since the last cast, as far as its block has looked."""
        return self.casts and (self._cast != self.generation or self.others_may_write)

    def cast(self) -> None:
        """Casts the home into `rest`, which nobody may be reading."""
        self.rest.copy_(self.data)
        self.note_cast()

    def note_cast(self) -> None:
        """Notes that `rest` holds the cast of the home's present contents."""
        self._cast = self.generation

    def prepare_leaf(self) -> None:
        """Makes the leaf require a gradient exactly when the home does, and hooks `on_gradient` to it."""
        wanted = self.home.requires_grad
        if self.leaf.requires_grad != wanted:
            self.leaf.requires_grad_(wanted)
        if wanted and self._hook is None and self.on_gradient is not None:
            register: Any = self.leaf.register_post_accumulate_grad_hook
            self._hook = register(self.on_gradient)

    def fits(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter could be the home as it is."""
        return (
            type(parameter) is nn.Parameter
            and parameter.shape == self.layout.shape
            and parameter.dtype == self.dtype
            and parameter.device.type == "cpu"
            and parameter.layout == torch.strided
        )

    def adopt(self, parameter: nn.Parameter) -> None:
        """Makes `parameter` the home, after the user put it in the home's place (`load_state_dict(assign=True)`).

        Its data moves to the home's place in the arena, unless somebody still refers to that memory: a
        parameter that took another home's place with the values that lie there, or a user who keeps them.
        """
        kind = type(parameter if type(parameter) is not nn.Parameter else raw_data(parameter))
        if kind not in (nn.Parameter, torch.Tensor, AliasParam):
            advice = f": {ADVICE}" if kind.__name__ == "DTensor" else ""
            raise LayoutError(
                f"parameter {self.name!r} was offloaded as a plain one and is a {kind.__name__} now, whose bytes lie"
                f" elsewhere. Call remove() on the handle before a model is sharded or quantised{advice}"
            )
        if parameter.shape != self.layout.shape or parameter.dtype != self.dtype or parameter.device.type != "cpu":
            raise LayoutError(
                f"parameter {self.name!r} was offloaded as {self.dtype} of shape {tuple(self.layout.shape)} on the"
                f" CPU and is now {parameter.dtype} of shape {tuple(parameter.shape)} on {parameter.device}; call"
                " remove() on the handle before such a change, and offload the model again after it"
            )
        self._before_touch()
        self.node_is_watched = True
        if not self.casts or self._home_place is not None:
            self.home.point(self.data.clone())  # whoever still holds it keeps its contents
        as_parameter(self.home)
        self.home = as_home(parameter, self)
        self.changed_untraced()  # the version may have the same number as that of the parameter before
        if self.casts or self.in_place or not self.memory_is_kept:
            self._move_in()

    def check_shape(self, data: torch.Tensor | None = None) -> None:
        """Raises LayoutError when the home, or `data` that it is about to get, does not fit the layout."""
        data = self.home if data is None else data
        if data.shape != self.layout.shape:
            was, now = f"with shape {tuple(self.layout.shape)}", f"has shape {tuple(data.shape)}"
        elif data is self.home and data.dtype != self.dtype:
            was, now = f"as {self.dtype}", f"is {data.dtype}"
        else:
            return
        raise LayoutError(
            f"parameter {self.name!r} was offloaded {was} and now {now}; call remove() on the handle before such a"
            " change, and offload again after it"
        )

    def move_to(self, rest: torch.Tensor, *, keeps: bool) -> None:
        """Makes `rest` the parameter's place from now on; `keeps`: with the contents of the home, or of its cast."""
        with torch.no_grad():
            if keeps:
                copy_on_disk(rest, self.rest if self.casts else self.data)
            if self.in_place:
                self.home.point(rest)
            self._keep(rest)

    def count_references(self) -> None:
        """Called when the place is new, and nobody else can have it: counts the references that are ours."""
        self._own_references = references_beside(self.rest) - self.in_place

    def live_at(self, place: torch.Tensor, *, keeps: bool) -> None:
        """Makes a home that casts lie at `place` from now on; `keeps`: with its contents."""
        with torch.no_grad():
            if keeps:
                copy_on_disk(place, self.data)
            self.home.point(place)
            self._home_place = place

    def return_home(self) -> None:
        """Moves a home that was pointed elsewhere (`p.data = t`) back to the ranks' shared place, with its contents."""
        place = self._home_place if self.casts else self.rest
        if place is not None and self.home.data_ptr() != place.data_ptr():
            place.copy_(self.data)
            self.give(place)
            self.home.point(place)
            torch.autograd.graph.increment_version(self.home)  # its address is as before, for an optimizer's remainder
            self._home_changed(written=True)

    def release(self) -> None:
        """Makes the home an ordinary Parameter again, whose data stays where it is. Neither refers to the other then.

        May be called again.
        """
        if "home" not in vars(self):
            return
        home = as_parameter(self.home)
        if home.grad is None and home.requires_grad:
            home.grad_dtype = home.dtype  # the dtype of a plain parameter's gradient
        self.on_gradient = self.unit = self.kept_gradient = None
        self._before_touch = self.before_write = self.on_change = _nothing
        if self._hook is not None:
            self._hook.remove()
            with without_overrides():
                register: Any = self.leaf.register_post_accumulate_grad_hook
                if self.leaf.requires_grad:
                    register(_refuse_gradient)
        self.leaf.owner = _nobody
        self._home_place = None
        vars(self).pop("rest", None)
        self.leaf.__dict__.pop("tensor", None)  # of a part of a weight: the user's own
        del self.home

    def _move_in(self) -> None:
        with torch.no_grad():
            if self.casts:
                self.cast()
            elif self.rest.data_ptr() == self._rest_address:  # else other processes share it
                if not self.in_place:
                    copy_on_disk(self.rest, self.data)
                self.home.point(self.rest)
            if self.home.grad is not None and self.home.grad.device.type != "cpu":
                self.home.grad = self.home.grad.to("cpu")

    def _keep(self, rest: torch.Tensor) -> None:
        self.rest = rest
        self._rest_address = rest.data_ptr()  # the tensor's storage moves when it is shared with other processes

    def wait_for_updates(self) -> None:
        """Blocks the calling thread until no optimizer writes the home any more."""
        if self.unit is not None:
            self.unit.wait_for_updates()

    def touch(self) -> None:
        """Called before the home's data is handed out to the user, who may write through it."""
        self._before_touch()
        self._home_changed(written=False)

    def give(self, data: torch.Tensor) -> None:
        """Called before `home.data = data`. Other data gets a new number: what autograd saved before is old then."""
        if data.data_ptr() != self.data.data_ptr():
            self._times_given += 1
            self.data_number = 0 if data.data_ptr() == self._rest_address else self._times_given

    def changed_untraced(self) -> None:
        """Called when the home was written, or is being written, in a way that leaves no trace in its version."""
        self.untraced_changes += 1
        self._home_changed(written=True)

    def _home_changed(self, *, written: bool) -> None:
        self.leaf.__class__ = AwayLeaf  # the next use of the leaf, even where it is bound, loads the home again
        self.on_change(self, written)


def _refuse_gradient(_leaf: torch.Tensor) -> None:
    raise StateError(REMOVED)


def _nothing(*_: object) -> None:
    pass


class _Nobody:
    """Who owns the leaf of a parameter that is no longer managed."""


_nobody = weakref.ref(_Nobody())  # which is gone
