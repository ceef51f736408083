"""Are the architectures of diffusers exact: a UNet with cross attention, and a transformer with two lists of blocks?"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from torch import Tensor

from tests.support.loops import adamw, to_device, train
from tests.support.offloaded import assert_exact, assert_moves_as_planned


def unet() -> Any:
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def flux() -> Any:
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=3,
        num_single_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4),
    )


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unet_inputs(seed: int) -> dict[str, Any]:
    return {"sample": noise(seed, 2, 4, 8, 8), "timestep": 10, "encoder_hidden_states": noise(seed + 9, 2, 5, 16)}


def flux_inputs(seed: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(seed, 2, 16, 4),
        "encoder_hidden_states": noise(seed + 9, 2, 5, 16),
        "pooled_projections": noise(seed + 8, 2, 16),
        "timestep": torch.tensor([0.5, 0.1]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }


def forward(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    sample = model(**batch).sample
    return sample, sample.square().mean()


@pytest.mark.extended
@pytest.mark.parametrize(("make", "inputs"), [(unet, unet_inputs), (flux, flux_inputs)], ids=["unet", "flux"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["none", "own"])
def test_training(
    make: Callable[[], Any], inputs: Callable[[int], dict[str, Any]], checkpointing: bool, compute_device: torch.device
) -> None:
    batches = to_device([inputs(seed) for seed in range(3)], compute_device)

    def make_model() -> Any:
        torch.manual_seed(0)
        model = make().train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        return model

    handle, model = assert_exact(make_model, lambda model: train(model, batches, forward), compute_device, 0.5)
    assert model.device == compute_device
    optimizer = adamw(model.parameters())

    def cycle() -> None:
        optimizer.zero_grad()
        forward(model, batches[0])[1].backward()
        optimizer.step()

    assert_moves_as_planned(handle, model, cycle)
