"""Of which models are weights packed in these tests, and how are results compared? Stacks of layers, bit for bit."""

import torch
from torch import nn


class Adapted(nn.Module):
    """A frozen layer, and what is trained beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(2, width, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def frozen(width: int, layers: int, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """With unusual values in each layer, and in one column of all outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(layers)))
    with torch.no_grad():
        for layer in model:
            layer.weight.normal_(0, 0.03)
            layer.weight[3, :4] = torch.tensor([-0.0, 1e-40, 1e-30, 0.0])
        model[-1].weight[3, :4] = torch.tensor([float("inf"), float("-inf"), 3e38, float("nan")])
    return model.requires_grad_(False)


def inputs(width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)
