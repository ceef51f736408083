"""How does a low-precision weight keep an exact float32 value? In split form, or beside it; here in PyTorch.

Split form: the bfloat16 weight is `(bits + 0x8000) >> 16` of the float32 value, the remainder its low 16 bits. With the
remainder read as a signed number the two add up to the value again. Ties have to round up in the bits: with ties to
even, 65,537 floats share one bfloat16 value, and 16 bits do not tell them apart.
"""

import torch

from headrace.optim.kernel import Master

_MASK = 0xFFFFFFFF


def join(weight: torch.Tensor, master: torch.Tensor | None, form: Master) -> torch.Tensor:
    """The exact values: the weight itself (not a copy) if it is its own master, else a new float32 tensor.

    In full form, an element of the master counts if it rounds to the weight that is there; a tie may round to either
    side, because the master may come from split form. Otherwise somebody wrote the weight, and the weight counts.
    """
    if master is None:
        return weight
    if form is Master.SPLIT:
        return ((weight.view(torch.int16).to(torch.int32) << 16) + master).view(torch.float32)
    counts = master.to(weight.dtype) == weight
    if weight.dtype == torch.bfloat16:
        counts |= (_ties_up(master.view(torch.int32)).view(torch.bfloat16) == weight) & ~master.isnan()
    return torch.where(counts, master, weight.to(torch.float32))


def split_master(exact: torch.Tensor, weight: torch.Tensor, master: torch.Tensor | None, form: Master) -> None:
    """The inverse of `join`: writes `weight` and `master`."""
    if master is None:
        if exact.data_ptr() != weight.data_ptr():
            weight.copy_(exact)
    elif form is Master.SPLIT:
        bits = torch.where(exact.isnan(), 0x7FC00000, exact.view(torch.int32))
        weight.view(torch.int16).copy_(_ties_up(bits))
        master.copy_(bits)
    else:
        master.copy_(exact)
        weight.copy_(exact)


def _ties_up(bits: torch.Tensor) -> torch.Tensor:
    return ((bits + 0x8000) >> 16).to(torch.int16)


def random_bits(places: torch.Tensor) -> torch.Tensor:
    """32 bits for each place (int64, below 2**32), the same as the kernel's. They depend only on the place."""
    bits = places & _MASK
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _MASK
    # 0x846CA68B times a 32-bit number leaves 64 bits, so it is done in two halves.
    bits = bits ^ (bits >> 15)
    bits = (bits * 0xA68B + ((bits * 0x846C & 0xFFFF) << 16)) & _MASK
    return bits ^ (bits >> 16)


def stochastic_bfloat16(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """float32 `values` rounded up or down to bfloat16, up with a probability that grows from 0 to 1 between the two."""
    bits = values.view(torch.int32)
    rounded = (bits + (random & 0xFFFF).to(torch.int32)) >> 16
    special = (bits & 0x7F800000) == 0x7F800000
    quiet = values.isnan().to(torch.int32) << 6  # a NaN that shows only in the lower half would become infinite
    return torch.where(special, bits >> 16 | quiet, rounded).to(torch.int16).view(torch.bfloat16)
