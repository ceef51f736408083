"""Which embeddings travel by rows, and what do lookups load? As `weights/model/partition.py` decides, in numbers."""

from dataclasses import replace

from headrace.planning.cost.experts import NO_EXPERTS, PartLoads, can_cut, others_of
from headrace.planning.cost.shape import BlockShape
from headrace.planning.cost.work import Case
from headrace.planning.tables import FEWEST_ROWS, goes_by_rows

Tables = frozenset[int]


def tables_of(case: Case) -> Tables:
    """The indices of embeddings whose tables travel by rows if not all weights have room on the device."""
    if not case.method.streamed or case.spread.data > 1:
        return frozenset()
    blocks = case.shape.blocks
    whole = [others_of(block) if can_cut(case) else block for block in blocks if not block.row_parameters]
    largest = max((block.weight_bytes for block in whole), default=0)
    return frozenset(
        index
        for index, block in enumerate(blocks)
        if block.row_parameters and goes_by_rows(block.weight_bytes, largest, trained=block.trainable > 0)
    )


def without_tables(case: Case, tables: Tables) -> Case:
    """The case with what visits the device: not these tables, only the gradients of their rows."""

    blocks = list(case.shape.blocks)
    for index in tables:
        blocks[index] = without_table(blocks[index], case.work.tokens)
    return replace(case, shape=replace(case.shape, blocks=tuple(blocks)))


def without_table(block: BlockShape, tokens: int) -> BlockShape:
    """What visits the device of an embedding whose table travels by rows, for lookups of this many tokens."""
    return replace(block, parameters=0, trainable=min(block.trainable, _looked_up(block, tokens)))


def row_loads(block: BlockShape, case: Case, tokens: int, from_disk: float) -> PartLoads:
    """What a lookup of this many different tokens loads; the share `from_disk` of it is read from disk.

    The host first waits for the tokens' numbers, as it does for a router's result.
    """
    nbytes = _looked_up(block, tokens) * block.weight_bits / 8
    if not nbytes:
        return NO_EXPERTS
    hardware = case.share
    link = 2 * hardware.link_latency_seconds + nbytes / hardware.onload_bytes_per_second
    disk = (
        hardware.disk_latency_seconds + from_disk * nbytes / hardware.disk_read_bytes_per_second if from_disk else 0.0
    )
    return PartLoads(nbytes=nbytes, link_seconds=link, disk_seconds=disk, in_backward=False)


def room_for_rows(case: Case, tables: Tables, tokens: int) -> int:
    """Bytes on the device that plans leave free for lookups of this many different tokens."""
    blocks = (case.shape.blocks[index] for index in tables)
    return sum(round(_looked_up(block, max(tokens, FEWEST_ROWS)) * block.weight_bits / 8) for block in blocks)


def _looked_up(block: BlockShape, tokens: int) -> int:
    """Parameters of the rows of this many different tokens."""
    return min(tokens * block.row_parameters, block.parameters)
