"""Are autocast, weights that travel in another dtype, and compiled blocks exact?"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.matrix.models import CHECKPOINTING, DENSE, Batch
from tests.support.compare import Outcome, assert_same, on_cpu, same
from tests.support.held import weight_bytes
from tests.support.loops import adamw, train
from tests.support.offloaded import assert_exact, offload

BFLOAT16 = torch.bfloat16


def forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    output = model(batch[0])
    return output, DENSE.loss(output.float(), batch[1])


@pytest.mark.core(checkpointing="non-reentrant")
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_autocast(checkpointing: str, compute_device: torch.device) -> None:
    """Float32 weights, bfloat16 products: also with a second pass in one region, whose weights have changed."""

    def under_autocast(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.autocast(compute_device.type, BFLOAT16):
            return forward(model, batch)

    def script(model: nn.Module) -> Outcome:
        outcome = train(model, DENSE.on(compute_device), under_autocast)
        with torch.no_grad(), torch.autocast(compute_device.type, BFLOAT16, cache_enabled=False):
            outcome.outputs.append(on_cpu(forward(model, DENSE.on(compute_device)[0])[0]))
            for parameter in model.parameters():
                parameter.mul_(0.5)
            outcome.outputs.append(on_cpu(forward(model, DENSE.on(compute_device)[0])[0]))
            assert outcome.outputs[-1].dtype == BFLOAT16
        return outcome.read(model)

    assert_exact(lambda: DENSE.build(checkpointing), script, compute_device)


def test_autocast_does_not_keep_casts_of_old_weights(compute_device: torch.device) -> None:
    """One long autocast region with its cache on, and a change of weights within: the new ones count."""
    model = DENSE.build()
    offload(model, compute_device)
    batch = DENSE.on(compute_device)[0]
    with torch.no_grad(), torch.autocast(compute_device.type, BFLOAT16):
        before = on_cpu(model(batch[0]))
        for parameter in model.parameters():
            parameter.mul_(0.5)
        after = on_cpu(model(batch[0]))
    plain = DENSE.build().to(compute_device)
    for expected in (before, after):
        with torch.no_grad(), torch.autocast(compute_device.type, BFLOAT16):
            assert same(expected, on_cpu(plain(batch[0])))
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(0.5)


def mixed_precision(model: nn.Module, device: torch.device, autocast: bool) -> Outcome:
    """What `param_dtype` means, by hand: a bfloat16 copy computes, its gradients go to the float32 weights."""
    outcome = Outcome()
    optimizer = adamw(model.parameters())
    for step, batch in enumerate(DENSE.on(device)):
        torch.manual_seed(step)
        narrow = copy.deepcopy(model).to(BFLOAT16).to(device)
        with torch.autocast(device.type, BFLOAT16, enabled=autocast):
            output, loss = forward(narrow, batch)
        outcome.outputs += [on_cpu(output), on_cpu(loss)]
        loss.backward()
        for parameter, theirs in zip(model.parameters(), narrow.parameters(), strict=True):
            assert theirs.grad is not None
            parameter.grad = on_cpu(theirs.grad).float()
        outcome.read_gradients(model)
        optimizer.step()
    optimizer.zero_grad()
    return outcome.read(model)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_param_dtype(autocast: bool, compute_device: torch.device) -> None:
    expected = mixed_precision(DENSE.build(), compute_device, autocast)

    def narrow_forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.autocast(compute_device.type, BFLOAT16, enabled=autocast):
            return forward(model, batch)

    model = DENSE.build()
    handle = offload(model, compute_device, 0.2, param_dtype=BFLOAT16)  # of bytes in float32
    assert_same(train(model, DENSE.on(compute_device), narrow_forward), expected)
    stats = handle.stats()
    assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes
    assert stats.offload_bytes == 3 * weight_bytes(model) // 2
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_param_dtype_accumulates_in_the_homes_dtype(compute_device: torch.device) -> None:
    """Two micro-batches: bfloat16 gradients are summed up in float32."""
    expected: dict[str, Tensor] = {}
    narrow = DENSE.build().to(BFLOAT16).to(compute_device)
    for batch in DENSE.on(compute_device)[:2]:
        narrow.zero_grad()
        forward(narrow, batch)[1].backward()
        for name, parameter in narrow.named_parameters():
            assert parameter.grad is not None
            expected[name] = expected.get(name, 0) + on_cpu(parameter.grad).float()
    model = DENSE.build()
    offload(model, compute_device, 0.2, param_dtype=BFLOAT16)
    for batch in DENSE.on(compute_device)[:2]:
        forward(model, batch)[1].backward()
    assert_same({name: p.grad for name, p in model.named_parameters()}, expected, "gradients")


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of dynamo's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks(backend: str, compute_device: torch.device) -> None:
    """`layer.compile()` before offloading or after: one graph for each kind of layer, and never a new one."""
    counts: list[int] = []

    def compiled(model: Any) -> Any:
        model.is_compiled = True
        for layer in model.layers:
            layer.compile(backend=backend, fullgraph=True)
        return model

    def script(model: Any) -> Outcome:
        if not hasattr(model, "is_compiled"):
            compiled(model)
        torch._dynamo.utils.counters.clear()
        outcome = train(model, DENSE.on(compute_device), forward)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        train(model, DENSE.on(compute_device), forward)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
        counts.append(graphs)
        return outcome

    for make in (DENSE.build, lambda: compiled(DENSE.build())):
        torch._dynamo.reset()
        assert_exact(make, script, compute_device)
    assert counts[0] == counts[1] > 0
    assert counts[2] == counts[3] > 0
