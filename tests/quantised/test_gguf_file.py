"""Does a transformer that diffusers loads from a GGUF file compute and train offloaded as it does without?

The files have the names and layouts of the original checkpoints: one with other names (Wan), one with queries, keys and
values in one packed weight that the loader splits (Z-Image).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from diffusers import GGUFQuantizationConfig, WanTransformer3DModel, ZImageTransformer2DModel
from diffusers.quantizers.gguf.utils import GGUFParameter
from torch import Tensor

import headrace
from tests.support.compare import assert_same
from tests.support.held import weight_bytes
from tests.support.loops import fine_tune

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")]

WAN_NAMES = (
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("attn1.to_out.0", "self_attn.o"),
    ("attn2.to_out.0", "cross_attn.o"),
    ("attn1", "self_attn"),
    ("attn2", "cross_attn"),
    (".to_", "."),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
    ("norm2", "norm3"),
    ("proj_out", "head.head"),
)
Z_IMAGE_NAMES = (
    ("all_final_layer.2-1", "final_layer"),
    ("all_x_embedder.2-1", "x_embedder"),
    ("attention.to_out.0", "attention.out"),
    ("attention.norm_k", "attention.k_norm"),
    ("attention.norm_q", "attention.q_norm"),
)


def wan_checkpoint(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, weight in weights.items():
        for theirs, original in WAN_NAMES:
            name = name.replace(theirs, original)
        name = "head.modulation" if name == "scale_shift_table" else name.replace("scale_shift_table", "modulation")
        renamed[name] = weight
    return renamed


def z_image_checkpoint(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, weight in weights.items():
        if name.endswith("to_q.weight"):
            ours = (weights[name.replace("to_q", part)] for part in ("to_q", "to_k", "to_v"))
            name, weight = name.replace("to_q", "qkv"), torch.cat(list(ours))
        elif name.endswith(("to_k.weight", "to_v.weight")):
            continue
        for theirs, original in Z_IMAGE_NAMES:
            name = name.replace(theirs, original)
        renamed[name] = weight
    return renamed


def wan_inputs(device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "hidden_states": torch.randn(2, 4, 3, 4, 4, generator=generator).to(device),
        "timestep": torch.tensor([500.0, 100.0]).to(device),
        "encoder_hidden_states": torch.randn(2, 5, 64, generator=generator).to(device),
    }


def z_image_inputs(device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "x": [torch.randn(4, 1, 8, 8, generator=generator).to(device)],
        "t": torch.tensor([0.5]).to(device),
        "cap_feats": [torch.randn(6, 32, generator=generator).to(device)],
    }


@dataclass(frozen=True)
class Kind:
    """A model class that loads GGUF files, and how the authors of its checkpoints call its weights."""

    model_class: Any
    config: dict[str, Any]
    checkpoint: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    packing: gguf.GGMLQuantizationType
    inputs: Callable[[torch.device], dict[str, Any]]
    adapted: tuple[str, ...]

    def write(self, directory: Path) -> None:
        """A GGUF file with random weights: large matrices packed, smaller ones float16, vectors float32."""
        torch.manual_seed(0)
        model = self.model_class(**self.config)
        weights = {name: torch.randn_like(weight) * 0.05 for name, weight in model.state_dict().items()}
        model.save_config(directory)
        writer = gguf.GGUFWriter(directory / "model.gguf", "diffusion")
        for name, weight in self.checkpoint(weights).items():
            if weight.ndim == 2 and weight.numel() >= 4096 and weight.shape[1] % 32 == 0:
                writer.add_tensor(name, gguf.quants.quantize(weight.numpy(), self.packing), raw_dtype=self.packing)
            else:
                writer.add_tensor(name, (weight if weight.ndim == 1 else weight.half()).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def load(self, directory: Path, *, adapter: bool = False) -> Any:
        model = self.model_class.from_single_file(
            str(directory / "model.gguf"),
            config=str(directory),
            quantization_config=GGUFQuantizationConfig(compute_dtype=torch.float32),
        ).requires_grad_(False)
        if adapter:
            from peft import LoraConfig

            torch.manual_seed(1)
            model.add_adapter(LoraConfig(r=4, target_modules=list(self.adapted), init_lora_weights=False))
        return model


KINDS = {
    "Wan Q8_0": Kind(
        WanTransformer3DModel,
        {
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 64,
            "freq_dim": 32,
            "ffn_dim": 128,
            "num_layers": 6,
        },
        wan_checkpoint,
        gguf.GGMLQuantizationType.Q8_0,
        wan_inputs,
        ("to_q", "to_v", "ffn.net.0.proj"),
    ),
    "Z-Image Q4_0": Kind(
        ZImageTransformer2DModel,
        {
            "in_channels": 4,
            "dim": 96,
            "n_layers": 6,
            "n_refiner_layers": 1,
            "n_heads": 4,
            "n_kv_heads": 4,
            "cap_feat_dim": 32,
            "axes_dims": (8, 8, 8),
            "axes_lens": (64, 32, 32),
        },
        z_image_checkpoint,
        gguf.GGMLQuantizationType.Q4_0,
        z_image_inputs,
        ("to_q", "to_v", "w1"),
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def directory(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf")
    kind.write(path)
    return path


def sample(output: Any) -> Tensor:
    """In a list of images where the model gives one."""
    return torch.stack(output.sample) if isinstance(output.sample, list) else output.sample


def trained(kind: Kind, model: Any, device: torch.device) -> list[Tensor]:
    batches = [kind.inputs(device)] * 5
    return fine_tune(model, batches, lambda model, batch: sample(model(**batch)).square().mean(), lr=1e-3)


def test_it_computes_from_packed_weights(kind: Kind, directory: Path, compute_device: torch.device) -> None:
    model = kind.load(directory)
    packed = [weight for weight in model.parameters() if isinstance(weight, GGUFParameter)]
    assert sum(weight.nbytes for weight in packed) > 0.5 * weight_bytes(model), "the loader unpacked the file"
    with torch.no_grad():
        wanted = sample(kind.load(directory).to(compute_device)(**kind.inputs(compute_device))).cpu()
        budget_bytes = weight_bytes(model) // 2
        with headrace.offload(model, device=compute_device, device_memory=budget_bytes) as handle:
            for _ in range(2):
                assert torch.equal(sample(model(**kind.inputs(compute_device))).cpu(), wanted)
            stats = handle.stats()
            assert stats.device_peak_bytes <= budget_bytes
            assert budget_bytes < stats.onload_bytes < 2.2 * weight_bytes(model), "packed weights travel"


@pytest.mark.extended
def test_an_adapter_on_it_trains(kind: Kind, directory: Path, compute_device: torch.device) -> None:
    wanted = trained(kind, kind.load(directory, adapter=True).to(compute_device), compute_device)
    model = kind.load(directory, adapter=True)
    budget_bytes = weight_bytes(model) // 2
    with headrace.offload(model, device=compute_device, device_memory=budget_bytes) as handle:
        got = trained(kind, model, compute_device)
        assert_same(got, wanted)
        stats = handle.stats()
        assert stats.device_peak_bytes <= budget_bytes
        assert weight_bytes(model) < stats.onload_bytes < 10.5 * weight_bytes(model), "packed weights travel"
    assert_same(wanted[5:], [p.detach() for p in model.parameters() if p.requires_grad])
