"""Is a diffusion transformer with GGUF weights exact, alone and with a LoRA adapter on it?"""

from typing import Any

import gguf
import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from torch import Tensor, nn

import headrace
from tests.support.compare import assert_same
from tests.support.loops import fine_tune

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")]

Q8 = gguf.GGMLQuantizationType.Q8_0


def transformer(*, adapter: bool) -> Any:
    """Four blocks of either kind, their linear layers as diffusers' loader makes them of a GGUF file."""
    torch.manual_seed(0)
    model: Any = FluxTransformer2DModel(
        in_channels=32,
        num_layers=4,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and layer.in_features % 32 == 0:
            packed = torch.from_numpy(gguf.quants.quantize(layer.weight.numpy(), Q8).copy())
            quantised = GGUFLinear(layer.in_features, layer.out_features, layer.bias is not None, torch.float32)
            quantised.weight = GGUFParameter(packed, requires_grad=False, quant_type=Q8)
            quantised.bias = layer.bias
            model.set_submodule(name, quantised)
    if adapter:
        from peft import LoraConfig

        torch.manual_seed(1)
        model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v", "proj_out"], init_lora_weights=False))
    return model


def inputs(device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    made = {
        "hidden_states": torch.randn(2, 16, 32, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 32, generator=generator),
        "pooled_projections": torch.randn(2, 32, generator=generator),
        "timestep": torch.tensor([0.5, 0.1]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }
    return {name: value.to(device) for name, value in made.items()}


def trained(model: Any, device: torch.device) -> list[Tensor]:
    batches = [inputs(device)] * 5
    return fine_tune(model, batches, lambda model, batch: model(**batch).sample.square().mean(), lr=1e-3)


def test_it_computes_what_it_computes_on_the_device(compute_device: torch.device) -> None:
    model = transformer(adapter=False)
    packed_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with torch.no_grad():
        wanted = transformer(adapter=False).to(compute_device)(**inputs(compute_device)).sample.cpu()
        with headrace.offload(model, device=compute_device, device_memory=packed_bytes // 2) as handle:
            for _ in range(2):
                assert torch.equal(model(**inputs(compute_device)).sample.cpu(), wanted)
            stats = handle.stats()
            assert stats.device_peak_bytes <= packed_bytes // 2
            assert packed_bytes // 2 < stats.onload_bytes < 2.2 * packed_bytes, "packed weights travel"


def test_an_adapter_on_it_trains(compute_device: torch.device) -> None:
    model = transformer(adapter=True)
    packed_bytes = sum(parameter.nbytes for parameter in model.parameters())
    wanted = trained(transformer(adapter=True).to(compute_device), compute_device)
    with headrace.offload(model, device=compute_device, device_memory=packed_bytes // 2) as handle:
        assert_same(trained(model, compute_device), wanted)
        assert handle.stats().device_peak_bytes <= packed_bytes // 2
        assert handle.stats().onload_bytes > packed_bytes
