"""Which weights may travel by rows? Those of embeddings, if all that hold them only look rows up.

See docs/design/tables.md. This is decided once for a table; each lookup decides for itself whether it goes by rows.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from headrace.weights.model.inventory import Inventory
from headrace.weights.model.layout import travel_dtype

__all__ = ["gathering_bytes", "looks_rows_up", "row_bytes_of"]

_HALF_BYTES = 4 * 2**20  # a copy of this size has a link's full speed
_HALF_SHARE = 1 / 8  # of a table, at the most


def gathering_bytes(table_bytes: int, row_bytes: int) -> int:
    """Bytes of one half of the host memory where rows are gathered: one half is sent while the other is filled."""
    nbytes = min(_HALF_BYTES, int(table_bytes * _HALF_SHARE))
    return max(row_bytes, nbytes // row_bytes * row_bytes) if row_bytes else 0


def row_bytes_of(keys: Sequence[int], modules: Sequence[nn.Module], inventory: Inventory) -> int:
    """Bytes of one row on the device, if these parameters are one table and nothing else; 0 if they travel whole.

    Several embeddings may hold the table, as in T5, whose encoder and decoder do.
    """
    if len(keys) != 1 or len(modules) != 1:
        return 0
    key = keys[0]
    parameter = inventory.members[key].parameter
    holders = [module for module, own in inventory.owned.items() if key in own]
    alone = parameter.dim() == 2 and inventory.can_be_cut(key, places=len(holders))
    only_looked_up = all(looks_rows_up(module) and inventory.owned[module] == [key] for module in holders)
    if not (alone and only_looked_up):
        return 0
    return parameter.shape[1] * travel_dtype(parameter, inventory.param_dtype).itemsize


def looks_rows_up(module: Any) -> bool:
    """Whether a call of the module takes rows of its weight, and does nothing else with it."""
    return (
        type(module) is nn.Embedding
        and module.max_norm is None
        and not module.sparse
        and not module.scale_grad_by_freq
        and "weight" in module._parameters
    )
