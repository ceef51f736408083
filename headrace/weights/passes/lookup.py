"""How is a table that travels by rows looked up? Its embedding's `forward` is ours: rows come, and get a gradient.

The host reads which rows are wanted, and so waits once for what the device computes before the lookup. The used rows,
in order, are a small table, and positions in it take the place of ids. So the device's own kernels look rows up, and
add up the gradients of a row in the same order as in the whole table. See docs/design/tables.md.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from headrace.runtime.autograd import innermost_transform, without_overrides
from headrace.weights.model.partition import looks_rows_up
from headrace.weights.movement.block import Block, Presence
from headrace.weights.passes.lending import Lending
from headrace.weights.passes.row_gradients import RowGradients


class Lookups:
    """Lookups in the tables of one model."""

    def __init__(self, lending: Lending, row_gradients: RowGradients) -> None:
        self._lending = lending
        self._device, self._executor = lending.passes.device, lending.passes.executor
        self._row_gradients = row_gradients

    def look_up(self, block: Block, module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a call of an embedding. `own` is its own `forward`, which computes with the whole table."""
        ids: Any = args[0] if args else kwargs.get("input")
        if len(args) + len(kwargs) == 1 and self._goes_by_rows(block, module, ids):
            with without_overrides():
                if ids.dtype not in (torch.int64, torch.int32):
                    return F.embedding(ids, torch.empty(1, 1, device=self._device))  # raises
                return self._look_up(block, module, ids)
        return own(*args, **kwargs)

    def _goes_by_rows(self, block: Block, module: nn.Module, ids: Any) -> bool:
        return (
            bool(block.row_bytes)
            and block.presence is Presence.ABSENT
            and type(ids) in (torch.Tensor, nn.Parameter)
            and ids.device == self._device
            and self._lending.computes
            and dict.get(module._parameters, "weight") is block.params[0].home
            and looks_rows_up(module)
            and innermost_transform() is None
        )

    def _look_up(self, block: Block, module: Any, ids: torch.Tensor) -> torch.Tensor:
        param = block.params[0]
        param.check_shape()
        used, index = torch.unique(ids.detach().to("cpu", torch.int64), return_inverse=True)
        rows = param.layout.shape[0]
        if len(used) and not 0 <= int(used[0]) <= int(used[-1]) < rows:
            wrong = int(used[0]) if used[0] < 0 else int(used[-1])
            raise IndexError(
                f"index out of range: embedding {block.name!r} has {rows} rows, and row {wrong} is asked for"
            )
        if not len(used):
            used = used.new_zeros(1)

        def values() -> torch.Tensor:
            return self._executor.rows.look_up(block, used, index)

        padding = _place(module.padding_idx, used, rows)

        def to_rows(gradient: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            where = torch.searchsorted(used.to(ids.device, ids.dtype), ids, out_int32=ids.dtype == torch.int32)
            of_rows: torch.Tensor = torch.ops.aten.embedding_dense_backward(gradient, where, len(used), padding, False)
            return of_rows

        # What is saved is what an embedding saves: the very ids, as a checkpoint around it may compute the lookup
        # again in the whole table, if that is here by then. Its gradient does not read the table.
        return self._row_gradients.computed(param, values, used, lambda: bool(block.row_bytes), to_rows, ids)


def _place(padding_idx: int | None, used: torch.Tensor, rows: int) -> int:
    """The position among the used rows of the row without gradients; -1 if it is not used."""
    if padding_idx is None:
        return -1
    padding_idx %= rows
    place = int(torch.searchsorted(used, padding_idx))
    return place if place < len(used) and used[place] == padding_idx else -1
