"""How may a program go wrong, and hook into itself? Hooks of every kind, errors in passes, Ctrl-C anywhere."""

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.programs.layers import WRITERS, hidden_of
from tests.programs.world import StopError, World
from tests.support.interrupts import Strike

# hooks ----------------------------------------------------------------------------------------------------------------
OF_MODULES = ("pre", "post", "backward", "backward_pre", "output")
OF_PARAMETERS = ("parameter", "accumulated")


def attach(
    world: World, rng: random.Random, kinds: Sequence[str], act: Callable[[str], None], *, changes: bool = False
) -> Any:
    """A hook of one of these kinds at some place, which calls `act` when it fires."""
    kind = rng.choice(kinds)
    module = world.module(rng)
    parameter = rng.choice(list(world.model.parameters()))

    def fires(*arguments: Any) -> Any:
        act(kind)
        if not changes:
            return None
        if kind == "parameter" and isinstance(arguments[0], Tensor):  # not a module: see below
            return arguments[0] * 0.5
        if kind == "post" and isinstance(arguments[2], Tensor):
            return arguments[2] * 1.5
        return None

    def hooks_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if not isinstance(output, Tensor | tuple | list | dict):
            return
        hidden = hidden_of(output)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: fires(gradient))
            world.has_hooked_parameter |= hidden.is_leaf  # which the module returned as it is; the hook stays

    if kind == "pre":
        return module.register_forward_pre_hook(fires)
    if kind == "post":
        return module.register_forward_hook(fires)
    if kind == "backward":
        return module.register_full_backward_hook(fires)
    if kind == "backward_pre":
        return module.register_full_backward_pre_hook(fires)
    if kind == "output":
        return module.register_forward_hook(hooks_output)
    if not parameter.requires_grad:
        return module.register_forward_hook(fires)
    if kind == "parameter":
        return parameter.register_hook(fires)
    return parameter.register_post_accumulate_grad_hook(fires)


def hooked(world: World, rng: random.Random) -> None:
    """Passes under hooks that look at weights, and may change outputs and gradients; some hooks stay."""
    looked_at = rng.choice(list(world.model.modules()))

    # Those of parameters fire when gradients are home, once: plain once for each reentrant checkpoint, and before later
    # layers are computed again, which may write to weights.
    kinds = OF_MODULES
    layers = world.model.spec.layers
    writes = any(layer.kind in WRITERS for layer in layers)
    if all(layer.checkpointing == "none" or (layer.checkpointing != "reentrant" and not writes) for layer in layers):
        kinds += OF_PARAMETERS

    seen: list[list[Any]] = []  # by each hook: gradients are home later than plain, so hooks take turns otherwise

    def look(own: list[Any], kind: str) -> None:
        own.append((kind, [p.detach().sum().item() for p in looked_at.parameters(recurse=False)]))

    hooks = []
    for _ in range(rng.randrange(1, 4)):
        seen.append([])
        act = functools.partial(look, seen[-1])
        hooks.append(attach(world, rng, kinds, act, changes=rng.random() < 0.5))
    stays = rng.random() < 0.2
    try:
        for _ in range(rng.randrange(1, 3)):
            world.forward(world.batch(rng)).backward()
    finally:
        if stays:
            world.kept_hooks += hooks
        else:
            for hook in hooks:
                hook.remove()
    for index, own in enumerate(seen):
        world.see(f"hook {index}", list(own))


def _is_hooked(parameter: Any) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def nested_backward(world: World, rng: random.Random) -> None:
    """A hook in backward runs a backward of its own, of something else or of the model."""
    way = rng.choice(["else", "earlier loss", "model"])
    if world.has_hooked_parameter or any(_is_hooked(parameter) for parameter in world.model.parameters()):
        way = "else"  # a hook that stayed fires once for both backwards, and plain once for each
    inner, inner_batch = world.batch(rng), world.batch(rng)
    earlier = world.forward(inner) if way == "earlier loss" else None
    fired = []

    def fires(gradient: Tensor) -> None:
        if fired:
            return
        fired.append(True)
        if way == "else":
            x = torch.ones(2, requires_grad=True)
            x.exp().sum().backward()
        elif earlier is not None:
            earlier.backward()
        else:
            with torch.enable_grad():
                world.forward(inner_batch).backward()

    def hooks_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if hidden_of(output).requires_grad and not fired:
            hidden_of(output).register_hook(fires)

    hook = world.model.layer(rng.choice(world.model.uses)).register_forward_hook(hooks_output)
    try:
        loss = world.forward(world.batch(rng))
        hook.remove()
        loss.backward()
    finally:
        hook.remove()


# errors ---------------------------------------------------------------------------------------------------------------
def fail(world: World, rng: random.Random) -> None:
    """An error or Ctrl-C from a hook in forward or backward; then the program goes on without these gradients."""
    error = rng.choice([StopError, KeyboardInterrupt])
    calls = rng.randrange(1, 4)
    count = 0

    def act(kind: str) -> None:
        nonlocal count
        count += 1
        if count == calls:
            raise error(kind)

    # Those of parameters fire when gradients are home, later than plain: by then more was recomputed, as buffers show.
    recomputes = any(layer.checkpointing != "none" for layer in world.model.spec.layers)
    hook = attach(world, rng, OF_MODULES if recomputes else OF_MODULES + OF_PARAMETERS, act)
    batches = [world.batch(rng) for _ in range(3)]
    try:
        for batch in batches:
            world.forward(batch).backward()
        world.see("error", None)
    except (StopError, KeyboardInterrupt) as raised:
        world.see("error", str(raised))
    finally:
        hook.remove()
    world.model.zero_grad()


def strike(world: World, rng: random.Random) -> None:
    """Ctrl-C as some function of headrace is entered, which happens to the offloaded model alone; all is put back."""
    batch, number = world.batch(rng), int(10 ** rng.uniform(0, 3))
    if world.handle is None:
        return
    tensors = [*world.model.parameters(), *world.model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    gradients = [None if p.grad is None else p.grad.clone() for p in world.model.parameters()]
    with contextlib.suppress(KeyboardInterrupt):
        Strike(number).during(lambda: world.model(**batch).sum().backward())
    after = [*world.model.parameters(), *world.model.buffers()]
    for tensor, value in zip(after, before, strict=True):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():  # a buffer of an evaluation may be such
            tensor.copy_(value)
    for parameter, gradient in zip(world.model.parameters(), gradients, strict=True):
        parameter.grad = gradient


FAULTS = {
    "hooked": (hooked, 1.0),
    "nested_backward": (nested_backward, 0.4),
    "fail": (fail, 0.8),
    "strike": (strike, 0.3),
}
