"""Is other code that moves weights refused on an offloaded model, by name, and does the model go on as it was?"""

import copy
from collections.abc import Callable
from typing import Any

import accelerate
import diffusers
import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig, apply_group_offloading
from torch import nn

import headrace
from tests.matrix.test_diffusers import flux, flux_inputs, unet, unet_inputs
from tests.support.compare import assert_same
from tests.support.held import weight_bytes

Act = Callable[[Any, torch.device], object]
MOVES = "headrace moves weights by itself.*call remove"


def outputs(model: Any, device: torch.device) -> torch.Tensor:
    inputs = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in unet_inputs(0).items()
    }
    with torch.no_grad():
        return model(**inputs).sample.cpu()  # type: ignore[no-any-return]


def offloaded(device: torch.device) -> tuple[Any, headrace.Offloaded, torch.Tensor]:
    """A UNet, its handle, and what it gives."""
    torch.manual_seed(0)
    model = unet()
    expected = outputs(copy.deepcopy(model).to(device), device)
    handle = headrace.offload(model, device=device, device_memory=weight_bytes(model) // 2)
    assert torch.equal(outputs(model, device), expected)
    return model, handle, expected


def sequential(model: Any, device: torch.device) -> None:
    pipeline = diffusers.DDPMPipeline(model, diffusers.DDPMScheduler())
    pipeline.enable_sequential_cpu_offload(device=device)


def replace_data(model: nn.Module, device: torch.device) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to("meta" if device.type == "cpu" else device)


@pytest.mark.extended
@pytest.mark.parametrize(
    "act",
    [
        accelerate.cpu_offload,
        lambda model, device: accelerate.disk_offload(model, "unused", device),
        sequential,
        replace_data,
    ],
    ids=["cpu_offload", "disk_offload", "sequential", "data"],
)
def test_what_replaces_weights(act: Act, compute_device: torch.device, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model, handle, expected = offloaded(compute_device)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(headrace.StateError, match=MOVES):
        act(model, compute_device)
    assert_same(model.parameters(), before)
    loaded_bytes = handle.stats().onload_bytes
    assert torch.equal(outputs(model, compute_device), expected)
    assert handle.stats().onload_bytes > loaded_bytes
    assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes


@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
def test_group_offloading(kind: str, compute_device: torch.device) -> None:
    """It keeps weights on the CPU between calls, and where these compute on another device, that is noticed."""
    model, handle, expected = offloaded(compute_device)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    settings = {} if kind == "leaf_level" else {"num_blocks_per_group": 1}
    rest = torch.device("cpu")
    apply_group_offloading(model, onload_device=compute_device, offload_device=rest, offload_type=kind, **settings)
    if kind == "leaf_level" and compute_device.type == "cpu":  # where nothing moves
        assert torch.equal(outputs(model, compute_device), expected)
    else:
        with pytest.raises(headrace.StateError, match="group offloading"):
            outputs(model, compute_device)
    handle.remove()
    assert_same(model.parameters(), before)


def test_model_offloading_of_a_pipeline_goes_together(compute_device: torch.device) -> None:
    """`enable_model_cpu_offload` moves whole models: an offloaded one stays where it is."""
    model, handle, expected = offloaded(compute_device)
    pipeline = diffusers.DDPMPipeline(model, diffusers.DDPMScheduler())
    if compute_device.type == "cpu":
        accelerate.cpu_offload_with_hook(model, compute_device)
    else:
        pipeline.enable_model_cpu_offload(device=compute_device)
    assert torch.equal(outputs(model, compute_device), expected)
    assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes


def steps(model: Any, device: torch.device) -> list[torch.Tensor]:
    """What a transformer gives in three steps, of which the later ones find the first one's blocks in the cache."""
    inputs = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in flux_inputs(0).items()
    }
    found = []
    with torch.no_grad(), model.cache_context("steps"):
        for _ in range(3):
            found.append(model(**inputs).sample.cpu())
            inputs["hidden_states"] = inputs["hidden_states"] * 1.01
    return found


@pytest.mark.parametrize("when", ["before", "after", "disabled"])
def test_caches_of_diffusers_go_together(when: str, compute_device: torch.device) -> None:
    """Their hooks replace the forward of blocks, and skip some; `disabled`: as much is left of them as then is."""
    torch.manual_seed(0)
    model = flux()
    plain = copy.deepcopy(model).to(compute_device)
    for one in (plain, model) if when != "after" else (plain,):
        one.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    if when == "disabled":
        plain.disable_cache()
        model.disable_cache()
    expected = steps(plain, compute_device)
    with headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2) as handle:
        if when == "after":
            model.enable_cache(FirstBlockCacheConfig(threshold=0.5))
        assert_same(steps(model, compute_device), expected)
        assert handle.stats().onload_bytes > weight_bytes(model) // 2
        assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes


def test_layerwise_casting_is_refused() -> None:
    model = flux()
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    with pytest.raises(headrace.StateError, match="converts its weights in each call; load the model without"):
        headrace.offload(model, device="cpu")


def test_a_model_that_unpacks_itself_at_its_first_call_is_refused_until_it_has() -> None:
    """As compressed-tensors leaves a model that it has read or written packed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    plain = model(x)

    def unpack(module: nn.Module, _args: object) -> None:
        module.ct_decompress_hook.remove()  # type: ignore[operator, union-attr]
        del module.ct_decompress_hook

    model.ct_decompress_hook = model.register_forward_pre_hook(unpack)  # type: ignore[assignment]
    with pytest.raises(headrace.StateError, match=r"compressed-tensors at its first call.*call it once before"):
        headrace.offload(model, device="cpu")
    model(x)
    with headrace.offload(model, device="cpu"):
        assert torch.equal(model(x), plain)
