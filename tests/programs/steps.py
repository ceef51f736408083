"""What may a program do with passes? Training of many kinds, evaluation, and uses of autograd."""

import random
from typing import Any

import torch
from torch import nn

from tests.programs.layers import hidden_of
from tests.programs.world import World


def train(world: World, rng: random.Random) -> None:
    """Steps, with accumulation, clipping, other rates, or a closure."""
    if world.optimizer is None or rng.random() < 0.1:
        world.new_optimizer(rng)
    micro_batches, clip, closes = (
        rng.choice([1, 1, 2, 3]),
        rng.choice([None, None, "norm", "value"]),
        rng.random() < 0.1,
    )
    for _ in range(rng.choice([1, 1, 2, 3])):
        batches = [world.batch(rng) for _ in range(micro_batches)]

        def accumulate(batches: list[Any] = batches) -> Any:
            losses = [world.forward(batch) for batch in batches[:1]]
            losses[0].backward()
            for batch in batches[1:]:
                losses.append(world.forward(batch))
                losses[-1].backward()
            return sum(loss.item() for loss in losses)

        if closes:
            world.optimizer.step(accumulate)
        else:
            accumulate()
            # PyTorch adds up the norms of several dtypes in an order that differs between devices.
            if clip == "norm" and len({parameter.dtype for parameter in world.trained()}) == 1:
                world.see("norm", nn.utils.clip_grad_norm_(world.trained(), 0.5, foreach=False))
            elif clip == "value":
                nn.utils.clip_grad_value_(world.trained(), 0.01, foreach=False)
            world.optimizer.step()
        if rng.random() < 0.2:
            world.look()
        if rng.random() < 0.8:
            (world.optimizer if rng.random() < 0.5 else world.model).zero_grad(set_to_none=rng.random() < 0.8)
        if rng.random() < 0.2:
            for group in world.optimizer.param_groups:
                group["lr"] *= 0.5


def plain_train(world: World, rng: random.Random) -> None:
    """Steps with nothing between backward and the optimizer."""
    if world.optimizer is None:
        world.new_optimizer(rng)
    for _ in range(rng.choice([1, 2, 3, 4])):
        world.forward(world.batch(rng)).backward()
        world.optimizer.step()
        world.optimizer.zero_grad()
        if rng.random() < 0.2:
            for group in world.optimizer.param_groups:
                group["lr"] *= 0.5


def evaluate(world: World, rng: random.Random) -> None:
    trains, mode = rng.random() < 0.5, rng.choice([torch.no_grad, torch.inference_mode])
    if trains and any(layer.kind == "scaled" for layer in world.model.spec.layers):
        mode = torch.no_grad  # else buffers would be tensors of inference mode plain, which nothing can be loaded into
    world.model.train(trains)
    with mode():
        for _ in range(rng.randrange(1, 4)):
            world.forward(world.batch(rng))
    world.model.train()


def forward_only(world: World, rng: random.Random) -> None:
    """Losses that nobody needs."""
    for _ in range(rng.randrange(1, 3)):
        world.forward(world.batch(rng))


def several_forwards(world: World, rng: random.Random) -> None:
    """Forwards first; then their backwards, one by one in some order, or together."""
    losses = [world.forward(world.batch(rng)) for _ in range(rng.randrange(2, 4))]
    rng.shuffle(losses)
    if rng.random() < 0.5:
        sum(losses).backward()
    else:
        for loss in losses:
            loss.backward()


def backward_twice(world: World, rng: random.Random) -> None:
    loss = world.forward(world.batch(rng))
    loss.backward(retain_graph=True)
    if rng.random() < 0.3:
        world.look()
    if rng.random() < 0.3:
        with torch.no_grad():
            world.forward(world.batch(rng))
    loss.backward()


def gradients_of_inputs(world: World, rng: random.Random) -> None:
    """With respect to inputs alone, and perhaps a backward after it."""
    batch = world.batch(rng)
    batch["x"].requires_grad_()
    loss = world.forward(batch)
    way = rng.choice(["alone", "before backward", "backward(inputs)"])
    if way == "backward(inputs)":
        loss.backward(inputs=[batch["x"]])
        world.see("gradient of the input", batch["x"].grad)
        return
    (gradient,) = torch.autograd.grad(loss, batch["x"], retain_graph=way != "alone")
    world.see("gradient of the input", gradient)
    if way == "before backward":
        loss.backward()


def penalty(world: World, rng: random.Random) -> None:
    """On the gradient of the input. The weights that it needs again stay on the device, outside of the budget."""
    world.keeps_budget = False
    batch = world.batch(rng)
    batch["x"].requires_grad_()
    loss = world.forward(batch)
    (gradient,) = torch.autograd.grad(loss, batch["x"], create_graph=True)
    (loss + gradient.square().sum().to(loss.device)).backward()


def of_parts(world: World, rng: random.Random) -> None:
    """A layer is called alone, or its output used beside the model's."""
    batch = world.batch(rng)
    layer = world.model.layer(rng.choice(world.model.uses))
    x = batch["x"].to(world.device)
    hidden = hidden_of(layer(x))
    world.see("output of a layer", hidden)
    loss = hidden.square().mean()
    if rng.random() < 0.5:
        loss = loss + world.forward(batch)
    if loss.requires_grad:
        loss.backward()


STEPS = {
    "train": (train, 5.0),
    "evaluate": (evaluate, 1.5),
    "forward_only": (forward_only, 0.4),
    "several_forwards": (several_forwards, 0.6),
    "backward_twice": (backward_twice, 0.5),
    "gradients_of_inputs": (gradients_of_inputs, 0.7),
    "penalty": (penalty, 0.3),
    "of_parts": (of_parts, 0.4),
}
