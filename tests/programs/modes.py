"""How is a model offloaded in each mode? Budgets from just enough to plenty, blocks and prefetching at random."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headrace
from headrace.errors import BudgetError
from headrace.weights.model.inventory import take_inventory
from headrace.weights.model.partition import partition
from tests.programs.changes import CHANGES
from tests.programs.faults import FAULTS
from tests.programs.steps import STEPS, plain_train

MODES = ("cpu", "disk", "activations", "overlap", "at home", "emulated")  # at home: without a budget, on the CPU
ACTIONS = STEPS | CHANGES | FAULTS | {"plain_train": (plain_train, 0.0)}
LEAST_HOST_BYTES = 64 * 1024  # staging memory for weights and gradients, whatever the model
# With overlap="backward" nothing may happen to gradients or settings between backward and step().
BESIDE_BACKWARD = ("plain_train", "evaluate", "edit", "swap_average", "copy_model", "save")

Optimizers = Callable[[list[nn.Parameter], random.Random], torch.optim.Optimizer]


@dataclass(frozen=True)
class Mode:
    """What a program of this mode does: the actions it may take, and how models are offloaded and stepped."""

    device: torch.device
    widths: Sequence[int]  # of models
    steady: bool  # whether every step must do the same
    weights: dict[str, float]  # of actions, by name
    offload: Callable[[nn.Module, random.Random], Any]
    ours: Optimizers
    plain: Optimizers


def random_mode(name: str, rng: random.Random, directory: Path) -> Mode:
    """One way to offload, out of those of the mode."""
    device = torch.device("cpu")
    if name == "emulated":
        device = torch.device("emu", torch.accelerator.current_device_index())
    kind = name
    if name == "emulated":
        kind = rng.choice(["cpu", "cpu", "disk", "activations", "overlap"])
    elif name == "at home":
        kind = rng.choice(["cpu", "activations", "overlap"])
    weights = {action: weight for action, (_, weight) in ACTIONS.items()}
    ours = plain = torch_optimizer
    if kind == "overlap":
        overlap = rng.choice(["forward", "forward", "backward"])
        ours, plain = Beside(overlap), reference_optimizer
        if overlap == "backward":
            weights = {action: weight or 5.0 for action, weight in weights.items() if action in BESIDE_BACKWARD}

    alone = kind == "activations" and rng.random() < 0.4

    def offload(model: nn.Module, rng: random.Random) -> Any:
        if alone:
            return headrace.offload_activations(model.to(device), **activation_settings(rng))
        return offload_weights(model, device, kind, rng, directory, at_home=name == "at home")

    widths = (64,) if kind == "disk" else (8, 16, 32, 64)  # disk: more than its staging memory
    return Mode(device, widths, weights["plain_train"] > 0, weights, offload, ours, plain)


# offloading -----------------------------------------------------------------------------------------------------------
def activation_settings(rng: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {"min_bytes": rng.choice([0, 64, 256])}
    if rng.random() < 0.5:
        settings["device_memory"] = rng.choice([0, 1024, 16384])
    elif rng.random() < 0.5:
        settings["all_leave"] = True
    return settings


def offload_weights(
    model: nn.Module, device: torch.device, kind: str, rng: random.Random, directory: Path, *, at_home: bool = False
) -> Any:
    """With the least budget, with all that is needed, or something between; `at_home`: with none."""
    nbytes = sum(p.nbytes for p in model.parameters())
    settings: dict[str, Any] = {
        "blocks": rng.choice(["auto", "auto", nbytes // 8, nbytes // 3]),
        "prefetch": rng.choice(["auto", "auto", 0, 1, 3]),
    }
    share = rng.choice([0.0, 0.0, 0.2, 0.5, 1.0])
    least = least_bytes(model, settings["blocks"], nbytes)
    settings["device_memory"] = int(least + share * max(0, 1.2 * nbytes + 4096 - least))
    if at_home:
        del settings["device_memory"]
    if kind == "activations":
        settings["activations"] = activation_settings(rng)
    if kind != "disk":
        return headrace.offload(model, device=device, **settings)
    host_bytes = LEAST_HOST_BYTES + int(nbytes * rng.choice([0.0, 0.3, 0.6, 1.0]))
    while True:
        try:
            return headrace.offload(model, device=device, disk=directory, host_memory=host_bytes, **settings)
        except BudgetError as error:
            if "host_memory" not in str(error) or host_bytes > 4 * nbytes + 2**20:
                raise
            host_bytes += 16384


def least_bytes(model: nn.Module, blocks: Any, budget_bytes: int) -> int:
    """What stays on the device, and the two largest blocks: one that computes, and one whose weights it borrows.

    Where weights are tied, one that computes takes the block it is tied to along.
    """
    inventory = take_inventory(model)
    parts = partition(model, inventory, blocks, (), budget_bytes)
    sizes = sorted(inventory.nbytes(part.keys) for part in parts.streamed)
    buffers = sum({id(buffer): buffer.nbytes for buffer in model.buffers()}.values())
    at_once = 2 + model.spec.tied_head + model.spec.tied_layers
    return sum(sizes[-at_once:]) + sum(inventory.nbytes(part.keys) for part in parts.resident) + buffers


# optimizers -----------------------------------------------------------------------------------------------------------
def torch_optimizer(parameters: list[nn.Parameter], rng: random.Random) -> torch.optim.Optimizer:
    """One of torch.optim, which computes the same on every device."""
    kind = rng.choice(["SGD", "AdamW", "AdamW", "RMSprop"])
    if kind == "SGD":
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, foreach=False)
    return getattr(torch.optim, kind)(parameters, lr=3e-3, foreach=False)


class HostTwin(torch.optim.Optimizer):
    """A fused optimizer of torch.optim for parameters on any device: it steps on copies in host memory."""

    def __init__(
        self, kind: type[torch.optim.Optimizer], parameters: list[nn.Parameter], settings: dict[str, Any]
    ) -> None:
        super().__init__(parameters, dict(settings))
        self.copies = [nn.Parameter(p.detach().to("cpu", copy=True)) for p in parameters]
        # One for each: fused SGD wants all momenta to begin in the same step.
        self.inner = [kind([own], **settings, fused=True) for own in self.copies]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters: list[Tensor] = self.param_groups[0]["params"]
        for parameter, own, inner in zip(parameters, self.copies, self.inner, strict=True):
            if parameter.grad is None:
                continue
            own.copy_(parameter)
            own.grad = parameter.grad.to("cpu", copy=True)
            inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            inner.step()
            parameter.copy_(own)
        return loss


RULES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"lr": 3e-3, "weight_decay": 0.1}),
    ("Adam", {"lr": 3e-3, "amsgrad": True}),
    ("SGD", {"lr": 0.02, "momentum": 0.9}),
]


def narrowed(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Those that headrace.optim and torch.optim update alike bit for bit."""
    return [p for p in parameters if p.dtype == torch.float32] or [nn.Parameter(torch.zeros(1))]


def reference_optimizer(parameters: list[nn.Parameter], rng: random.Random) -> torch.optim.Optimizer:
    kind, settings = rng.choice(RULES)
    return HostTwin(getattr(torch.optim, kind), narrowed(parameters), settings)


@dataclass(frozen=True)
class Beside:
    """The same as `reference_optimizer`, beside the passes."""

    overlap: str

    def __call__(self, parameters: list[nn.Parameter], rng: random.Random) -> torch.optim.Optimizer:
        kind, settings = rng.choice(RULES)
        return getattr(headrace.optim, kind)(narrowed(parameters), **settings, overlap=self.overlap)
