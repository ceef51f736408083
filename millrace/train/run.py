"""What happens in one optimizer step? Forward and backward of each micro-batch, clipping, update."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import millrace.optim
from millrace.train.config import TrainConfig


class Run:
    """A causal language model whose parameters are host tensors, its optimizer, and the step counter.

    This is the loop as any user of PyTorch writes it: it trains an offloaded model and knows nothing of offloading.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._parameters = list(model.parameters())
        self._optimizer = self._make_optimizer(config)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / (config.warmup_steps + 1))
        )
        self._max_grad_norm = config.max_grad_norm

    def _make_optimizer(self, config: TrainConfig) -> torch.optim.Optimizer:
        """AdamW; its state rests on disk where the model does."""
        settings: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        if config.disk is None:
            return torch.optim.AdamW(self._parameters, **settings, fused=True)
        return millrace.optim.AdamW(self._parameters, **settings, tier="disk", disk=config.disk / "optimizer")

    def step(self, batches: Sequence[torch.Tensor]) -> float:
        """One update from micro-batches of token ids (batch, length) int64; the mean of their losses."""
        losses = [self._backward(batch.to(self._device), share=1 / len(batches)) for batch in batches]
        self._collect_gradients()
        nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        self._publish_weights()
        return float(torch.stack(losses).mean())

    def _backward(self, tokens: torch.Tensor, *, share: float) -> torch.Tensor:
        loss: torch.Tensor = self._model(input_ids=tokens, labels=tokens, use_cache=False).loss
        (loss * share).backward()
        return loss.detach().float()

    def _collect_gradients(self) -> None:
        """Called between backward and the update."""

    def _publish_weights(self) -> None:
        """Called after the update."""


class PlainRun(Run):
    """The same loop over a model that is on the device as a whole, without millrace.

    The update runs on host copies of the weights, with the same kernels as for an offloaded model: an accelerator's
    own AdamW rounds differently, and then the two could not be compared bit for bit.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, device: torch.device) -> None:
        super().__init__(model, config, device)
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []  # host, device
        if device.type != "cpu":
            on_device = copy.deepcopy(model).to(device)
            self._copies = list(zip(self._parameters, on_device.parameters(), strict=True))
            self._model = on_device

    def _make_optimizer(self, config: TrainConfig) -> torch.optim.Optimizer:
        return super()._make_optimizer(dataclasses.replace(config, disk=None))

    def _collect_gradients(self) -> None:
        for host, device in self._copies:
            host.grad = None if device.grad is None else device.grad.cpu()
            device.grad = None

    @torch.no_grad()
    def _publish_weights(self) -> None:
        for host, device in self._copies:
            device.copy_(host)
