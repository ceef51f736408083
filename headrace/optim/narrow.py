"""How does a low-precision weight keep an exact float32 value? In split form, or beside it; here in PyTorch.

Split form: the bfloat16 weight is `(bits + 0x8000) >> 16` of the float32 value, the remainder its low 16 bits. With the
remainder read as a signed number the two add up to the value again. Ties have to round up in the bits: with ties to
even, 65,537 floats share one bfloat16 value, and 16 bits do not tell them apart.

Without a master, what a step makes of a bfloat16 weight is rounded up or down by chance (Gupta et al., "Deep Learning
with Limited Numerical Precision", 2015): `(bits + r) >> 16`, with 16 random bits r. See docs/design/optimizers.md.
"""

import torch

from headrace.optim.kernel import Master

_MASK = 0xFFFFFFFF
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))  # of the hash: a shift and a factor in each
_AT_ONCE = 1 << 24  # elements for which there are random numbers at a time


def join(weight: torch.Tensor, master: torch.Tensor | None, form: Master) -> torch.Tensor:
    """The exact values: the weight itself (not a copy) if it is its own master, else a new float32 tensor.

    In full form, an element of the master counts if it rounds to the weight that is there; a tie may round to either
    side, because the master may come from split form. Otherwise somebody wrote the weight, and the weight counts.
    """
    if form is Master.NONE:
        return weight.to(torch.float32)
    if master is None:
        return weight
    if form is Master.SPLIT:
        return ((weight.view(torch.int16).to(torch.int32) << 16) + master).view(torch.float32)
    counts = master.to(weight.dtype) == weight
    if weight.dtype == torch.bfloat16:
        counts |= (_ties_up(master.view(torch.int32)).view(torch.bfloat16) == weight) & ~master.isnan()
    return torch.where(counts, master, weight.to(torch.float32))


def split_master(
    exact: torch.Tensor, weight: torch.Tensor, master: torch.Tensor | None, form: Master, begin: int = 0
) -> None:
    """The inverse of `join`: writes `weight` and `master`.

    Without a master, both are flat, and `begin` is where the random numbers of the weights begin (see `key`).
    """
    if form is Master.NONE:
        for start in range(0, exact.numel(), _AT_ONCE):
            part = exact[start : start + _AT_ONCE]
            weight[start : start + _AT_ONCE].copy_(stochastic_bfloat16(part, randoms(begin + start, part)))
    elif master is None:
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


def key(step: float, stream: int, *, of_weight: bool) -> int:
    """Where the random numbers of a parameter at a step begin: those of its weights, or those of its moments.

    `stream`: the number of the parameter.
    """
    found = random_bits(seed(step) + stream)
    return random_bits(~found) if of_weight else found


def seed(step: float) -> int:
    """What sets the random numbers of one step apart from those of others."""
    return int(step) * 0x9E3779B9 & _MASK


def random_bits(place: int) -> int:
    """32 bits that depend only on the place, the same as the kernel's."""
    bits = place & _MASK
    for shift, factor in _ROUNDS:
        bits = (bits ^ bits >> shift) * factor & _MASK
    return bits ^ bits >> 16


def randoms(begin: int, like: torch.Tensor) -> torch.Tensor:
    """32 random bits for each element of `like`, as int32. `begin`: a `key`, plus the place of the first element.

    In int32, products keep their lower 32 bits, and shifts bring in the sign.
    """
    bits = torch.arange(like.numel(), dtype=torch.int32, device=like.device).add_(_signed(begin))
    for shift, factor in _ROUNDS:
        bits.bitwise_xor_((bits >> shift).bitwise_and_(_MASK >> shift)).mul_(_signed(factor))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def _signed(bits: int) -> int:
    return (bits + (1 << 31) & _MASK) - (1 << 31)


def stochastic_bfloat16(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """float32 `values` rounded up or down to bfloat16, up with a probability that grows from 0 to 1 between the two.

    Beyond the largest finite bfloat16, infinity is the value above. What is not finite stays infinite, or NaN.
    """
    bits = values.view(torch.int32)
    rounded = (bits + (random & 0xFFFF)) >> 16
    special = (bits & 0x7F800000) == 0x7F800000
    quiet = values.isnan().to(torch.int32) << 6  # a NaN that shows only in the lower half would become infinite
    return torch.where(special, bits >> 16 | quiet, rounded).to(torch.int16).view(torch.bfloat16)
