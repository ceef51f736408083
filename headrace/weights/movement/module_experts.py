"""When do experts that are modules of their own come? When they are called, and in backward just before that.

See docs/design/experts.md. They are blocks like others, but in no plan, as it is not known which ones a pass calls.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from headrace.planning import Keeping, Key, Phase
from headrace.weights.meter import Meter
from headrace.weights.movement.block import Block
from headrace.weights.movement.residency import Residency
from headrace.weights.movement.shares import Shares


class ModuleExperts:
    """Experts of one model that are modules: which ones were called, and which make room for others.

    `evict`: evicts a block, unless it is in use.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        shares: Shares,
        residency: Residency,
        meter: Meter,
        evict: Callable[[Block], None],
    ) -> None:
        self._evict = evict
        self._shares = shares
        self._residency = residency
        self._meter = meter
        self._experts = {block.expert_key: block for block in blocks if block.expert_key is not None}
        # Has all experts that hold a place on the device, and perhaps some that have lost it: others made room, too.
        # `make_room` says how many have room.
        self._keeping = Keeping(1, max(1, len({layer for layer, _ in self._experts})))
        self._layer = -1  # the layer whose experts are being called
        self._layer_call: set[Key] = set()  # experts that this call of the layer has used
        self._forward: list[Block] = []  # forward's calls, in order, that backward has not come back to

    def begin_cycle(self) -> None:
        """Called when a cycle begins: forgets what an earlier forward called."""
        self._forward.clear()

    def note_use(self, block: Block) -> None:
        """Called when an expert is. Another layer's expert, or the same one again, begins a new call of a layer."""
        key = block.expert_key or (-1, -1)
        self._meter.expert_uses += 1
        if key[0] != self._layer or key in self._layer_call:
            self._keeping.used(self._layer, [expert for _, expert in self._layer_call])
            self._layer, self._layer_call = key[0], set()
        self._layer_call.add(key)

    def follow(self, called: Sequence[Block], phase: Phase, *, gradients_follow: bool) -> Block | None:
        """Called when the experts `called` are visited. In backward, returns the one that forward called before them:
        it is needed next, unless its output was not used. None: there is none, or this is a forward.
        """
        if phase is Phase.FORWARD and gradients_follow:
            self._forward += called
        elif phase is Phase.BACKWARD and self._forward and self._forward[-1] in called:
            self._forward.pop()
            return self._forward[-1] if self._forward else None
        return None

    def make_room(self, block: Block, keep: Sequence[Block]) -> None:
        """Called before `block` comes: evicts other experts until there is room for it, but none that are in `keep` or
        in use.
        """
        room_bytes = self._shares.module_experts_bytes
        self._keeping.resize(room_bytes // max(1, self._shares.largest_module_expert_bytes))
        stay = {one.expert_key for one in keep if one.expert_key is not None}
        while self._residency.module_experts_bytes + block.nbytes > room_bytes:
            victim = self._keeping.victim(self._layer, stay | self._layer_call)
            victim = self._keeping.victim(self._layer, stay) if victim is None else victim
            if victim is None:
                break
            self._evict(self._experts[victim])
            if self._experts[victim].buffer is None:
                self._keeping.went(victim)
            else:  # in use
                stay.add(victim)
        if block.expert_key is not None:
            self._keeping.came(block.expert_key)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what is loaded within the `with` block as an expert in the report."""
        before = self._meter.onload_bytes
        yield
        self._meter.expert_bytes += self._meter.onload_bytes - before
        self._meter.expert_loads += self._meter.onload_bytes > before
