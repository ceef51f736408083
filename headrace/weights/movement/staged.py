"""What becomes of gradients in staging memory? The host lane adds them to, or casts them into, their destinations."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from headrace.memory.disk import Request
from headrace.weights.rest.placement import DiskGradients

__all__ = ["Remainder", "Staged", "add_up", "laid_out_like", "rest_of", "sum_of_rows"]


class Staged(NamedTuple):
    """A gradient, or a part of one, on its way through staging memory."""

    piece: torch.Tensor  # in staging memory
    source: torch.Tensor  # on the device
    target: torch.Tensor  # what becomes, or is, `home.grad`
    adds: bool  # to what the target holds
    disk: DiskGradients | None  # where the target rests, if not on the host
    rows: torch.Tensor | None = None  # of the target that the piece is; None: it is as large as that

    @property
    def is_written(self) -> bool:
        """Whether the target becomes just what the piece is, byte for byte."""
        return (
            not self.adds
            and self.rows is None
            and self.piece.dtype == self.target.dtype
            and self.target.is_contiguous()
        )


class Remainder(NamedTuple):
    """What a gradient of some rows leaves of the target: zero there, or added to what the target holds."""

    target: torch.Tensor
    rows: Sequence[int] | None  # that have no gradient; None: all are cleared, before those that have one come
    adds: bool
    disk: DiskGradients | None


def rest_of(
    target: torch.Tensor, rows: torch.Tensor, disk: DiskGradients | None, *, adds: bool, large: bool
) -> list[Remainder]:
    """What is to be done beside these rows. `large`: each row is worth a call, so no row is written twice.

    A zero that is added makes +0 of -0. Small rows, of tables, have none: their sums begin at +0.
    """
    if large:
        return [Remainder(target, sorted(set(range(len(target))).difference(rows.tolist())), adds, disk)]
    return [] if adds else [Remainder(target, None, adds, disk)]


def add_up(staged: "list[Staged | Remainder]", under_way: list[Request]) -> list[Request]:
    """On the host lane: staged gradients are added to, or cast into, their destinations.

    Returns the writes to disk that this begins: they read the staging memory. `under_way`: all that may not have ended,
    kept by this thread.
    """
    under_way[:] = [write for write in under_way if not write.query()]
    writes: list[Request] = []
    on_disk: Counter[DiskGradients] = Counter()
    with torch.no_grad():
        for one in staged:
            if isinstance(one, Staged) and one.disk is not None and one.is_written:
                writes.append(one.disk.write(one.target, one.piece))
                under_way.append(writes[-1])
                continue
            if one.disk is not None:
                for write in under_way:  # maybe of what is added to
                    write.settle()
                on_disk[one.disk] += one.target.nbytes
            if isinstance(one, Remainder):
                _add_zeros(one)
            elif one.rows is not None:
                _add_rows(one.target, one.rows, one.piece, adds=one.adds)
            elif one.adds:
                one.target.add_(one.piece)
            else:
                one.target.copy_(one.piece)
    for disk, nbytes in on_disk.items():
        disk.forget(nbytes)
    staged.clear()  # who counts the users of a gradient after this has ended does not find this one
    return writes


def _add_rows(target: torch.Tensor, rows: torch.Tensor, piece: torch.Tensor, *, adds: bool) -> None:
    if adds:
        piece = target.index_select(0, rows).add_(piece)
    target.index_copy_(0, rows, piece.to(target.dtype))


def _add_zeros(rest: Remainder) -> None:
    for part in [rest.target] if rest.rows is None else [rest.target[row] for row in rest.rows]:
        if rest.adds:
            part.add_(0.0)
        else:
            part.zero_()


def sum_of_rows(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The rows of any part, and the sum of their gradients on the device, in the order of the parts; these are emptied.

    As if each part were a whole gradient, zero in other rows: where such a zero is added, no -0 is left. The sum comes
    in pieces, of rows in their order.
    """
    if len(parts) == 1:
        own, gradient = parts.pop()
        return own, [gradient]
    named = torch.cat([rows for rows, _ in parts])
    rows, counts = named.unique(return_counts=True)
    if len(rows) == len(named):
        parts.reverse()
        return named, [parts.pop()[1].add(0.0) for _ in range(len(parts))]  # as many bytes as before, and one part's
    first = parts[0][1]
    total = first.new_zeros(len(rows), *first.shape[1:])
    for number, (own, gradient) in enumerate(parts):
        where = torch.searchsorted(rows, own).to(total.device)
        total.index_copy_(0, where, total.index_select(0, where).add_(gradient) if number else gradient)
    absent = (counts < len(parts)).nonzero().squeeze(1).to(total.device)
    parts.clear()
    return rows, [total.index_copy_(0, absent, total.index_select(0, absent).add_(0.0))]


def laid_out_like(gradient: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`gradient` with the strides of `target`, so that the copy across the link is one run of bytes."""
    if gradient.stride() == target.stride():
        return gradient
    return torch.empty_strided(target.shape, target.stride(), dtype=gradient.dtype, device=gradient.device).copy_(
        gradient
    )
