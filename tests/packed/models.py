"""Of which models are weights packed in these tests? Stacks of layers."""

import torch
from torch import nn

from tests.support.models import Adapted, linears


def adapted_layer(width: int) -> Adapted:
    """A frozen layer, and what is trained beside it."""
    base = nn.Linear(width, width, dtype=torch.bfloat16)
    return Adapted(base, width, rank=2, activation=torch.tanh, dtype=torch.bfloat16)


def frozen(width: int, layers: int, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """With unusual values in each layer, and in one column of all outputs."""
    torch.manual_seed(0)
    model = linears(layers, width, dtype=dtype)
    with torch.no_grad():
        for layer in model:
            layer.weight.normal_(0, 0.03)
            layer.weight[3, :4] = torch.tensor([-0.0, 1e-40, 1e-30, 0.0])
        model[-1].weight[3, :4] = torch.tensor([float("inf"), float("-inf"), 3e38, float("nan")])
    return model.requires_grad_(False)


def inputs(width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(1)).to(dtype)
