"""What can be done with a model? Programs of forwards and backwards in every order, drawn at random."""

import contextlib
import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.activations.pieces import WIDTH, Made, Scene, TrapError

__all__ = ["Program", "plainly"]

Around = Callable[[Made], contextlib.AbstractContextManager[Any]]  # what is put around the model


@contextlib.contextmanager
def plainly(_model: Made) -> Iterator[None]:
    """Without offloading."""
    yield


class Program:
    """A model and what is done with it, by the number of the program."""

    def __init__(self, number: int, device: torch.device) -> None:
        rng = random.Random(number)
        self.device = device
        self.scene = Scene()
        self.model = Made(rng, self.scene).to(device)
        self.scene.again = self.model
        self.sizes = [rng.randrange(4, 40) for _ in range(rng.choice([1, 1, 1, 2, 4]))]
        actions = rng.choices(ACTIONS, k=rng.randrange(1, 4))
        # The same ones over and over: recorded, refined, as planned.
        self.actions = [rng.choice(actions) for _ in range(rng.randrange(4, 9))]
        self.seeds = [rng.randrange(2**31) for _ in self.actions]
        self.rng = rng
        self.kept: list[Tensor] = []  # losses for later actions
        self.block: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def run(self, around: Around) -> list[Any]:
        """Does it all; what was noted."""
        with around(self.model) as handle:
            self.block = contextlib.nullcontext if handle is None else handle.forward
            for action, seed in zip(self.actions, self.seeds, strict=True):
                self.rng.seed(seed)
                torch.manual_seed(seed)
                self.scene.losses.clear()
                self.scene.armed = ""
                try:
                    action(self)
                except (TrapError, RuntimeError) as error:
                    self.scene.note(_kind(error))
                for parameter in self.model.parameters():
                    self.scene.note(parameter.grad)
                self._write_weights()
            self.kept.clear()
            self.scene.held.clear()
            self.scene.losses.clear()
            # A backward that raised leaves what it did not do in its thread's queue, until the next one comes there.
            torch.ones(1, device=self.device, requires_grad=True).sum().backward()
            gc.collect()
        return self.scene.notes

    def _write_weights(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.clamp(-1, 1), alpha=0.01)
                    parameter.grad = None

    def x(self) -> Tensor:
        """An input."""
        x = torch.randn(self.rng.choice(self.sizes), WIDTH).to(self.device)
        return x.requires_grad_(self.rng.random() < 0.8)

    def loss(self, x: Tensor | None = None) -> Tensor:
        """Of a forward; noted."""
        output = self.model(self.x() if x is None else x)
        loss = output.square().mean() + sum(self.scene.losses)
        self.scene.losses.clear()
        self.scene.note(loss)
        return loss


def _kind(error: BaseException) -> str:
    text = str(error)
    for known in ("inplace operation", "second time", "different metadata", "not compatible with .grad()"):
        if known in text:
            return known
    return f"{type(error).__name__}: {text[:80]}"


def _in_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


# what is done ---------------------------------------------------------------------------------------------------------
def _step(program: Program) -> None:
    program.loss().backward()


def _several(program: Program) -> None:
    losses = [program.loss() for _ in range(program.rng.randrange(2, 4))]
    program.rng.shuffle(losses)
    while losses:
        losses.pop().backward()


def _sum(program: Program) -> None:
    (program.loss() + program.loss() * 2).backward()


def _again(program: Program) -> None:
    loss = program.loss()
    for _ in range(program.rng.randrange(1, 3)):
        loss.backward(retain_graph=True)
    if program.rng.random() < 0.3:
        program.loss().backward()
    loss.backward()


def _twice_refused(program: Program) -> None:
    loss = program.loss()
    loss.backward()
    loss.backward()


def _double(program: Program) -> None:
    x = program.x().requires_grad_()
    loss = program.loss(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
    if gradient is not None and gradient.requires_grad:
        gradient.square().sum().backward(retain_graph=program.rng.random() < 0.5)
        program.scene.note(gradient)


def _parts(program: Program) -> None:
    x = program.x().requires_grad_()
    output = program.model(x)
    rows = program.rng.randrange(1, len(output) + 1)
    program.scene.note(torch.autograd.grad(output[:rows].sum(), x, retain_graph=True)[0])
    if program.rng.random() < 0.5:
        weights = list(program.model.layers[-1].parameters())
        torch.autograd.grad(output.sum(), weights, retain_graph=True)
    output[rows // 2 :].sin().sum().backward()


def _two_outputs(program: Program) -> None:
    output = program.model(program.x())
    first, second = output.sin().sum(), output[1:].cos().sum()
    if program.rng.random() < 0.5:
        first.backward(retain_graph=True)
    del first, output
    second.backward()


def _dropped(program: Program) -> None:
    loss = program.loss()
    if program.rng.random() < 0.5:
        del loss
    program.loss().backward()


def _keeps(program: Program) -> None:
    program.kept.append(program.loss())


def _uses_kept(program: Program) -> None:
    """The weights were written meanwhile, which autograd refuses, or a part of it was enough."""
    if program.kept:
        program.kept.pop(program.rng.randrange(len(program.kept))).backward()
    else:
        program.loss().backward()


def _evaluates(program: Program) -> None:
    loss = program.loss()
    with torch.no_grad():
        program.loss()
    with torch.inference_mode():
        program.scene.note(program.model(program.x().detach()))
    loss.backward()


def _backward_in_thread(program: Program) -> None:
    loss = program.loss()
    _in_thread(loss.backward)


def _forward_in_thread(program: Program) -> None:
    losses: list[Tensor] = []
    _in_thread(lambda: losses.append(program.loss()))
    loss = program.loss()
    losses[0].backward()
    loss.backward()


def _trapped(program: Program) -> None:
    program.scene.armed = program.rng.choice(["forward", "backward"])
    loss = program.loss()
    retained = program.rng.random() < 0.5
    try:
        loss.backward(retain_graph=retained)
    except TrapError:
        program.scene.note("trapped")
        if program.rng.random() < 0.5:
            gc.collect()
        program.scene.armed = ""
        if retained:
            program.model.zero_grad()
            loss.backward()
        elif program.rng.random() < 0.5:
            del loss


def _whole_block(program: Program) -> None:
    with program.block():
        loss = program.loss() * program.loss().tanh()
        (loss.exp() * loss).backward()
        second = program.loss().sin()
    second.backward()


def _checkpointed(program: Program) -> None:
    x = program.x().requires_grad_()
    output = checkpoint(program.model, x, use_reentrant=program.rng.random() < 0.5)
    output.square().mean().backward()  # type: ignore[union-attr]
    program.scene.note(x.grad)


def _looked_at(program: Program) -> None:
    loss = program.loss()
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [each for each, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                if isinstance(value, Tensor):
                    program.scene.note(value)
    loss.backward()


def _under_users_hooks(program: Program) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
        loss = program.loss()
    loss.backward()


def _in_a_hook(program: Program) -> None:
    """Forwards and backwards of the model within a backward: GradCache."""
    inputs = [program.x() for _ in range(2)]
    loss = program.loss()
    final = loss.detach().requires_grad_()

    def hook(gradient: Tensor) -> None:
        program.scene.hooks += 1
        try:
            with torch.enable_grad():
                for x in inputs:
                    (program.loss(x) * gradient).backward()
        finally:
            program.scene.hooks -= 1

    final.register_hook(hook)
    if program.rng.random() < 0.5:
        (final * loss).backward()  # the hook runs in the midst of the backward of a forward
    else:
        final.square().backward()


ACTIONS: list[Callable[[Program], None]] = [
    *(_step, _step, _step, _several, _several, _sum, _again, _twice_refused, _double, _parts, _two_outputs, _dropped),
    *(_keeps, _uses_kept, _evaluates, _backward_in_thread, _forward_in_thread, _trapped, _trapped, _whole_block),
    *(_checkpointed, _looked_at, _under_users_hooks, _in_a_hook),
]
