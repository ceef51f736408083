"""How do rows of an embedding table come to the device? Those that a lookup needs are gathered on the host, and sent.

The table itself stays on the host, see docs/design/tables.md. Like blocks, rows need room within the budget, as long
as the lookup takes; where there is too little room for all rows, the lookup takes several turns.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F

from headrace.config import format_bytes
from headrace.errors import BudgetError
from headrace.memory.arena import Arena
from headrace.memory.buffers import plain_tensors
from headrace.runtime.autograd import without_modes
from headrace.runtime.lanes import Event, Lane, Transfer
from headrace.weights.meter import Meter
from headrace.weights.model.partition import gathering_bytes
from headrace.weights.movement.block import Block
from headrace.weights.movement.residency import Residency
from headrace.weights.movement.shares import Shares


class Rows:
    """Looks up rows in the tables of one model."""

    def __init__(self, blocks: Iterable[Block], shares: Shares, residency: Residency, meter: Meter) -> None:
        self._shares = shares
        self._residency = residency
        self._lanes = residency.pace.lanes
        self._meter = meter
        self._half_bytes = max((gathering_bytes(block.nbytes, block.row_bytes) for block in blocks), default=0)
        count = 2 if self._half_bytes else 0
        arenas = [Arena(self._half_bytes, self._lanes.device, residency.ledger, "weights") for _ in range(count)]
        self._halves = [arena.tensor(0, self._half_bytes) for arena in arenas]
        self._sent: list[Event | None] = [None, None]  # of each half, the end of its last copy

    def look_up(self, block: Block, used: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """An embedding's output for the rows `used[index]` of the block's table. Both are on the host; `used` ascends.

        Raises BudgetError where the budget has no room for one row.
        """
        device = self._lanes.device
        at_once = self._rows_at_once(block, len(used))
        if at_once >= len(used):
            with self._brought(block, used) as rows:
                return F.embedding(index.to(device), rows)
        layout = block.params[0].layout
        found = torch.empty((*index.shape, layout.shape[1]), dtype=layout.dtype, device=device)
        flat = index.reshape(-1)
        for first in range(0, len(used), at_once):
            here = ((flat >= first) & (flat < first + at_once)).nonzero().squeeze(1)
            with self._brought(block, used[first : first + at_once]) as rows:
                values = rows.index_select(0, (flat[here] - first).to(device))
            del rows  # the next turn needs its memory
            found.view(flat.numel(), -1).index_copy_(0, here.to(device), values)
        return found

    def _rows_at_once(self, block: Block, count: int) -> int:
        self._shares.leave_for_rows(count * block.row_bytes)
        free_bytes = self._residency.clear(count * block.row_bytes)
        if free_bytes < block.row_bytes:
            raise BudgetError(
                f"a row of table {block.name!r} needs {format_bytes(block.row_bytes)}, and device_memory leaves"
                f" {format_bytes(max(0, free_bytes))} beside the blocks in use; raise it by"
                f" {format_bytes(block.row_bytes - free_bytes, at_least=True)}"
            )
        return free_bytes // block.row_bytes

    @contextmanager
    def _brought(self, block: Block, used: torch.Tensor) -> Iterator[torch.Tensor]:
        """The rows `used` of the table on the device, shape (rows, columns), within the `with` block."""
        layout = block.params[0].layout
        buffer = self._residency.allot(len(used) * block.row_bytes)
        try:
            with plain_tensors():
                rows = buffer.view(layout.dtype).view(len(used), layout.shape[1])
                self._send(block, used, rows)
            yield rows
            del rows
        finally:
            self._residency.free(buffer)

    def _send(self, block: Block, used: torch.Tensor, rows: torch.Tensor) -> None:
        """Sends them on the compute lane, which waits for them anyway; the onload lane may have loads to do first."""
        table = block.readable_table()
        count = self._half_bytes // block.row_bytes
        for turn, (part, target) in enumerate(zip(used.split(count), rows.split(count), strict=True)):
            source = self._half(turn % 2, target)
            if source.dtype == table.dtype:
                torch.index_select(table, 0, part, out=source)
            else:
                source.copy_(table.index_select(0, part))
            begun = self._lanes.tick()
            with without_modes():  # a selective checkpoint counts operators
                target.copy_(source, non_blocking=True)
            self._sent[turn % 2] = self._lanes.mark()
            self._meter.arrived(Transfer(Lane.ONLOAD, (), target.nbytes, begun, self._lanes.tick()), block.name)
        self._meter.rows_onloaded(rows.nbytes)

    def _half(self, half: int, like: torch.Tensor) -> torch.Tensor:
        """Host memory of the shape and dtype of `like`, once the last copy from it is done."""
        sent, self._sent[half] = self._sent[half], None
        if sent is not None:
            sent.synchronize()
        return self._halves[half][: like.nbytes].view(like.dtype).view(like.shape)
