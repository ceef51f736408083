"""Do LoRA adapters of PEFT work, put on before offloading or after, merged and taken apart again?"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.matrix.test_transformers import built, llama, text_inputs
from tests.support.compare import Outcome, assert_same, on_cpu
from tests.support.held import weight_bytes
from tests.support.loops import to_device, train
from tests.support.offloaded import assert_streamed, offload

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

CONFIG = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


def adapted(model: nn.Module) -> Any:
    """With the same adapters every time."""
    torch.manual_seed(1)
    return get_peft_model(model, CONFIG)  # type: ignore[arg-type]


def batches(device: torch.device) -> list[dict[str, Tensor]]:
    return to_device([{**text_inputs(seed), "labels": text_inputs(seed)["input_ids"]} for seed in range(3)], device)


def forward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    output = model(**batch)
    return output.logits, output.loss


def offloaded_before(device: torch.device) -> tuple[Any, Any]:
    """Offloaded, then adapted: the adapters are taken in at the next pass."""
    base = built(llama)
    handle = offload(base, device, 0.5)
    return adapted(base), handle


def offloaded_after(device: torch.device) -> tuple[Any, Any]:
    """Adapted, then offloaded."""
    model = adapted(built(llama))
    return model, offload(model, device, 0.5)


ORDERS = [offloaded_before, offloaded_after]


@pytest.mark.parametrize("make", ORDERS)
def test_training(make: Callable[[torch.device], tuple[Any, Any]], compute_device: torch.device) -> None:
    plain = train(adapted(built(llama)).to(compute_device), batches(compute_device), forward)
    model, handle = make(compute_device)
    offloaded = train(model, batches(compute_device), forward)
    assert_same(offloaded, plain)
    assert_streamed(handle, model)
    adapters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert 0 < adapters < weight_bytes(model) / 4
    assert handle.stats().offload_bytes == 3 * adapters  # nothing else is copied back


def merge(model: Any, device: torch.device) -> Outcome:
    """Outputs with the adapters merged, taken apart, and merged for good."""
    outcome = Outcome()
    batch = batches(device)[0]

    def look(model: Any) -> None:
        with torch.no_grad():
            outcome.outputs.append(on_cpu(forward(model, batch)[0]))

    look(model)
    model.merge_adapter()
    look(model)
    model.unmerge_adapter()
    look(model)
    merged = model.merge_and_unload()
    look(merged)
    return outcome.read(merged)


@pytest.mark.parametrize("make", ORDERS)
def test_merging(make: Callable[[torch.device], tuple[Any, Any]], compute_device: torch.device) -> None:
    def plain() -> Any:
        return adapted(built(llama)).eval()

    # The weights of an offloaded model are merged on the host.
    on_host = merge(plain().to("cpu"), torch.device("cpu"))
    model, handle = make(compute_device)
    offloaded = merge(model.eval(), compute_device)
    assert_same(offloaded.state, on_host.state, "merged weights")
    # The same weights give the same outputs as on the plain model.
    merged = plain().merge_and_unload().to(compute_device)
    with torch.no_grad():
        expected = on_cpu(forward(merged, batches(compute_device)[0])[0])
    assert torch.equal(offloaded.outputs[-1], expected)
    assert torch.equal(offloaded.outputs[0], on_cpu(_logits(plain().to(compute_device), compute_device)))
    assert handle.stats().onload_bytes > 0


def _logits(model: Any, device: torch.device) -> Tensor:
    with torch.no_grad():
        return forward(model, batches(device)[0])[0]
