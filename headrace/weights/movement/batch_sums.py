"""How do gradients of several micro-batches become one, before they leave the device? They are added up block by block,
in the order of the micro-batches, so that the sum has the same bits as a loop that adds each one up on the host. Where
a home has a gradient already, the sum begins with that, which comes to the device while the block computes.
"""

from collections.abc import Collection, Iterable, Mapping

import torch

from headrace.memory.arena import Arena, whole_pages
from headrace.runtime.autograd import without_overrides
from headrace.runtime.lanes import Event, Lane, Transfer
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.movement.block import Block, block_of
from headrace.weights.movement.flow import PURPOSE
from headrace.weights.movement.gradients import Gradients, sum_of_rows

_Part = tuple[torch.Tensor, torch.Tensor | None]  # a gradient on the host, and the rows that it has; None: all


class BatchSums:
    """Gradients of one backward over `count` micro-batches. `number`: the micro-batch whose gradients come now.

    `apart` gives, for parameters with gradients in several blocks (tied weights), the number of these. A loop would
    first add up one micro-batch's gradients. So those of each micro-batch wait in host memory, made here: locking pages
    would stall backward. Each gradient of a parameter in `one_by_one` comes in its own backward (reentrant
    checkpoints): a loop adds each to the present gradient.
    """

    def __init__(
        self,
        gradients: Gradients,
        count: int,
        apart: Mapping[ManagedParam, int],
        one_by_one: Collection[ManagedParam],
    ) -> None:
        self.number = 0
        self._gradients, self._lanes = gradients, gradients.lanes
        self._apart, self._one_by_one = apart, one_by_one
        self._sums: dict[ManagedParam, torch.Tensor] = {}  # on the device: sums for the block that backward is at
        # Gradients that homes of that block have already, their versions, and the copies that come to the device.
        self._before: dict[ManagedParam, tuple[torch.Tensor, int, torch.Tensor, Transfer]] = {}
        # Parameters of that block for which a micro-batch gave only rows: their gradients leave one by one.
        self._of_rows: set[ManagedParam] = set()
        self._waiting: list[dict[ManagedParam, list[_Part]]] = [{} for _ in range(count)]  # by micro-batch
        self._leaving: list[Transfer] = []  # transfers that compute has not waited for
        self._last: Event | None = None  # the end of the last transfer that compute has waited for
        # In a table of which only rows travel, one block gives a gradient of rows, whose number is not known.
        dense = {param: count * (blocks - _is_table(param)) for param, blocks in apart.items()}
        self._room = {param: [self._arena(_nbytes(param)) for _ in range(parts)] for param, parts in dense.items()}

    def reach(self, blocks: Iterable[Block]) -> None:
        """Called when backward comes to these blocks: sends for gradients that homes have, with which sums begin. The
        last parameter's comes first, as backward needs it first.
        """
        for block in blocks:
            for param in () if block.travels_in_parts else reversed(block.params):
                known = param in self._apart or param in self._before or param in self._sums
                if param.home.requires_grad and not known:
                    self._send_for(param)

    def _send_for(self, param: ManagedParam) -> None:
        there = self._gradients.continued(param)
        if there is not None:
            here = torch.empty_like(there, device=self._lanes.device)
            transfer = self._lanes.copy(Lane.ONLOAD, [(here, there)], self._lanes.mark())
            self._before[param] = there, there._version, here, transfer
            self._gradients.meter.gradient_onloaded(transfer.nbytes)

    def _begun_with(self, param: ManagedParam) -> torch.Tensor | None:
        """A copy on the device of the gradient that the home has now, to which the caller adds. None: it has none."""
        there = self._gradients.continued(param)
        sent, version, here, transfer = self._before.pop(param, (None, 0, None, None))
        if transfer is not None:
            self._lanes.wait(transfer.done)
        if there is None:
            return None
        self._gradients.replaces(param)
        if sent is there and here is not None and there._version == version:
            return here
        return there.to(self._lanes.device, copy=True)  # of a block that stays, or was not announced

    def take(self, param: ManagedParam, *gradients: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Takes a complete gradient of the present micro-batch. Arguments: see `GradientFlow.take`."""
        if param in self._apart:
            self._put_aside(param, gradients[0] if rows is None else torch.cat(gradients), rows)
            return
        if rows is not None:
            if param in self._sums:
                self._gradients.take(param, self._sums.pop(param))
            self._of_rows.add(param)
        if param in self._of_rows or gradients[0].layout != torch.strided:
            self._gradients.take(param, *gradients, rows=rows)
        elif param in self._sums:
            self._sums[param].add_(gradients[0])
        else:
            before, dtype = self._begun_with(param), self._gradients.dtype(param)
            self._sums[param] = gradients[0].to(dtype) if before is None else before.add_(gradients[0])

    def leave_block(self) -> None:
        """Called when all micro-batches have been at the block: hands its sums on."""
        sums, self._sums = self._sums, {}
        for *_, transfer in self._before.values():  # of parameters that got no gradient
            self._lanes.wait(transfer.done)
        self._before.clear()
        self._of_rows.clear()
        for param, gradient in sums.items():
            self._gradients.take(param, gradient)
        leaving, self._leaving = self._leaving, []
        for transfer in leaving:
            self._lanes.wait(transfer.done)
            self._last = transfer.done

    def abandon(self) -> None:
        """Called when backward raised: compute waits for all that comes, and the host for all that leaves, also where
        Ctrl-C came before that was noted, as the memory of both is free from now on.
        """
        self._lanes.wait(self._lanes.copy(Lane.ONLOAD, (), self._lanes.mark()).done)
        self._lanes.copy(Lane.OFFLOAD, (), self._lanes.mark()).done.synchronize()
        self._before.clear()
        self._leaving.clear()

    def end(self) -> None:
        """Called when all micro-batches are through: adds up gradients that wait, in the order of the micro-batches."""
        self.leave_block()
        if self._last is not None:
            self._last.synchronize()  # of transfers on one lane, the last one ends last
        for waiting in self._waiting:
            for param, parts in waiting.items():
                for gradient, rows in parts if param in self._one_by_one else _added_up(parts):
                    self._gradients.add_on_host(param, gradient, rows)
            waiting.clear()
        self._room.clear()

    def _put_aside(self, param: ManagedParam, gradient: torch.Tensor, rows: torch.Tensor | None) -> None:
        parts = self._waiting[self.number].setdefault(param, [])
        if gradient.layout != torch.strided:
            parts.append((gradient.to("cpu"), rows))
            return
        with torch.no_grad(), without_overrides():
            gradient = gradient.contiguous()
            fits = rows is None and gradient.nbytes <= _nbytes(param) and self._room.get(param)
            arena = fits.pop() if fits else self._arena(gradient.nbytes)
            host = arena.tensor(0, gradient.nbytes, gradient.dtype).view(gradient.shape)
            transfer = self._lanes.copy(Lane.OFFLOAD, [(host, gradient)], self._lanes.mark())
            self._gradients.meter.offloaded(transfer, param.name)
            self._leaving.append(transfer)
            parts.append((host, rows))

    def _arena(self, nbytes: int) -> Arena:
        return Arena(nbytes, self._lanes.device, self._gradients.ledger, PURPOSE, computed=True)


def _added_up(parts: list[_Part]) -> list[_Part]:
    """Adds up what several blocks gave a parameter for one micro-batch, in order, as autograd adds up whole gradients.
    Where none is whole, gradients of rows stay one of rows.
    """
    whole = next((one for one, rows in parts if rows is None and one.layout == torch.strided), None)
    if whole is None:
        sparse: list[_Part] = [(one, rows) for one, rows in parts if rows is None]
        of_rows = [(rows, one) for one, rows in parts if rows is not None]
        rows, gradients = sum_of_rows(of_rows) if of_rows else (None, [])
        return [*sparse, (torch.cat(gradients), rows)] if gradients else sparse
    total: torch.Tensor | None = None
    for gradient, rows in parts:
        if total is None:
            total = gradient if rows is None else torch.zeros_like(whole).index_copy_(0, rows, gradient)
        elif rows is not None:
            sums = total.index_select(0, rows).add_(gradient)
            total.add_(0.0).index_copy_(0, rows, sums)  # a zero for each of the other rows turns -0 into +0
        elif total.layout != torch.strided:
            total = gradient.add_(total) if gradient.layout == torch.strided else gradient + total
        else:
            total.add_(gradient)
    return [] if total is None else [(total, None)]


def bytes_apart(uses: Mapping[ManagedParam, int], count: int) -> int:
    """The most bytes of host memory for `count` micro-batches. `uses`: in how many blocks a parameter is used."""
    return count * sum(blocks * whole_pages(_nbytes(param)) for param, blocks in uses.items())


def _is_table(param: ManagedParam) -> bool:
    return block_of(param).row_bytes > 0


def _nbytes(param: ManagedParam) -> int:
    return param.home.numel() * param.dtype.itemsize
