"""How many bytes does a run hold in each tier, and for what?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.planning.caches import LAYERS_STAGED, room_on_device, tokens_with_room
from headrace.planning.cost.experts import ExpertCut, can_cut, cut_of, least_cut_bytes
from headrace.planning.cost.hardware import Hardware
from headrace.planning.cost.packing import packed_bytes, packs
from headrace.planning.cost.rows import room_for_rows, tables_of, without_tables
from headrace.planning.cost.shape import BlockKind, BlockShape, ModelShape
from headrace.planning.cost.sharing import crossing_of
from headrace.planning.cost.traffic import ACTIVATION_LAYERS, GRADIENT_BLOCKS, STAGED_BLOCKS, block_seconds
from headrace.planning.cost.work import Activations, Case, Overlap, Place, Training, Work
from headrace.planning.resting import on_disk
from headrace.planning.tables import kept_free_for_rows

DEVICE_RESERVE = 0.1  # of the device: workspaces and fragmentation
UPDATE_BYTES = 48 << 20  # of the device: what passes through when the device updates what rests on the host
HOST_RESERVE = 0.1  # of the host: the system and the rest of the process
CACHE = "keys and values"
_CACHE_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Held:
    """Bytes that one device's run holds in one tier for one purpose."""

    place: Place
    purpose: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """All that one device's run holds, and the capacity of each tier (the device's share of the node's)."""

    held: tuple[Held, ...]
    capacity: dict[Place, int]
    streaming_bytes: int  # what is left on the device for blocks that come and go (0: none come)
    least_bytes: int = 0  # the part of `streaming_bytes` without which blocks cannot come
    cut: ExpertCut | None = None  # experts that come one by one, within `streaming_bytes`
    tables: frozenset[int] = frozenset()  # indices of embeddings whose tables travel by rows
    rows_bytes: int = 0  # the part of `streaming_bytes` that is left free for rows
    on_disk: frozenset[int] = frozenset()  # indices of blocks whose weights rest on disk
    unified: bool = False  # whether device and host have one memory, the host's

    def total(self, place: Place) -> int:
        return sum(held.nbytes for held in self.held if held.place is place)

    def needed(self, place: Place) -> int:
        """Bytes that the tier has to have: of one memory for device and host, the host's has to hold both."""
        beside = self.total(Place.DEVICE) if self.unified and place is Place.HOST else 0
        return beside + self.total(place)

    def short(self, place: Place) -> int:
        """Bytes that the tier lacks."""
        return max(0, self.needed(place) - self.capacity[place])


def tiers_of(case: Case, streaming_bytes: int | None = None) -> Tiers:
    """What one device holds in each tier, its range of a shared copy included.

    `streaming_bytes` are for blocks that come and go, as in `headrace.offload(device_memory=...)`. None: all that is
    left.
    """
    shape, method = case.shape, case.method
    capacity = _capacity(case.hardware)
    held = [*_activations(case), *_cache(case), *(_training(case) if case.trains else ())]
    if not method.streamed:
        held.append(Held(Place.DEVICE, "weights", shape.weight_bytes))
        if case.changes and not case.hardware.unified:
            on_host = round(method.host_share * _of_copy(shape.weight_bytes, case))
            held.append(Held(Place.HOST, "weights", on_host))
        return Tiers(held=tuple(held), capacity=capacity, streaming_bytes=0, unified=case.hardware.unified)
    sizes = [_of_copy(block.weight_bytes, case) for block in shape.blocks]
    there: frozenset[int] = frozenset()
    used = sum(item.nbytes for item in held if item.place is Place.DEVICE)
    if method.weights is Place.DISK:
        held.append(Held(Place.HOST, "staging", _largest(sizes, STAGED_BLOCKS)))
        taken = sum(item.nbytes for item in held if item.place is Place.HOST)
        taken += used + (streaming_bytes or _least(shape)) if case.hardware.unified else 0
        there = on_disk(sizes, max(0, capacity[Place.HOST] - taken))
        if can_cut(case):  # blocks of single experts rest on disk as wholes, and the host caches experts
            there |= frozenset(index for index, block in enumerate(shape.blocks) if block.experts)
    on_drive = sum(sizes[index] for index in there)
    rest = {Place.HOST: sum(sizes) - on_drive, Place.DISK: on_drive}
    held += [Held(place, "weights", nbytes) for place, nbytes in rest.items() if nbytes]
    packed = packed_bytes(shape.blocks[index] for index in there) if packs(case) else 0
    if packed:
        held.append(Held(Place.DISK, "packed weights", packed))
    free = capacity[Place.DEVICE] - used
    if case.hardware.unified:
        free -= sum(item.nbytes for item in held if item.place is Place.HOST)
    left = free if streaming_bytes is None else streaming_bytes
    tables, rows = tables_of(case), 0
    visiting = without_tables(case, tables)
    cuts = not case.trains and can_cut(case)
    least = least_cut_bytes(visiting.shape) if cuts else _least(visiting.shape)
    room = max(least, min(shape.weight_bytes, left))
    if room >= shape.weight_bytes:
        tables, visiting = frozenset(), case
    if tables:
        wanted = room_for_rows(case, tables, case.work.tokens)
        room = min(room, visiting.shape.weight_bytes + wanted)
        rows = kept_free_for_rows(wanted, room, least)
    cut = cut_of(visiting, room - rows)
    banks = 0 if cut is None else cut.bank_bytes
    copied = min(room, on_drive) if case.hardware.unified else room  # weights in the same memory are used there
    held.append(Held(Place.DEVICE, "weights", max(0, copied - banks)))
    if banks:
        held.append(Held(Place.DEVICE, "experts", banks))
    return Tiers(
        held=tuple(held),
        capacity=capacity,
        streaming_bytes=room,
        least_bytes=least,
        cut=cut,
        tables=tables,
        rows_bytes=rows,
        on_disk=there,
        unified=case.hardware.unified,
    )


def activation_bytes(case: Case) -> tuple[int, int]:
    """Bytes of activations on the device and in host memory, of one micro-batch or of those that go together.

    Recomputing keeps each layer's input, what all layers share, and the activations of one layer and one micro-batch at
    a time. If they leave over a link that keeps up with compute, the device holds those of the layer that computes, and
    its input, which its caller holds. Over a slower link, they are kept to a ceiling of two layers' activations. On the
    way to disk, host memory holds those of one layer. Inference holds no more than the largest layer's, and the logits
    of each sequence's last position.
    """
    kept, tokens = case.method.activations, case.work.tokens
    layers = [block for block in case.shape.blocks if block.kind is not BlockKind.HEAD]
    sizes = [block.activation_bytes(tokens) for block in layers]
    largest = max(sizes, default=0.0)
    if not case.trains:
        logits = sum(block.logit_bytes for block in case.shape.blocks)
        return round(max(largest, case.work.batch_size * logits)), 0
    saved = sum(block.activation_bytes(tokens) for block in case.shape.blocks)
    if kept is Activations.KEPT:
        return round(saved), 0
    head = saved - sum(sizes)
    if kept is Activations.RECOMPUTED:
        inputs = tokens * sum(block.input_bytes for block in layers)
        return round(inputs + max(head, largest / case.method.together)), 0
    here = ACTIVATION_LAYERS * largest
    if all(_keeps_up(block, case) for block in set(layers)):
        with_inputs = (block.activation_bytes(tokens) + tokens * block.input_bytes for block in layers)
        here = min(here, max(with_inputs, default=0.0))
    return round(head + here), round(sum(sizes) if kept is Activations.OFFLOADED else largest)


def cache_bytes(block: BlockShape, work: Work) -> int:
    """Bytes of the block's keys and values that are kept of one micro-batch."""
    return _cache_bytes(block, work, block.cached_tokens(work.sequence_length))


def _cache_bytes(block: BlockShape, work: Work, tokens: int) -> int:
    return work.batch_size * tokens * block.cache_elements * _CACHE_ELEMENT_BYTES


def taken_by_cache(case: Case, tiers: Tiers) -> int:
    """Bytes of `streaming_bytes` that keys and values on the device take, which take free memory first."""
    if case.trains or case.spread.data > 1 or case.method.cache is not Place.DEVICE:
        return 0
    cached = sum(cache_bytes(block, case.work) for block in case.shape.blocks)
    return max(0, cached - (tiers.capacity[Place.DEVICE] - tiers.total(Place.DEVICE)))


def _cache(case: Case) -> Iterable[Held]:
    """Keys and values that rest on the host or on disk, with room for tokens to come, and the layers that move."""
    place, work = case.method.cache, case.work
    if place is Place.DEVICE:
        return
    layers = [cache_bytes(block, work) for block in case.shape.blocks]
    roomy = [
        _cache_bytes(block, work, tokens_with_room(block.cached_tokens(work.sequence_length)))
        for block in case.shape.blocks
    ]
    yield Held(Place.DEVICE, CACHE, room_on_device(max(layers)))
    if place is Place.DISK:
        yield Held(Place.HOST, CACHE, _largest(layers, LAYERS_STAGED))
    yield Held(place, CACHE, sum(roomy))


def _keeps_up(block: BlockShape, case: Case) -> bool:
    """Whether a layer's activations leave within its forward, and come back, with its weights, within its backward."""
    if block.kind is not BlockKind.LAYER:
        return True
    share, nbytes = case.share, block.activation_bytes(case.work.tokens)
    out = nbytes / share.offload_bytes_per_second
    back = (nbytes + block.weight_bytes * case.method.streamed) / share.onload_bytes_per_second
    if case.method.activations is Activations.SPILLED:
        out = max(out, nbytes / share.disk_write_bytes_per_second)
        back = max(back, nbytes / share.disk_read_bytes_per_second)
    forward, backward = block_seconds(block, case.work, share)
    return out <= forward and back <= backward


def _activations(case: Case) -> Iterable[Held]:
    on_device, on_host = activation_bytes(case)
    yield Held(Place.DEVICE, "activations", on_device)
    if on_host:
        yield Held(Place.HOST, "activations", on_host)
    if case.method.activations is Activations.SPILLED:
        layers = (block for block in case.shape.blocks if block.kind is BlockKind.LAYER)
        yield Held(Place.DISK, "activations", round(sum(block.activation_bytes(case.work.tokens) for block in layers)))


def _training(case: Case) -> Iterable[Held]:
    """What training holds besides weights and activations: gradients, master weights, state and adapters."""
    shape, work, spread, method = case.shape, case.work, case.spread, case.method
    share, per = method.device_share, work.master_bytes + work.state_bytes
    gradients = int(spread.divided(work.gradient_bytes * shape.trainable, 2))
    state = round(spread.divided(per * shape.trainable, 1))
    of_blocks = min(gradients, _neighbours([work.gradient_bytes * block.trainable for block in shape.blocks]))
    # If the device updates a part of the parameters, gradients stay there until the step.
    yield Held(Place.DEVICE, "gradients", gradients if share or not case.gradients_leave else of_blocks)
    if method.update is Place.DEVICE:
        yield Held(Place.DEVICE, "updates", UPDATE_BYTES)
    if share:
        yield Held(Place.DEVICE, "master and state", round(share * state))
    if share < 1:
        # Memory for all gradients is made before the first backward: on disk, if there is one and no room on the host.
        on_disk = method.overlap is Overlap.BACKWARD and work.micro_batches == 1 and method.uses_disk
        sizes = (round(method.host_share * gradients), of_blocks, round(method.host_share * state))
        all_gradients, leaving, own_state = (_of_copy(nbytes, case) for nbytes in sizes)
        if case.gradients_leave:
            yield Held(Place.HOST, "gradients", leaving if on_disk else all_gradients)
        if on_disk and case.gradients_leave:
            yield Held(Place.DISK, "gradients", all_gradients)
        yield Held(method.state, "master and state", own_state)
        if method.state is Place.DISK:
            own = (_of_copy(spread.divided(per * block.trainable, 1), case) for block in shape.blocks)
            yield Held(Place.HOST, "staging", min(own_state, _largest(own, STAGED_BLOCKS)))
    if any(crossing_of(block, case).sum_bytes for block in set(shape.blocks)):
        # Each device's own gradients, until they are added up.
        yield Held(Place.HOST, "gradients to be summed", round(method.host_share * of_blocks))
    if work.training is Training.ADAPTER:
        yield Held(Place.DEVICE, "adapters", 2 * shape.trainable)


def _of_copy(nbytes: float, case: Case) -> int:
    """One device's part of `nbytes` on the host or on disk: its range, if the devices of a node share one copy."""
    return round(nbytes / case.spread.ranks if case.shares else nbytes)


def _least(shape: ModelShape) -> int:
    """Bytes that every visit fits in: of the largest block, or of embedding and head together if they are tied."""
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
    """The largest sum of neighbouring sizes, of as many blocks as have gradients on the device at once."""
    return max(sum(sizes[i : i + GRADIENT_BLOCKS]) for i in range(max(1, len(sizes) - GRADIENT_BLOCKS + 1)))


def _largest(sizes: Iterable[int], count: int) -> int:
    return sum(sorted(sizes, reverse=True)[:count])
