"""How many bytes does a run hold in each tier, and for what?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.planning.cost.experts import ExpertCut, can_cut, cut_of, least_cut_bytes
from headrace.planning.cost.hardware import Hardware
from headrace.planning.cost.packing import packed_bytes, packs
from headrace.planning.cost.shape import BlockKind, BlockShape, ModelShape
from headrace.planning.cost.sharing import crossing_of
from headrace.planning.cost.traffic import ACTIVATION_LAYERS, GRADIENT_BLOCKS, STAGED_BLOCKS, block_seconds
from headrace.planning.cost.work import Activations, Method, Overlap, Place, Spread, Training, Work

__all__ = ["DEVICE_RESERVE", "HOST_RESERVE", "Held", "Tiers", "activation_bytes", "tiers_of"]

DEVICE_RESERVE = 0.1  # of the device: workspaces and fragmentation
HOST_RESERVE = 0.1  # of the host: the system and the rest of the process


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of one device's run in one tier for one purpose."""

    place: Place
    purpose: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """All that one device's run holds, and what each tier may hold of it (its share of the node's)."""

    held: tuple[Held, ...]
    capacity: dict[Place, int]
    streaming_bytes: int  # what is left on the device for blocks that come and go (0: none come)
    cut: ExpertCut | None = None  # within these: experts that come one by one

    def total(self, place: Place) -> int:
        return sum(held.nbytes for held in self.held if held.place is place)

    def short(self, place: Place) -> int:
        """Bytes that the tier lacks."""
        return max(0, self.total(place) - self.capacity[place])

    @property
    def fits(self) -> bool:
        return all(self.short(place) == 0 for place in Place)


def activation_bytes(shape: ModelShape, work: Work, method: Method, hardware: Hardware) -> tuple[int, int]:
    """Activations of one micro-batch, or of those that go together, on the device and in host memory, in bytes.

    Recomputing keeps each layer's input, and of one micro-batch the activations of one layer at a time. Where they
    leave over a link that keeps up with compute, the layer that computes has all of its own on the device, and its
    input, which its caller holds; over slower ones a ceiling of two layers' is kept to. On the way to disk, host memory
    holds one layer's.
    """
    kept = method.activations
    saved = [block.activation_bytes(work.tokens) for block in shape.blocks]
    inputs = [block.input_bytes(work.tokens) for block in shape.blocks]
    if work.training is Training.NONE:
        return round(max(saved)), 0
    layers = [block for block in shape.blocks if block.kind is not BlockKind.HEAD]
    sizes = [block.activation_bytes(work.tokens) for block in layers]
    head = sum(saved) - sum(sizes)
    if kept is Activations.KEPT:
        return round(sum(saved)), 0
    if kept is Activations.RECOMPUTED:
        return round(sum(inputs) + max([head, *(size / method.together for size in sizes)])), 0
    on_host = sum(sizes) if kept is Activations.OFFLOADED else max(sizes, default=0.0)
    here = ACTIVATION_LAYERS * max(sizes, default=0.0)
    if all(_keeps_up(block, work, method, hardware) for block in layers):
        with_inputs = (block.activation_bytes(work.tokens) + block.input_bytes(work.tokens) for block in layers)
        here = min(here, max(with_inputs, default=0.0))
    return round(head + here), round(on_host)


def _keeps_up(block: BlockShape, work: Work, method: Method, hardware: Hardware) -> bool:
    """Whether a layer's activations leave while it computes forward, and come back, with its weights, in backward."""
    if block.kind is not BlockKind.LAYER:
        return True
    nbytes = block.activation_bytes(work.tokens)
    out = nbytes / hardware.offload_bytes_per_second
    back = (nbytes + block.weight_bytes * method.streamed) / hardware.onload_bytes_per_second
    if method.activations is Activations.SPILLED:
        out = max(out, nbytes * hardware.devices / hardware.disk_write_bytes_per_second)
        back = max(back, nbytes * hardware.devices / hardware.disk_read_bytes_per_second)
    forward, backward = block_seconds(block, work, hardware)
    return out <= forward and back <= backward


def tiers_of(
    shape: ModelShape,
    work: Work,
    spread: Spread,
    method: Method,
    hardware: Hardware,
    streaming_bytes: int | None = None,
) -> Tiers:
    """What one device holds of `shape`, and its range of a shared copy.

    `streaming_bytes`: for blocks that come and go, as `headrace.offload(device_memory=...)` takes it; None: what is
    left.
    """
    held = [*_activations(shape, work, method, hardware)]
    if work.training is not Training.NONE:
        held += _training(shape, work, spread, method, hardware)
    capacity = _capacity(hardware)
    if not method.streamed:
        held.append(Held(place=Place.DEVICE, purpose="weights", nbytes=shape.weight_bytes))
        if method.changes(work):
            on_host = round(method.host_share * _of_copy(shape.weight_bytes, spread, method, work))
            held.append(Held(place=Place.HOST, purpose="weights", nbytes=on_host))
        return Tiers(held=tuple(held), capacity=capacity, streaming_bytes=0)
    on_host = _of_copy(shape.weight_bytes, spread, method, work)
    held.append(Held(place=method.weights, purpose="weights", nbytes=on_host))
    if method.weights is Place.DISK:
        staged = _largest((_of_copy(b.weight_bytes, spread, method, work) for b in shape.blocks), STAGED_BLOCKS)
        held.append(Held(place=Place.HOST, purpose="staging", nbytes=staged))
    if packs(shape, work, spread, method, hardware) and packed_bytes(shape):
        held.append(Held(place=Place.DISK, purpose="packed weights", nbytes=packed_bytes(shape)))
    used = sum(item.nbytes for item in held if item.place is Place.DEVICE)
    cuts = work.training is Training.NONE and can_cut(shape, work, spread, method)
    left = capacity[Place.DEVICE] - used if streaming_bytes is None else streaming_bytes
    room = max(least_cut_bytes(shape) if cuts else _least(shape), min(shape.weight_bytes, left))
    cut = cut_of(shape, work, spread, method, room)
    banks = 0 if cut is None else cut.bank_bytes
    held.append(Held(place=Place.DEVICE, purpose="weights", nbytes=room - banks))
    if banks:
        held.append(Held(place=Place.DEVICE, purpose="experts", nbytes=banks))
    return Tiers(held=tuple(held), capacity=capacity, streaming_bytes=room, cut=cut)


def _activations(shape: ModelShape, work: Work, method: Method, hardware: Hardware) -> Iterable[Held]:
    on_device, on_host = activation_bytes(shape, work, method, hardware)
    yield Held(place=Place.DEVICE, purpose="activations", nbytes=on_device)
    if on_host:
        yield Held(place=Place.HOST, purpose="activations", nbytes=on_host)
    if method.activations is Activations.SPILLED:
        layers = (block for block in shape.blocks if block.kind is BlockKind.LAYER)
        spilled = round(sum(block.activation_bytes(work.tokens) for block in layers))
        yield Held(place=Place.DISK, purpose="activations", nbytes=spilled)


def _training(shape: ModelShape, work: Work, spread: Spread, method: Method, hardware: Hardware) -> Iterable[Held]:
    """Gradients, master weights and state; adapters."""
    share, per = method.device_share, work.master_bytes + work.state_bytes
    gradients = int(spread.divided(work.gradient_bytes * shape.trainable, 2))
    state = round(spread.divided(per * shape.trainable, 1))
    of_blocks = min(gradients, _neighbours([work.gradient_bytes * block.trainable for block in shape.blocks]))
    # Parameters of which the device updates a part keep their gradients there until the step.
    yield Held(place=Place.DEVICE, purpose="gradients", nbytes=gradients if share else of_blocks)
    if share:
        yield Held(place=Place.DEVICE, purpose="master and state", nbytes=round(share * state))
    if share < 1:
        # Memory for all of them is made before the first backward: where there is a disk and no room, there.
        on_disk = method.overlap is Overlap.BACKWARD and work.micro_batches == 1 and method.uses_disk
        sizes = (round(method.host_share * gradients), of_blocks, round(method.host_share * state))
        all_gradients, leaving, own_state = (_of_copy(nbytes, spread, method, work) for nbytes in sizes)
        yield Held(place=Place.HOST, purpose="gradients", nbytes=leaving if on_disk else all_gradients)
        if on_disk:
            yield Held(place=Place.DISK, purpose="gradients", nbytes=all_gradients)
        yield Held(place=method.state, purpose="master and state", nbytes=own_state)
        if method.state is Place.DISK:
            own = (_of_copy(spread.divided(per * block.trainable, 1), spread, method, work) for block in shape.blocks)
            yield Held(place=Place.HOST, purpose="staging", nbytes=min(own_state, _largest(own, STAGED_BLOCKS)))
    if any(crossing_of(block, work, spread, method, hardware).sum_bytes for block in shape.blocks):
        # Each device's own, until they are added up.
        yield Held(place=Place.HOST, purpose="gradients to be summed", nbytes=round(method.host_share * of_blocks))
    if work.training is Training.ADAPTER:
        yield Held(place=Place.DEVICE, purpose="adapters", nbytes=2 * shape.trainable)


def _of_copy(nbytes: float, spread: Spread, method: Method, work: Work) -> int:
    """A device's range of what is on the host, or on disk, once for each node."""
    return round(nbytes / spread.ranks if spread.shares(method, work.training) else nbytes)


def _least(shape: ModelShape) -> int:
    """Bytes that a visit needs at least: of the largest block, with the embedding's when the head borrows it."""
    sizes = [block.weight_bytes for block in shape.blocks]
    borrowed = sum(b.weight_bytes for b in shape.blocks if b.kind is not BlockKind.LAYER) if shape.tied else 0
    return max([borrowed, *sizes])


def _capacity(hardware: Hardware) -> dict[Place, int]:
    return {
        Place.DEVICE: int(hardware.device_memory_bytes * (1 - DEVICE_RESERVE)),
        Place.HOST: int(hardware.host_memory_bytes * (1 - HOST_RESERVE)) // hardware.devices,
        Place.DISK: hardware.disk_bytes // hardware.devices,
    }


def _neighbours(sizes: Sequence[int]) -> int:
    """The most that blocks next to each other have together, as many as have gradients on the device at once."""
    return max(sum(sizes[i : i + GRADIENT_BLOCKS]) for i in range(max(1, len(sizes) - GRADIENT_BLOCKS + 1)))


def _largest(sizes: Iterable[int], count: int) -> int:
    return sum(sorted(sizes, reverse=True)[:count])
