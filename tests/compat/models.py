"""What do the compatibility tests train? Small models, by the same steps with and without offloading."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Toy(nn.Module):
    """The model of the DiffSynth page, smaller: a residual stack of Linear layers."""

    def __init__(self, width: int = 64, layers: int = 10, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.recompute = recompute

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.layers[index](nn.functional.layer_norm(x, x.shape[-1:]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.layers)):
            step = checkpoint(self.layer, index, x, use_reentrant=False) if self.recompute else self.layer(index, x)
            x = x + step
        return x


@dataclass(frozen=True)
class Trained:
    """What must not depend on offloading. Gradients are those of the last step."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    state: dict[str, torch.Tensor]

    def assert_equal(self, other: "Trained") -> None:
        for loss, other_loss in zip(self.losses, other.losses, strict=True):
            assert torch.equal(loss, other_loss)
        assert self.state.keys() == other.state.keys()
        for name, tensor in self.state.items():
            assert torch.equal(tensor, other.state[name]), name
        for name, gradient in self.gradients.items():
            expected = other.gradients[name]
            assert (gradient is None) == (expected is None), name
            assert gradient is None or torch.equal(gradient, expected), name


def run_steps(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    after_backward: Callable[[], None] = lambda: None,
    *,
    micro_batches: int = 1,
) -> Trained:
    """Steps of AdamW that teach `model` to add one to its input; a step for each `micro_batches` inputs."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = []
    for index, x in enumerate(inputs):
        if index % micro_batches == 0:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x + 1)
        loss.backward()
        after_backward()
        losses.append(loss.detach().cpu())
        if (index + 1) % micro_batches == 0:
            optimizer.step()
    return Trained(
        losses,
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()},
    )
