"""What does autograd keep of experts that came one by one? Which they were, and how they lay in a slot, but no bytes.

Backward has experts that are gone brought again, as it has blocks brought of which it needs a weight (handles.py).
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from headrace.errors import BudgetError
from headrace.runtime.autograd import without_overrides
from headrace.weights.model.managed_param import ManagedParam, Token
from headrace.weights.movement.block import Block
from headrace.weights.movement.slices import Slices

__all__ = ["SavedExperts", "saved_experts_of"]


class SavedExperts(NamedTuple):
    """A view of one expert's weight, or of one weight of all experts in a bank, without the memory."""

    block: Block
    param: ManagedParam
    token: Token
    experts: dict[int, int]  # numbers of experts, by the slot of the bank
    bank_slots: int  # how many slots the bank had; 0: it does not matter in which one an expert is
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # bytes from the start of the slot, or of the bank
    recompute: "Callable[[Any], Any] | None"  # the unpack hook of a checkpoint around, which computes again first

    def weight(self, slices: Slices) -> torch.Tensor:
        """The view, on the device; experts that are gone are brought. An unpack hook calls this in backward.

        Raises BudgetError if it matters in which slots experts are and the bank has not as many slots as in forward.
        """
        with without_overrides():
            bank = slices.bank_of(self.block, len(self.experts))
            if self.bank_slots and bank.slots != self.bank_slots:
                raise BudgetError(
                    f"backward needs experts of {self.block.name!r} in {self.bank_slots} slots, as forward had them,"
                    f" and there are {bank.slots} since more of the model stays on the device; run backward before"
                    " adapters are added or anything else changes what stays, or raise device_memory"
                )
            in_slots = list(self.experts) if self.bank_slots else None
            slots = slices.bring(self.block, bank, list(self.experts.values()), slots=in_slots)
            first = 0 if self.bank_slots else slots[0]
            for slot in slots:
                slices.arrive(bank, slot)
            weight = torch.empty(0, dtype=self.dtype, device=bank.buffer.device)
            begin = (first * slices.slot_bytes + self.offset) // self.dtype.itemsize
            return weight.set_(bank.buffer.untyped_storage(), begin, self.size, self.stride)


def saved_experts_of(
    slices: Slices, tensor: torch.Tensor, recompute: "Callable[[Any], Any] | None"
) -> SavedExperts | None:
    """What to keep of a tensor that lies in a bank; None for any other."""
    place = slices.place_of(tensor)
    if place is None:
        return None
    bank, begin = place
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    is_bank = (last + 1) * tensor.itemsize > slices.slot_bytes
    if is_bank and bank.in_call is not None:
        block, slots = bank.in_call
        held, offset, at = bank.experts_in(slots), begin, begin
    else:
        number, at = divmod(begin, slices.slot_bytes)
        held, offset = bank.experts_in([number]), at
        if not held:
            return None
        block = slices.block_of(held[number])
    parts = slices.slice_parts_of(block)
    index = bisect_right([part.offset for part in parts], at) - 1
    param = block.params[index]
    experts = {number: key[1] for number, key in held.items()}
    return SavedExperts(
        block,
        param,
        param.token,
        experts,
        bank.slots * is_bank,
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        offset,
        recompute,
    )
