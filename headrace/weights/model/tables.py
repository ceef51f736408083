"""Which weights may travel by rows? Those of embeddings that nobody uses but to look rows up.

See docs/design/tables.md. What is decided here is decided once; what a lookup itself can do by rows is decided at each.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from headrace.weights.model.inventory import Inventory
from headrace.weights.model.layout import travel_dtype

__all__ = ["FEWEST_ROWS", "gathering_bytes", "looks_rows_up", "row_bytes_of"]

FEWEST_ROWS = 16  # for so many there has to be room: where there is no more, a lookup takes turns
_HALF_BYTES = 4 * 2**20  # has a link's full speed
_HALF_SHARE = 1 / 8  # of a table, at the most


def gathering_bytes(table_bytes: int, row_bytes: int) -> int:
    """Of host memory, where rows are gathered: for one half of it, which is sent while the other one is filled."""
    nbytes = min(_HALF_BYTES, int(table_bytes * _HALF_SHARE))
    return max(row_bytes, nbytes // row_bytes * row_bytes) if row_bytes else 0


def row_bytes_of(keys: Sequence[int], modules: Sequence[nn.Module], inventory: Inventory) -> int:
    """Bytes of one row on the device, of a block that is a table and nothing else; 0 for one that travels whole."""
    if len(keys) != 1 or len(modules) != 1 or not looks_rows_up(modules[0]):
        return 0
    parameter = inventory.members[keys[0]].parameter
    alone = inventory.owned.get(modules[0]) == list(keys) and inventory.can_be_cut(keys[0]) and parameter.dim() == 2
    return parameter.shape[1] * travel_dtype(parameter, inventory.param_dtype).itemsize if alone else 0


def looks_rows_up(module: Any) -> bool:
    """Whether a call of the module takes rows of its weight, and does nothing else with it."""
    return (
        type(module) is nn.Embedding
        and module.max_norm is None
        and not module.sparse
        and not module.scale_grad_by_freq
        and "weight" in module._parameters
    )
