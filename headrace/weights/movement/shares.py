"""How is the budget of one model shared out? Among blocks that travel whole, rows of tables, and experts.

Experts are of two kinds: modules of their own, which are blocks (module_experts.py), and slices of stacked weights,
which lie in banks (slices.py).
"""

from collections.abc import Callable, Sequence

from headrace.planning import FEWEST_ROWS
from headrace.weights.movement.block import Block

_FEWEST_MODULE_EXPERTS = 2  # experts: one comes while another computes


class Shares:
    """The shares of the budget for blocks that come and go, which `budget_bytes` gives. Asked between passes.

    `banks_bytes`: gives the bytes that banks of experts take, made or not.
    """

    def __init__(self, blocks: Sequence[Block], budget_bytes: Callable[[], int]) -> None:
        self._blocks = blocks
        self.budget_bytes = budget_bytes
        self.banks_bytes: Callable[[], int] = lambda: 0  # set by `Slices`
        self.rows_bytes = max((FEWEST_ROWS * block.row_bytes for block in blocks), default=0)  # kept free by plans
        sizes = [block.nbytes for block in blocks if block.expert_key is not None]
        self.largest_module_expert_bytes, self._all_module_experts_bytes = max(sizes, default=0), sum(sizes)
        self.least_module_experts_bytes = min(
            _FEWEST_MODULE_EXPERTS * self.largest_module_expert_bytes, self._all_module_experts_bytes
        )
        self.sort()

    def sort(self) -> None:
        """Sorts the blocks by how they travel. Called again when one begins to travel in another way."""
        self.whole_blocks = [block for block in self._blocks if not block.travels_in_parts]
        self.in_parts = {block.index for block in self._blocks if block.travels_in_parts}
        self._whole_bytes = sum(block.nbytes for block in self.whole_blocks if block.expert_key is None)
        self._has_tables = any(block.row_bytes for block in self._blocks)

    def leave_for_rows(self, nbytes: int) -> None:
        """Called when a lookup needs rows of `nbytes`: plans leave room for these from now on."""
        if nbytes > self.rows_bytes:
            self.rows_bytes = 1 << (nbytes - 1).bit_length()  # so that plans are made anew only a few times

    @property
    def beside_experts_bytes(self) -> int:
        """Bytes of all blocks but experts, and of the room for rows of tables that plans leave."""
        return self._whole_bytes + (self.rows_bytes if self._has_tables else 0)

    @property
    def module_experts_bytes(self) -> int:
        """Bytes that experts which are modules may take: all that other blocks, rows and banks leave, if needed."""
        if not self._all_module_experts_bytes:
            return 0
        room_bytes = self.budget_bytes() - self.beside_experts_bytes
        return min(
            max(room_bytes - self.banks_bytes(), self.least_module_experts_bytes), self._all_module_experts_bytes
        )
