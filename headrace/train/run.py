"""What happens in one optimizer step? Forward and backward of each micro-batch, clipping, update."""

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace.optim.optimizer import HostOptimizer
from headrace.train.chat import IGNORED
from headrace.train.config import TrainConfig
from headrace.train.data import Batch
from headrace.train.optimizer import make_optimizer, make_schedule
from headrace.train.ranks import World

Together = Callable[[Iterable[int], Callable[[int], torch.Tensor]], list[torch.Tensor]]


def learned_tokens(batch: Batch) -> int:
    """The number of tokens that a micro-batch predicts: those with a label, except the first of each sequence."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def set_seed(seed: int) -> None:
    """Seeds all random numbers that a step may draw, on every device."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Run:
    """A causal language model, its optimizer and schedule, and the order in which they are used.

    This is the loop as any user of PyTorch writes it. It trains an offloaded model and knows nothing of offloading,
    unless `together` is given, which is a handle's `forward_backward`.
    """

    plain = False

    def __init__(
        self, model: nn.Module, config: TrainConfig, world: World, *, steps: int, together: Together | None = None
    ) -> None:
        self.model = model
        self._together = together
        self._world = world
        self._seed = config.seed
        self.optimizer = make_optimizer(model, config, plain=self.plain)
        self._max_grad_norm = config.max_grad_norm
        # Muon sums up norms in its own order. Its gradients are clipped here, for the same bits as in PyTorch's loop.
        clips = isinstance(self.optimizer, HostOptimizer) and config.optimizer != "muon"
        self._clipped = [] if clips else [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._schedule = make_schedule(self.optimizer, config, steps=steps)

    def step(self, batches: Sequence[Batch]) -> float:
        """Updates once from these micro-batches; returns the mean loss of all tokens that are learned."""
        counts = [learned_tokens(batch) for batch in batches]
        shares = [count / sum(counts) for count in counts]
        if self._together is None:
            losses = self._in_turn(batches, shares)
        else:
            losses = self._together(range(len(batches)), lambda n: self._share_of_loss(batches[n], n, shares[n]))
        self._update()
        return float(torch.tensor(self._world.in_turn([float(loss) for loss in losses])).sum())

    def loss(self, batch: Batch) -> torch.Tensor:
        """The mean loss of a micro-batch."""
        on_device = {name: tensor.to(self._world.device) for name, tensor in batch.items()}
        loss: torch.Tensor = self.model(**on_device, use_cache=False).loss
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of the run, without the model and its optimizer."""
        return {"schedules": [self._schedule.state_dict()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` returned. The model and its optimizer must be loaded before."""
        self._schedule.load_state_dict(*state["schedules"])

    def _in_turn(self, batches: Sequence[Batch], shares: Sequence[float]) -> list[torch.Tensor]:
        """Runs forward and backward of this rank's micro-batches; returns their losses.

        Each rank takes one of as many micro-batches as there are ranks. If fewer are left, the other ranks compute the
        last one, too, with no weight in the gradients.
        """
        losses = []
        for first in range(0, len(batches), self._world.count):
            number = first + self._world.own
            if number < len(batches):
                losses.append(self._backward(batches[number], number, shares[number]))
            else:
                self._backward(batches[-1], number, share=0.0)
        return losses

    def _backward(self, batch: Batch, number: int, share: float) -> torch.Tensor:
        loss = self._share_of_loss(batch, number, share)
        (loss * self._world.count).backward()  # because gradients are averaged over the ranks
        return loss.detach()

    def _share_of_loss(self, batch: Batch, number: int, share: float) -> torch.Tensor:
        """The loss of micro-batch `number`, times `share`. Its random numbers are the same on whatever rank it runs."""
        steps = self._schedule.last_epoch
        set_seed(int(np.random.SeedSequence([self._seed, steps, number]).generate_state(1)[0]))
        return self.loss(batch) * share

    def _update(self) -> None:
        if self._max_grad_norm and self._clipped:
            nn.utils.clip_grad_norm_(self._clipped, self._max_grad_norm)
        self.optimizer.step()
        self._schedule.step()
        self.optimizer.zero_grad()


class PlainRun(Run):
    """The same loop over a model that is on the device as a whole, without headrace.

    The update runs on host copies of the weights, with the same kernels as for an offloaded model: an accelerator's
    own AdamW rounds differently, and then the two could not be compared bit for bit.
    """

    plain = True

    def __init__(self, model: nn.Module, config: TrainConfig, world: World, *, steps: int) -> None:
        super().__init__(model, config, world, steps=steps)
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []  # host, device
        if world.device.type != "cpu":
            on_device = copy.deepcopy(model).to(world.device)
            self._copies = list(zip(model.parameters(), on_device.parameters(), strict=True))
            self.model = on_device

    @torch.no_grad()
    def _update(self) -> None:
        for host, device in self._copies:
            host.grad = None if device.grad is None else device.grad.cpu()
            device.grad = None
        super()._update()
        for host, device in self._copies:
            if host.requires_grad:
                device.copy_(host)
