"""What happens in one optimizer step? Forward and backward of each micro-batch, clipping, update."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from millrace.train.chat import IGNORED
from millrace.train.config import TrainConfig
from millrace.train.data import Batch
from millrace.train.optimizer import Optimizers
from millrace.train.schedule import make_schedule


def learned_tokens(batch: Batch) -> int:
    """How many tokens of a micro-batch are predicted: those with a label, but for the first of each sequence."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


class Run:
    """A causal language model, its optimizer and schedule, and the order in which they are used.

    This is the loop as any user of PyTorch writes it: it trains an offloaded model and knows nothing of offloading.
    """

    plain = False

    def __init__(self, model: nn.Module, config: TrainConfig, device: torch.device, *, steps: int) -> None:
        self.model = model
        self._device = device
        self.optimizers = Optimizers(model, config, plain=self.plain)
        self._schedules = [make_schedule(optimizer, config, steps=steps) for optimizer in self.optimizers.all]

    def step(self, batches: Sequence[Batch]) -> float:
        """One update from micro-batches; the mean loss of all tokens that are learned."""
        counts = [learned_tokens(batch) for batch in batches]
        losses = [
            self._backward(batch, share=count / sum(counts)) for batch, count in zip(batches, counts, strict=True)
        ]
        self._collect_gradients()
        self.optimizers.step()
        for schedule in self._schedules:
            schedule.step()
        self.optimizers.zero_grad()
        self.publish_weights()
        return float(torch.stack(losses).sum())

    def loss(self, batch: Batch) -> torch.Tensor:
        """The mean loss of a micro-batch."""
        on_device = {name: tensor.to(self._device) for name, tensor in batch.items()}
        loss: torch.Tensor = self.model(**on_device, use_cache=False).loss
        return loss

    def state_dict(self) -> dict[str, Any]:
        """All but the model and its optimizers."""
        return {"schedules": [schedule.state_dict() for schedule in self._schedules]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The model and its optimizers are loaded already."""
        for schedule, own in zip(self._schedules, state["schedules"], strict=True):
            schedule.load_state_dict(own)
        self.publish_weights()

    def _backward(self, batch: Batch, *, share: float) -> torch.Tensor:
        loss = self.loss(batch) * share
        loss.backward()
        return loss.detach().float()

    def _collect_gradients(self) -> None:
        """Called between backward and the update."""

    def publish_weights(self) -> None:
        """Called after the update, and when weights were loaded."""


class PlainRun(Run):
    """The same loop over a model that is on the device as a whole, without millrace.

    The update runs on host copies of the weights, with the same kernels as for an offloaded model: an accelerator's
    own AdamW rounds differently, and then the two could not be compared bit for bit.
    """

    plain = True

    def __init__(self, model: nn.Module, config: TrainConfig, device: torch.device, *, steps: int) -> None:
        super().__init__(model, config, device, steps=steps)
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []  # host, device
        if device.type != "cpu":
            on_device = copy.deepcopy(model).to(device)
            self._copies = list(zip(model.parameters(), on_device.parameters(), strict=True))
            self.model = on_device

    def _collect_gradients(self) -> None:
        for host, device in self._copies:
            host.grad = None if device.grad is None else device.grad.cpu()
            device.grad = None

    @torch.no_grad()
    def publish_weights(self) -> None:
        for host, device in self._copies:
            if host.requires_grad:
                device.copy_(host)
