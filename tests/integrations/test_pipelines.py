"""Do models of diffusers come from their directories, and does a whole pipeline run within one budget, with LoRAs?"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from peft import LoraConfig
from transformers import CLIPTextConfig, CLIPTextModel

import headrace
from tests.matrix.test_diffusers import flux, flux_inputs, unet, unet_inputs
from tests.support.held import weight_bytes


def pipeline() -> diffusers.StableDiffusionPipeline:
    """Stable Diffusion with a text encoder, a UNet and a VAE of some 100 KB each."""
    torch.manual_seed(0)
    text = CLIPTextConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    )
    scheduler = diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)
    made = diffusers.StableDiffusionPipeline(
        vae, CLIPTextModel(text), None, unet(), scheduler, None, None, requires_safety_checker=False
    )
    made.set_progress_bar_config(disable=True)
    return made


def controlled() -> Any:
    """The same pipeline with a ControlNet, which has blocks of its own beside those of the UNet."""
    parts = pipeline()
    torch.manual_seed(1)
    control = diffusers.ControlNetModel.from_unet(parts.unet, conditioning_embedding_out_channels=(16, 16))
    for parameter in control.parameters():
        torch.nn.init.normal_(parameter, std=0.05)  # some are zeros at first, which do nothing
    made = diffusers.StableDiffusionControlNetPipeline(**parts.components, controlnet=control)
    made.set_progress_bar_config(disable=True)
    return made


def models(pipe: Any) -> list[Any]:
    return [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]


def image(pipe: Any, device: torch.device, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        text = pipe.text_encoder(torch.arange(5).view(1, -1).to(device))[0]
        blank = pipe.text_encoder(torch.zeros(1, 5, dtype=torch.long).to(device))[0]
    return pipe(  # type: ignore[no-any-return]
        prompt_embeds=text,
        negative_prompt_embeds=blank,
        num_inference_steps=3,
        height=16,
        width=16,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
        **more,
    ).images.cpu()


def add_lora(pipe: Any, name: str, seed: int) -> None:
    torch.manual_seed(seed)
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False), name)


def test_one_budget_for_all(compute_device: torch.device) -> None:
    plain, pipe = pipeline(), pipeline()
    plain.to(compute_device)
    expected = image(plain, compute_device)
    total = sum(map(weight_bytes, models(pipe)))
    with headrace.offload_pipeline(pipe, device=compute_device, device_memory=total // 3) as handle:
        for _ in range(3):
            assert torch.equal(image(pipe, compute_device), expected)
        stats = handle.stats()
        assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes == total // 3
        assert stats.onload_bytes > total
        assert pipe.device == compute_device
    assert all(parameter.device.type == "cpu" for model in models(pipe) for parameter in model.parameters())


@pytest.mark.parametrize("apart", [False, True], ids=["one handle", "a handle for each part"])
def test_with_a_controlnet(compute_device: torch.device, apart: bool) -> None:
    """Its blocks and those of the UNet take turns in each step; the UNet is also a part of a second pipeline."""
    hint = torch.linspace(0, 1, 3 * 16 * 16).reshape(1, 3, 16, 16)
    plain, pipe = controlled(), controlled()
    plain.to(compute_device)
    expected = image(plain, compute_device, image=hint)
    total = sum(map(weight_bytes, models(pipe)))
    with headrace.budget(device_memory=total // 3) as shared:
        parts = models(pipe) if apart else []
        handles = [headrace.offload(part, device=compute_device) for part in parts]
        handles = handles or [headrace.offload_pipeline(pipe, device=compute_device)]
    components = {name: part for name, part in pipe.components.items() if name != "controlnet"}
    second = diffusers.StableDiffusionPipeline(**components, requires_safety_checker=False)
    for _ in range(3):
        assert torch.equal(image(pipe, compute_device, image=hint), expected)
    assert torch.equal(image(second, compute_device), image(pipeline().to(compute_device), compute_device))
    assert 0 < shared.device_peak_bytes <= total // 3
    assert sum(handle.stats().onload_bytes for handle in handles) > total


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_loras_come_and_go(compute_device: torch.device) -> None:
    plain, pipe = pipeline(), pipeline()
    total = sum(map(weight_bytes, models(pipe)))
    steps: list[Callable[[Any], Any]] = [
        lambda pipe: add_lora(pipe, "one", 1),
        lambda pipe: add_lora(pipe, "two", 2),
        lambda pipe: pipe.set_adapters(["one"]),
        lambda pipe: pipe.set_adapters(["one", "two"], [0.5, 0.25]),
        lambda pipe: pipe.delete_adapters("one"),
        lambda pipe: pipe.unload_lora_weights(),
    ]
    first = image(plain.to(compute_device), compute_device)
    seen = [first]
    with headrace.offload_pipeline(pipe, device=compute_device, device_memory=total // 2) as handle:
        assert torch.equal(image(pipe, compute_device), first)
        for step in steps:
            step(plain.to("cpu"))
            step(pipe)
            seen.append(image(plain.to(compute_device), compute_device))
            assert torch.equal(image(pipe, compute_device), seen[-1])
            assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes
    assert not torch.equal(seen[4], first)
    assert torch.equal(seen[-1], first)


def test_lora_files(compute_device: torch.device, tmp_path: Path) -> None:
    plain, pipe = pipeline(), pipeline()
    add_lora(plain, "one", 1)
    from peft import get_peft_model_state_dict

    layers = get_peft_model_state_dict(plain.unet, adapter_name="one")
    diffusers.StableDiffusionPipeline.save_lora_weights(tmp_path, unet_lora_layers=layers)
    plain.unload_lora_weights()
    total = sum(map(weight_bytes, models(pipe)))
    with headrace.offload_pipeline(pipe, device=compute_device, device_memory=total // 2):
        before = image(pipe, compute_device)
        for each in (plain, pipe):
            each.load_lora_weights(tmp_path, adapter_name="file")
        expected = image(plain.to(compute_device), compute_device)
        assert torch.equal(image(pipe, compute_device), expected)
        assert not torch.equal(before, expected)


def test_it_lasts_as_long_as_the_pipeline() -> None:
    pipe = pipeline()
    expected = image(copy.deepcopy(pipe), torch.device("cpu"))
    headrace.offload_pipeline(pipe, device="cpu")
    assert torch.equal(image(pipe, torch.device("cpu")), expected)
    with pytest.raises(headrace.StateError, match="is offloaded already"):
        headrace.offload_pipeline(pipe, device="cpu")


def test_a_pipeline_without_models() -> None:
    pipe = pipeline()
    pipe.text_encoder = pipe.unet = pipe.vae = None
    with pytest.raises(ValueError, match=r"StableDiffusionPipeline has no component that is a torch\.nn\.Module"):
        headrace.offload_pipeline(pipe)
    with pytest.raises(TypeError, match=r"pipeline is a list; give a diffusers\.DiffusionPipeline"):
        headrace.offload_pipeline([])  # type: ignore[arg-type]


@pytest.mark.extended
@pytest.mark.parametrize(("make", "inputs"), [(unet, unet_inputs), (flux, flux_inputs)], ids=["unet", "flux"])
@pytest.mark.parametrize("shards", [False, True])
def test_a_component_comes_from_its_directory(
    make: Callable[[], Any], inputs: Callable[[int], Any], shards: bool, compute_device: torch.device, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = make().eval()
    plain.save_pretrained(tmp_path / "model", max_shard_size="40KB" if shards else "1GB")
    batch = {name: value.to(compute_device) if torch.is_tensor(value) else value for name, value in inputs(0).items()}
    total = weight_bytes(plain)
    model, handle = headrace.from_pretrained(
        tmp_path / "model",
        trainable=False,
        device=compute_device,
        device_memory=total // 2,
        host_memory=total // 2,
        disk=tmp_path / "spill",
    )
    with handle, torch.no_grad():
        assert type(model) is type(plain)
        assert not model.training
        assert model.config["in_channels"] == plain.config["in_channels"]
        expected = plain.to(compute_device)(**batch).sample
        assert torch.equal(model(**batch).sample, expected)
        stats = handle.stats()
        assert stats.device_peak_bytes <= total // 2
        assert stats.host_peak_bytes <= total // 2


def test_directories_say_what_to_do(tmp_path: Path) -> None:
    pipe = pipeline()
    pipe.save_pretrained(tmp_path / "pipe")
    with pytest.raises(headrace.CheckpointError, match=r"offload_pipeline\(pipeline.*'.*pipe/text_encoder'"):
        headrace.from_pretrained(tmp_path / "pipe")
    text = (tmp_path / "pipe/unet/config.json").read_text()
    for named, says in (
        ('"UNet9DModel"', "names the class 'UNet9DModel', which this diffusers"),
        ('"is_torch_available"', "names the class 'is_torch_available', which this diffusers"),
        ("3", "config.json has 3 for '_class_name'; give the name of a class"),
    ):
        (tmp_path / "pipe/unet/config.json").write_text(text.replace('"UNet2DConditionModel"', named))
        with pytest.raises(headrace.CheckpointError, match=says):
            headrace.from_pretrained(tmp_path / "pipe" / "unet")
