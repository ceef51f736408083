"""What does each block move and compute in a step? Counted once for each option; floors and tasks are made of it."""

from dataclasses import dataclass
from functools import cache

from headrace.planning.cost.experts import NO_EXPERTS, ExpertCut, PartLoads, others_of, pass_loads
from headrace.planning.cost.hardware import OVER_LINK, Hardware
from headrace.planning.cost.packing import packs, read_share
from headrace.planning.cost.rows import row_loads, without_table
from headrace.planning.cost.shape import BlockKind, BlockShape
from headrace.planning.cost.sharing import Crossing, crossing_of
from headrace.planning.cost.work import Activations, Case, Method, Place, Training, Work

# How many of each the engine holds at once.
ACTIVATION_LAYERS = 2  # on the device, if activations leave
GRADIENT_BLOCKS = 2  # on the device: one is computed while the one before leaves
STAGED_BLOCKS = 3  # of weights, or of state, between disk and host


@dataclass(frozen=True, kw_only=True)
class BlockTraffic(Crossing):
    """What one block moves and computes, for one device's range of a shared copy.

    - `block_bytes` visit, without what comes in parts: single experts, and rows of tables. Each load takes
      `load_seconds`, those of its slowest hop. Before each load, `fetch_bytes` of weights that rest on disk are read.
    - Each micro-batch computes for `forward_seconds` and `backward_seconds` (with recomputation). `activation_bytes`
      leave after forward and return before backward; if `activations_spill`, they go on to disk.
    - Where micro-batches go together in several rounds, each round but the first loads `sum_begins_bytes` of gradients
      to the device, and adds to these sums of the rounds before. The backward of its first micro-batch, which adds to
      them, takes `first_batch_seconds`.
    - Once a step, `norm_bytes` are read for the norm of all gradients, as each arrives. The update takes `update_bytes`
      of DRAM traffic on the host, and `device_update_seconds` on the device. If the device updates what rests on the
      host, `update_in_bytes` go there for it, and `update_out_bytes` come back. `state_bytes`, and `spill_bytes` of
      weights, are read from disk before the update and written after it.
    """

    block_bytes: int = 0
    load_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    update_bytes: float = 0.0
    device_update_seconds: float = 0.0
    update_in_bytes: int = 0
    update_out_bytes: int = 0
    sum_begins_bytes: int = 0
    first_batch_seconds: float = 0.0
    norm_bytes: float = 0.0
    state_bytes: int = 0
    fetch_bytes: int = 0
    spill_bytes: int = 0
    activation_bytes: int = 0
    activations_spill: bool = False
    over_link: bool = False  # whether devices send to each other over their links to the host
    parts: PartLoads = NO_EXPERTS  # experts that come one by one within each visit, or rows of a table


def traffic_of(
    case: Case,
    cut: ExpertCut | None = None,
    tables: frozenset[int] = frozenset(),
    on_disk: frozenset[int] = frozenset(),
) -> tuple[BlockTraffic, ...]:
    """The traffic of each block, on a device that has its share of the node.

    `cut`: experts that come one by one; `tables`: embeddings whose tables travel by rows; `on_disk`: blocks whose
    weights rest on disk.
    """
    work, spread, method, share = case.work, case.spread, case.method, case.share
    held = 1 / spread.ranks if case.shares else 1.0
    packed, leaving = packs(case), leaving_layers(case)

    @cache  # most blocks are alike
    def of_block(block: BlockShape, by_rows: bool, from_disk: bool, leaves: bool) -> BlockTraffic:
        computing = without_table(block, work.tokens) if by_rows else block
        visiting = computing if cut is None else others_of(computing)
        crossing = crossing_of(visiting, case)
        read = read_share(visiting) if packed else 1.0
        fetched = round(held * round(read * visiting.weight_bytes)) if from_disk else 0
        forward, backward = block_seconds(computing, work, share)
        again = recompute_seconds(block, work, method, forward)
        own = spread.divided(block.trainable, 1) if case.trains else 0.0
        trained = held * int(method.host_share * own) if method.state is not Place.DEVICE else 0.0
        by_device = method.update is Place.DEVICE
        into, out = work.update_crossing(streamed=method.streamed) if by_device else (0, 0)
        return BlockTraffic(
            **vars(crossing),
            block_bytes=visiting.weight_bytes,
            load_seconds=_load_seconds(crossing, fetched, share),
            forward_seconds=forward,
            backward_seconds=backward + again if case.trains else 0.0,
            update_bytes=0.0 if by_device else work.update_bytes * trained,
            update_in_bytes=round(into * trained),
            update_out_bytes=round(out * trained),
            device_update_seconds=work.update_bytes * method.device_share * own / share.device_bytes_per_second,
            sum_begins_bytes=crossing.gradient_bytes if method.together > 1 and method.streamed else 0,
            first_batch_seconds=(backward + again) / method.together if case.trains else 0.0,
            norm_bytes=work.gradient_bytes * trained if work.clipped and case.gradients_leave else 0.0,
            state_bytes=round((work.master_bytes + work.state_bytes) * trained) if method.state is Place.DISK else 0,
            fetch_bytes=fetched,
            spill_bytes=fetched if work.training is Training.FULL and trained else 0,
            activation_bytes=round(block.activation_bytes(work.tokens)) if leaves else 0,
            activations_spill=method.activations is Activations.SPILLED,
            over_link=case.shares and share.peer == OVER_LINK,
            parts=row_loads(block, case, work.tokens, from_disk)
            if by_rows
            else pass_loads(block, case, cut, from_disk),
        )

    return tuple(
        of_block(block, index in tables, index in on_disk, index in leaving)
        for index, block in enumerate(case.shape.blocks)
    )


def _load_seconds(crossing: Crossing, fetch_bytes: int, share: Hardware) -> float:
    """Seconds of a block's slowest hop to the device: from disk, out of memory, over the link, from other devices."""
    nbytes = crossing.load_bytes or 0
    on_link = share.link_latency_seconds + nbytes / share.onload_bytes_per_second
    hops = [on_link + crossing.gather_seconds * (share.peer == OVER_LINK), crossing.gather_seconds]
    hops.append(nbytes / share.dram_bytes_per_second)
    if fetch_bytes:
        hops.append(share.disk_latency_seconds + fetch_bytes / share.disk_read_bytes_per_second)
    return max(hops)


def leaving_layers(case: Case) -> frozenset[int]:
    """Indices of the layers whose activations leave: all but the last, with which backward begins."""
    if not case.trains or case.method.activations not in (Activations.OFFLOADED, Activations.SPILLED):
        return frozenset()
    return frozenset([index for index, block in enumerate(case.shape.blocks) if block.kind is BlockKind.LAYER][:-1])


def block_seconds(block: BlockShape, work: Work, hardware: Hardware) -> tuple[float, float]:
    """Seconds of one forward and one backward of a micro-batch, without recomputation.

    Forward takes its operations over their rate, but at least the weights that it reads over the device's memory rate.
    Backward takes twice as long if weights are trained, and as long as forward if only the gradient passes through.
    """
    flops = block.forward_flops(work.tokens, work.sequence_length)
    if block.kind is BlockKind.EMBEDDING:
        return 0.0, work.gradient_bytes * block.trainable / hardware.device_bytes_per_second
    read_bytes = block.read_bytes(work.tokens)
    forward = max(flops / hardware.flops_per_second, read_bytes / hardware.device_bytes_per_second)
    share = 2.0 if work.training is Training.FULL and block.trainable else 1.0
    return forward, share * forward


def recompute_seconds(block: BlockShape, work: Work, method: Method, forward_seconds: float) -> float:
    """Seconds for which backward repeats a block's forward; heads and embeddings are not recomputed."""
    if method.activations is not Activations.RECOMPUTED or block.kind is not BlockKind.LAYER:
        return 0.0
    return forward_seconds * block.again_share(work.sequence_length)
