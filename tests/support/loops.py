"""How is a model trained and run? Step by step over given batches, with given losses and optimizers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.compare import Outcome, on_cpu

Loss = Callable[[nn.Module, Any], Tensor]  # of a model and a batch
Forward = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]  # of a model and a batch: output and loss


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """How well a Decoder repeats the tokens, wherever they are."""
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.to(logits.device).flatten())


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    """The plainest loss of any output."""
    return squares(model, batch)[1]


def causal_loss(model: Any, ids: Tensor) -> Tensor:
    """Of a model of transformers, which computes it by itself."""
    return model(ids, labels=ids).loss  # type: ignore[no-any-return]


def squares(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the plainest loss of it."""
    output = model(batch)
    return output, output.float().square().mean()


def adamw(parameters: Any, lr: float = 1e-2) -> torch.optim.Optimizer:
    """One implementation on every device: the plain loop over parameters."""
    return torch.optim.AdamW(parameters, lr=lr, foreach=False)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def to_device(value: Any, device: torch.device) -> Any:
    """A batch on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(to_device(item, device) for item in value)
    return value


def random_batches(count: int, *shape: int, seed: int = 1, device: torch.device | str = "cpu") -> list[Tensor]:
    """The same numbers every time."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for _ in range(count)]


def steps(
    model: nn.Module,
    optimizer: Any,
    batches: Sequence[Any],
    loss: Loss = mean_square,
    *,
    micro_batches: int = 1,
    clip: float | None = None,
    after_backward: Callable[[], object] = lambda: None,
    around_step: Callable[[], AbstractContextManager[Any]] = nullcontext,
    after_step: Callable[[int], object] = lambda step: None,
    keep_gradients: bool = False,
) -> list[Tensor]:
    """One optimizer step for every `micro_batches` batches: all losses and the norms before clipping, on the CPU.

    `after_step` is called with the number of each step, from 0, once its gradients are gone. The gradients of the last
    step are kept where that is asked for.
    """
    found = []
    for number, batch in enumerate(batches, 1):
        one = loss(model, batch)
        one.backward()
        after_backward()
        found.append(one.detach())
        del one
        if number % micro_batches:
            continue
        if clip is not None:
            found.append(nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=False))
        with around_step():
            optimizer.step()
        if number < len(batches) or not keep_gradients:
            optimizer.zero_grad()
        after_step(number // micro_batches - 1)
    return on_cpu(found)  # type: ignore[no-any-return]  # none is waited for before


def fine_tune(model: nn.Module, batches: Sequence[Any], loss: Loss = mean_square, *, lr: float = 1e-2) -> list[Tensor]:
    """Steps of AdamW with what is not frozen: losses, and what has been trained."""
    trained = trained_parameters(model)
    return [*steps(model, adamw(trained, lr), batches, loss), *on_cpu(trained)]


def train(
    model: nn.Module,
    batches: Sequence[Any],
    forward: Forward = squares,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    after_forward: Callable[[int], None] = lambda step: None,
) -> Outcome:
    """A step for each batch: outputs, the gradients of each step, and what the model is in the end."""
    outcome = Outcome()
    optimizer = make_optimizer(trained_parameters(model))
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        optimizer.zero_grad()
        output, loss = forward(model, batch)
        after_forward(step)
        outcome.outputs += [on_cpu(output), on_cpu(loss)]
        del output
        loss.backward()
        del loss
        outcome.read_gradients(model)
        optimizer.step()
    optimizer.zero_grad()
    return outcome.read(model)


def infer(
    model: nn.Module, batches: Sequence[Any], forward: Forward, after_forward: Callable[[int], None] = lambda step: None
) -> Outcome:
    """A pass without gradients for each batch, the last one in inference mode."""
    outcome = Outcome()
    for step, batch in enumerate(batches):
        with torch.inference_mode() if step == len(batches) - 1 else torch.no_grad():
            output, loss = forward(model, batch)
            after_forward(step)
            outcome.outputs += [on_cpu(output), on_cpu(loss)]
            del output, loss
    return outcome.read(model)
