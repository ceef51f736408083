"""Does an offloaded model take another dtype, as Fabric's bf16-true gives it to the whole, and stay exact?"""

import copy
import pickle
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import headrace
from tests.support.compare import assert_same
from tests.support.held import weight_bytes


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(5)]
    return nn.Sequential(*layers, nn.Linear(32, 4))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step))


def fit(fabric: lightning.Fabric, plain: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    ready, stepping = fabric.setup(plain, optimizer)
    losses = []
    for step in range(4):
        loss = ready(batch(step)).square().mean()
        fabric.backward(loss)
        stepping.step()
        stepping.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("name", ["torch", "headrace"])
def test_fabric_in_bfloat16(name: str) -> None:
    def optimizer(parameters: Any, **options: Any) -> torch.optim.Optimizer:
        if name == "torch":
            return torch.optim.AdamW(parameters, lr=0.01)
        return headrace.optim.AdamW(parameters, lr=0.01, **options)

    plain, offloaded = model(), model()
    expected = fit(lightning.Fabric(accelerator="cpu", precision="bf16-true"), plain, optimizer(plain.parameters()))
    with headrace.offload(offloaded, device="cpu", device_memory=weight_bytes(plain) * 2) as handle:
        options = {} if name == "torch" else {"overlap": "forward"}
        ours = optimizer(offloaded.parameters(), **options)
        found = fit(lightning.Fabric(accelerator="cpu", precision="bf16-true"), offloaded, ours)
        assert_same(found, expected)
        assert handle.stats().onload_bytes > 0
        for (key, home), other in zip(offloaded.named_parameters(), plain.parameters(), strict=True):
            assert home.dtype == torch.bfloat16
            assert torch.equal(home, other), key
    for buffer, other in zip(offloaded.buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, other)


def test_there_and_back(compute_device: torch.device) -> None:
    plain, offloaded = model().eval(), model().eval()
    homes = list(offloaded.parameters())
    with headrace.offload(offloaded, device=compute_device, device_memory=weight_bytes(plain)) as handle:
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            offloaded.to(compute_device, dtype)
            expected = copy.deepcopy(plain.to(dtype)).to(compute_device)(batch(0).to(compute_device, dtype))
            assert torch.equal(offloaded(batch(0).to(dtype)), expected)
            assert all(one is other for one, other in zip(offloaded.parameters(), homes, strict=True))
            assert all(home.device.type == "cpu" for home in homes)
            assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes


def test_what_stays_as_it_is(tmp_path: Path) -> None:
    offloaded = model()
    small = weight_bytes(offloaded) // 2
    with headrace.offload(offloaded, device="cpu"):
        with pytest.raises(headrace.StateError, match="a part of an offloaded model cannot change 'weight'"):
            offloaded[0].half()
        assert offloaded(batch(0)).dtype == torch.float32
    with headrace.offload(offloaded, device="cpu", host_memory=small * 4, disk=tmp_path):
        with pytest.raises(headrace.StateError, match=r"rest on disk.*param_dtype"):
            offloaded.half()
        assert offloaded(batch(0)).dtype == torch.float32


def test_a_spawned_process_gets_a_plain_model_and_that_is_said() -> None:
    offloaded = model()
    with headrace.offload(offloaded, device="cpu"):
        copied = pickle.loads(pickle.dumps(offloaded))  # says nothing
        set_spawning_popen(object())  # type: ignore[arg-type]  # as while a process is spawned
        try:
            with pytest.warns(
                RuntimeWarning, match=r"spawned process.*call headrace\.offload\(\) in that process"
            ) as told:
                pickle.dumps(offloaded)
        finally:
            set_spawning_popen(None)
    assert len(told) == 1
    assert_same(copied.parameters(), offloaded.parameters())


def test_meta_parameters_say_what_to_pass(tmp_path: Path) -> None:
    with accelerate.init_empty_weights():
        empty = model()
    with pytest.raises(
        headrace.LayoutError, match=r"'0\.0\.weight' .* and 21 more are on the meta .*pass checkpoint=, the"
    ):
        headrace.offload(empty, device="cpu")
    save_file(model().state_dict(), tmp_path / "model.safetensors")
    with headrace.offload(empty.eval(), device="cpu", checkpoint=tmp_path):
        assert torch.equal(empty(batch(0)), model().eval()(batch(0)))
