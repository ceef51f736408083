"""Do the examples of the documents run, with their import changed? Of Megatron-Bridge's page, and of MindIE-SD's."""

from typing import Any

import pytest
import torch
from torch import nn

from headrace.compat.megatron import ConfigContainer, CPUOffloadConfig, apply, override
from tests.activations.models import Stack, results, rows, step
from tests.support.compare import assert_same

pytestmark = pytest.mark.core(device="emu")

LAYERS = 24  # more than the 16 that the document offloads
LINES = {
    "optimizer, half": "optimizer.optimizer_cpu_offload = True; optimizer.optimizer_offload_fraction = 0.5",
    "optimizer, all": "optimizer.optimizer_cpu_offload = True; optimizer.optimizer_offload_fraction = 1.0;"
    "optimizer.overlap_cpu_optimizer_d2h_h2d = True",
    "activations": "model.cpu_offloading = True; model.cpu_offloading_num_layers = 16;"
    "model.cpu_offloading_activations = True; model.cpu_offloading_weights = False;"
    "model.pipeline_model_parallel_size = 1; model.recompute_granularity = None; model.cuda_graph_impl = 'none'",
    "weights": "model.cpu_offloading = True; model.cpu_offloading_num_layers = 8;"
    "model.cpu_offloading_activations = False; model.cpu_offloading_weights = True;"
    "model.pipeline_model_parallel_size = 1; model.recompute_granularity = None",
    "both": "model.cpu_offloading = True; model.cpu_offloading_num_layers = 8;"
    "model.cpu_offloading_activations = True; model.cpu_offloading_weights = True;"
    "model.pipeline_model_parallel_size = 1; model.recompute_granularity = None",
}


def trained(cfg: ConfigContainer, device: torch.device) -> list[Any]:
    model = Stack(LAYERS)
    if not cfg.model.cpu_offloading_weights:
        model.to(device)
    handle = apply(cfg.model, model, min_bytes=0)
    optimizer = cfg.optimizer.optimizer_for(model)
    for seed in range(2):
        model(rows(device, seed)).square().mean().backward()
        optimizer.step()
    found = [each.detach().cpu().clone() for each in model.parameters()]
    if handle is not None:
        handle.remove()
    return found


@pytest.mark.parametrize("as_overrides", [False, True])
@pytest.mark.parametrize("name", list(LINES))
def test_configs_of_megatron_bridges_page(device: torch.device, name: str, as_overrides: bool) -> None:
    cfg, plain = (ConfigContainer(model=CPUOffloadConfig(num_layers=LAYERS)) for _ in range(2))
    lines = [line.strip() for line in LINES[name].split(";")]
    if as_overrides:
        override(cfg, [line.replace(" ", "") for line in lines])
    else:
        for line in lines:
            exec(f"cfg.{line}", {"cfg": cfg})
    assert cfg != plain
    for one, other in zip(trained(cfg, device), trained(plain, device), strict=True):
        assert torch.equal(one, other)


def test_marks_of_adapters_do_no_harm(device: torch.device) -> None:
    """As Bridge's PEFT has them before an adapter's two projections."""

    class Adapted(Stack):
        def __init__(self) -> None:
            super().__init__(6)
            width = rows(torch.device("cpu")).shape[-1]
            self.linear_in, self.linear_out = nn.Linear(width, 4), nn.Linear(4, width)
            self.config = CPUOffloadConfig(num_layers=6, cpu_offloading=True, cpu_offloading_num_layers=3)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                if self.config.cpu_offloading and self.config.cpu_offloading_activations:
                    x.activation_offloading = True
                low = self.linear_in(x)
                low.activation_offloading = True
                x = layer(x) + self.linear_out(low)
            return x

    torch.manual_seed(0)
    plain = Adapted()
    torch.manual_seed(0)
    model = Adapted()
    expected = step(plain.to(device), rows(device))
    handle = apply(model.config, model.to(device), min_bytes=0)
    for _ in range(3):
        assert_same(step(model, rows(device)), expected)
    assert results(model)
    assert handle is not None
    assert handle.stats().offload_bytes > 0
    handle.remove()


def test_the_example_of_mindie_sds_page(device: torch.device) -> None:
    class DiTModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

    x = torch.randn(3, 16).to(device)
    expected = DiTModel().to(device)(x)
    from headrace.compat.mindie_sd import enable_offload

    model = DiTModel()
    enable_offload(model, model.blocks, min_reserved_blocks_count=2)
    model.to(device)
    with torch.no_grad():
        output = model(x)
    assert torch.equal(output, expected)
