"""How do the ranks of a node keep one copy of a model? They publish what users write on all ranks, part by part.

Each rank sees homes through a view of its own, in which its writes stay. When a pass with gradients begins, and before
an optimizer steps, all ranks say what was written. Each publishes its part of that, and all see the same again. Whether
they meet never depends on anything that one rank alone knows. In passes without gradients no rank waits for others.
"""

import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import distributed

from headrace.errors import StateError
from headrace.runtime.autograd import without_overrides
from headrace.runtime.node import Counters, Node
from headrace.runtime.pending import OtherRanks
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.movement.block import Block, block_of
from headrace.weights.rest.rests import CheckpointRest, SharedRest

_WRITTEN, _TRAINED, _STEPS = "what was written into weights", "which parameters are trained", "optimizers' steps"


class _Updates:
    """Updates of one block, perhaps by several optimizers. They may end in any order."""

    def __init__(self, counters: Counters, index: int, what: str) -> None:
        self.counters, self.index, self.what = counters, index, what
        self._begun = self._ended = 0
        self._early: set[int] = set()  # updates that ended while an earlier one had not
        self._lock = threading.Lock()

    def begin(self) -> "_Update":
        self._begun += 1
        return _Update(self, self._begun)

    def end(self, number: int) -> None:
        """Notes the end of an update, and posts up to which number all have ended. Called on any thread."""
        with self._lock:
            self._early.add(number)
            while self._ended + 1 in self._early:
                self._ended += 1
                self._early.discard(self._ended)
            self.counters.post(self.index, self._ended)


class _Update:
    """One update of one block."""

    def __init__(self, updates: _Updates, number: int) -> None:
        self._updates, self._number = updates, number

    def post(self) -> None:
        self._updates.end(self._number)

    def have_come(self) -> bool:
        return self._updates.counters.have_come(self._updates.index, self._number)

    def wait(self) -> None:
        # `in_pass=False`: threads post, while the other rank itself may be in its next pass.
        self._updates.counters.wait(self._updates.index, self._number, self._updates.what, in_pass=False)


class CommonHomes:
    """The homes of one model, on all ranks of a node. `blocks`: the model's, on all ranks the same."""

    def __init__(self, node: Node, blocks: Callable[[], Sequence[Block]]) -> None:
        self.node = node
        self._blocks = blocks
        self.passes = 0  # how many passes with gradients have begun
        self._agreements = 0
        self._agreed: dict[Block, int] = {}  # the last generation that this rank has compared with what all ranks see
        self._places: dict[Block, int] = {}
        # For each block: whether it was written, its updates, its digest. And three numbers of the whole model.
        self._said: Counters | None = None
        self._synchronised = True  # whether this rank's last forward with gradients was outside of `no_sync`
        self._gives_buffers = True  # the same of the first rank of this node
        self._updates: dict[Block, _Updates] = {}
        # What the ranks of this node have agreed on since the start, for other nodes to compare.
        self._alike = {_WRITTEN: 0, _TRAINED: 0, _STEPS: 0}
        self.discards: list[Callable[[Iterable[Any]], None]] = []  # called when gradients of parameters are discarded

    def move_in(self, block: Block) -> None:
        """Called when a block was made on all ranks: gives all what the first rank of the mesh has. A collective."""
        block.common = self
        rest = block.rest
        if isinstance(rest, SharedRest):
            if rest.wide is not None:
                rest.publish(self.node.part)  # publishes the casts that each rank has made
                self.node.meet(f"block {block.name!r}, as it travels")
            rest.drop()
            for shared in () if self.node.across is None else (rest, *([] if rest.wide is None else [rest.wide])):
                part = shared.common[self.node.part(len(shared.common))]
                with self.node.together(f"block {block.name!r}, as the first node has it", across=True):
                    distributed.broadcast(part, group_src=0, group=self.node.across)
            if self.node.across is not None:
                self.node.meet(f"block {block.name!r}, as the first node has it")
            if self.node.across is not None or rest.wide is not None:
                _mark_changed(block)
        self._accept(block)

    def begin_pass(self, *, with_gradients: bool) -> None:
        """Called when a pass begins. One with gradients begins on all ranks."""
        if with_gradients:
            self.passes += 1
            self.node.begin_pass(self.passes)
            self.agree(f"forward {self.passes}")
        else:
            self._look()

    def agree(self, what: str) -> None:
        """Publishes what the user has written, so that all ranks see the same. A collective.

        Raises StateError where ranks train different parameters, or have written different ones or different values.
        """
        blocks = self._blocks()
        if self._said is None or len(self._places) != len(blocks):
            self._places = {block: place for place, block in enumerate(blocks)}
            self._said, self._updates = Counters(self.node, 3 * len(blocks) + 3), {}
        said = self._said
        self._agreements += 1
        for index, block in enumerate(blocks):
            said.post(index, 2 * self._agreements + self._is_written(block))
        said.post(3 * len(blocks), _trained(blocks))
        said.post(3 * len(blocks) + 1, self._synchronised)
        self.node.meet(what)
        self._gives_buffers = bool(said.of(0, 3 * len(blocks) + 1))
        ranks = range(self.node.size)
        different = [self.node.ranks[rank] for rank in ranks if said.of(rank, 3 * len(blocks)) != _trained(blocks)]
        if different:
            raise StateError(
                f"ranks {different} train other parameters than rank {self.node.ranks[self.node.rank]}: freeze and"
                " unfreeze the same ones on all ranks"
            )
        written = [i for i in range(len(blocks)) if any(said.of(rank, i) & 1 for rank in ranks)]
        for index in written:
            wrote = [self.node.ranks[rank] for rank in ranks if said.of(rank, index) & 1]
            if len(wrote) < self.node.size:
                raise StateError(
                    f"parameters of block {blocks[index].name!r} were written on ranks {wrote} alone, of"
                    f" {list(self.node.ranks)}, which have one copy of them; write the same on all ranks (where one"
                    " rank loads or computes the values, broadcast them first)"
                )
        self._check_alike(blocks, written, said, what)
        self._alike[_TRAINED] = said.of(0, 3 * len(blocks))
        self._note(_WRITTEN, *((index, said.of(0, 2 * len(blocks) + index)) for index in written))
        for index in written:
            rest = blocks[index].rest
            if isinstance(rest, SharedRest):
                rest.publish(self.node.part)
            else:
                blocks[index].make_writable()
        self.node.meet(what)  # also: no rank posts its next answer before all have read this one
        for index in written:
            rest = blocks[index].rest
            if isinstance(rest, SharedRest):
                rest.drop()
            _mark_changed(blocks[index])
        self.accept()

    def give_buffers(self, buffers: Sequence[torch.Tensor], *, synchronises: bool) -> None:
        """Called in a forward with gradients: gives all ranks the first rank's buffers, unless the forward before was
        in `no_sync`, as in DistributedDataParallel. A collective. `synchronises`: whether this one is outside of it.

        Raises StateError, on all ranks of the node, where these have different ones.
        """
        self._synchronised = synchronises
        said = self._said
        if not self._gives_buffers or said is None:
            return
        kinds, place = [(one.shape, one.dtype, one.device.type) for one in buffers], 3 * len(self._places) + 2
        said.post(place, zlib.crc32(repr(kinds).encode()))
        self.node.meet("the first rank's buffers")  # which notices a rank that has failed since the pass began
        different = [one for rank, one in enumerate(self.node.ranks) if said.of(rank, place) != said.of(0, place)]
        if different:
            raise StateError(
                f"ranks {different} have other buffers than rank {self.node.ranks[0]} (number, shape, dtype or device;"
                f" rank {self.node.ranks[self.node.rank]} has {len(buffers)} buffers): register the same on all ranks,"
                " and name those that each rank has for itself in model._ddp_params_and_buffers_to_ignore before"
                " offload()"
            )
        if buffers:
            self.node.give_first(buffers)

    def _look(self) -> None:
        """Prepares a pass without gradients, which computes with what this rank has, whatever the others do."""
        for block in self._blocks():
            if block.look() != self._agreed.get(block):
                written = self._is_written(block)
                if isinstance(block.rest, SharedRest):
                    block.rest.read_own(written)
                elif written:
                    raise StateError(
                        f"block {block.name!r} is read from its checkpoint, and parameters of it were written on this"
                        " rank: ranks agree on that when a pass with gradients begins, on all of them; begin one first"
                    )
                if written:
                    _mark_changed(block)
                self._agreed[block] = block.look()

    def _check_alike(self, blocks: Sequence[Block], written: Sequence[int], said: Counters, what: str) -> None:
        """Raises StateError where ranks have written different values."""
        if not written:
            return
        for index in written:
            rest = blocks[index].rest
            if isinstance(rest, SharedRest | CheckpointRest):
                said.post(2 * len(blocks) + index, rest.digest())
        self.node.meet(what)
        for index in written:
            if len({said.of(rank, 2 * len(blocks) + index) for rank in range(self.node.size)}) > 1:
                raise StateError(
                    f"parameters of block {blocks[index].name!r} were written with other values on some of ranks"
                    f" {list(self.node.ranks)}, which have one copy of them; seed alike before values are drawn, or"
                    " broadcast them first"
                )

    def accept(self) -> None:
        """Notes that all ranks see what homes hold now: they agreed on it, or an optimizer wrote it for all."""
        for block in self._blocks():
            self._accept(block)

    def _accept(self, block: Block) -> None:
        self._agreed[block] = block.look()
        for param in block.params if isinstance(block.rest, SharedRest) and block.rest.wide is not None else ():
            param.note_cast()  # all ranks see the cast, too

    def note_step(self, alike: Sequence[int]) -> None:
        """Notes that the ranks of this node agreed on an optimizer's step; `alike`: the values that all have."""
        self._note(_STEPS, *alike)

    def _note(self, what: str, *values: object) -> None:
        for value in values:
            self._alike[what] = zlib.crc32(repr(value).encode(), self._alike[what])

    def seen(self) -> torch.Tensor:
        """The bytes that nodes compare. Where nodes differ, the maximum of each byte over nodes is no node's value."""
        agreed = torch.tensor(list(self._alike.values())).view(torch.uint8)
        return torch.cat([agreed, 255 - agreed])

    def check_nodes(self, largest: torch.Tensor) -> None:
        """Raises StateError on all ranks where nodes differ. `largest`: each byte's maximum over the nodes' `seen`."""
        differ = (largest != self.seen()).view(2, len(self._alike), -1).any(-1).any(0).tolist()
        for what, differs in zip(self._alike, differ, strict=True):
            if differs:
                raise StateError(
                    f"nodes differ in {what}: each has a copy of the weights, and these are not the same any more (rank"
                    f" {self.node.ranks[self.node.rank]} is on node {self.node.number} of {self.node.nodes}). Write,"
                    " load, clip and step alike on all ranks of all nodes; end this run, and go on from its last"
                    " checkpoint"
                )

    def unwritten(self) -> list[Block]:
        """The blocks that nobody but headrace has written since the ranks last agreed."""
        return [block for block in self._blocks() if block.look() == self._agreed.get(block)]

    def still_unwritten(self, blocks: Iterable[Block]) -> None:
        """Called after a step: notes that its announcement alone made these blocks count as changed."""
        for block in blocks:
            if isinstance(block.rest, CheckpointRest):
                block.note_flushed()
            self._accept(block)

    def discard(self, parameters: Iterable[Any]) -> None:
        """Discards the gradients of these parameters that wait to be averaged."""
        for discard in self.discards:
            discard(parameters)

    def begin_update(self, block: Block) -> OtherRanks:
        """Called after `agree`, when the ranks begin to update the parameters of a block, each its own part."""
        if self._said is None:
            raise StateError(f"block {block.name!r} is to be updated before the ranks agreed")
        if block not in self._updates:
            index = len(self._places) + self._places[block]
            self._updates[block] = _Updates(self._said, index, f"its update of {block.name!r}")
        return self._updates[block].begin()

    def place_of(self, param: ManagedParam) -> torch.Tensor:
        """The memory of a home as all ranks see it, in the home's shape."""
        block = block_of(param)
        if not isinstance(block.rest, SharedRest):
            raise StateError(f"parameter {param.name!r} is not in memory that the ranks share")
        home = block.rest.place_of_home(block.params.index(param))
        return block.rest.common_tensors([param.layout])[0] if home is None else home

    @torch.no_grad()
    def updated(self, params: Iterable[ManagedParam]) -> None:
        """Called when an optimizer has written these homes for all ranks: casts those that travel in another dtype."""
        for param in params:
            rest = block_of(param).rest if param.casts else None
            if isinstance(rest, SharedRest):
                rest.common_tensors([param.layout])[0].copy_(self.place_of(param))

    def _is_written(self, block: Block) -> bool:
        """Whether this rank's user has written to the block, as the users of all other ranks should have."""
        if not isinstance(block.rest, SharedRest | CheckpointRest):
            return False
        with torch.no_grad(), without_overrides():
            for param in block.params:
                param.return_home()
        is_own = isinstance(block.rest, SharedRest) and block.rest.is_own
        if block.look() == self._agreed.get(block) and not is_own:
            return False
        block.make_homes_readable()
        written = block.rest.is_written
        if not written and isinstance(block.rest, SharedRest):
            block.rest.drop()  # a page written with its old value would not show what others write
        elif not written:
            block.note_flushed()
        return written


def _mark_changed(block: Block) -> None:
    """Marks the homes as changed: a device copy may be from after the user's write, but of what all ranks saw then."""
    for param in block.params:
        param.changed_untraced()


def _trained(blocks: Sequence[Block]) -> int:
    """A number that differs between ranks that train different parameters."""
    with without_overrides():
        names = [param.name for block in blocks for param in block.params if param.home.requires_grad]
    return zlib.crc32("\n".join(names).encode())
