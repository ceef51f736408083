"""Does a plan say of experts one by one what a run then does? Room, bytes and uses of small models, as counted."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import headrace
from headrace.planning.bounds import fewest_bytes
from headrace.planning.cost import Case, Hardware, Method, Place, Spread, Training, Work
from headrace.planning.cost.decoding import Decoding, decoding_of
from headrace.planning.cost.experts import cut_of
from headrace.planning.cost.tiers import tiers_of
from headrace.planning.cost.traffic import traffic_of
from headrace.planning.cost.work import Activations
from headrace.shapes import shape_of
from headrace.weights.movement import slices

LAYERS, EXPERTS, ROUTED = 4, 16, 4
TOKENS = 48
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": ROUTED,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
MACHINE = Hardware(
    name="any",
    device_memory_bytes=10**9,
    device_bytes_per_second=1e12,
    flops_per_second=1e12,
    onload_bytes_per_second=1e9,
    offload_bytes_per_second=1e9,
    host_memory_bytes=10**10,
    dram_bytes_per_second=1e11,
)
STREAMED = Method(weights=Place.HOST, state=Place.DEVICE, activations=Activations.KEPT)


def model_of(implementation: str = "batched_mm", own: dict[str, Any] = CONFIG) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{key: value for key, value in own.items() if key != "dtype"})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    model.set_experts_implementation(implementation)
    return model.requires_grad_(False)


def routed_evenly(model: nn.Module) -> None:
    """Each token goes to experts that are drawn evenly, whatever the router computes."""
    generator = torch.Generator().manual_seed(0)

    def draw(_module: nn.Module, _args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        *others, chosen = output
        drawn = [torch.randperm(EXPERTS, generator=generator)[:ROUTED] for _ in range(len(chosen))]
        return (*others, torch.stack(drawn).to(chosen.device))

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(draw)


def decoded(budget_bytes: int, batch_size: int, hit_rate: float) -> Decoding:
    shape = shape_of(CONFIG).frozen()
    work = Work(training=Training.NONE, batch_size=batch_size, sequence_length=TOKENS)
    case = Case(shape, work, Spread(), STREAMED, MACHINE)
    found = decoding_of(case, tiers_of(case, budget_bytes), hit_rate)
    assert found is not None
    return found


def budget(model: nn.Module, slots: int) -> int:
    """Room for all other weights, and for so many experts."""
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    nbytes = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    return nbytes - experts + slots * experts // (LAYERS * EXPERTS) + 4096  # of rounding up


@pytest.fixture
def banks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots of each bank that is made."""
    made: list[int] = []

    class Watched(slices.Bank):
        def __init__(self, buffer: torch.Tensor, slot_bytes: int, layers: int) -> None:
            super().__init__(buffer, slot_bytes, layers)
            made.append(self.slots)

    monkeypatch.setattr(slices, "Bank", Watched)
    return made


def write(model: Any, batch_size: int) -> None:
    """A token of each sequence at a time."""
    cache = transformers.DynamicCache(config=model.config)
    token = torch.ones(batch_size, 1, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(TOKENS):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)


@pytest.mark.extended
@pytest.mark.parametrize("slots", [6, 16, 32, 63])
def test_a_token_loads_what_is_planned_for_the_share_that_is_there(banks: list[int], slots: int) -> None:
    """To the byte: the plan is told which share was there."""
    model = model_of()
    limit = budget(model, slots)
    with headrace.offload(model, device="cpu", device_memory=limit) as handle:
        write(model, 1)
        stats = handle.stats()
    found = decoded(limit, 1, 1 - stats.expert_loads / stats.expert_uses)
    cut = found.cut
    assert cut is not None
    assert found.given is not None
    assert cut.banks == (len(banks), banks[0])
    assert cut.slots == sum(banks)
    assert stats.expert_uses == TOKENS * found.wanted_experts * LAYERS
    assert found.given.onload_bytes * TOKENS == pytest.approx(stats.expert_bytes + stats.row_bytes, abs=1)
    assert 0 < stats.expert_loads < stats.expert_uses


@pytest.mark.parametrize("batch_size", [1, 4])
def test_even_routing_wants_and_finds_what_is_planned(batch_size: int) -> None:
    """Within what the draws differ by."""
    model = model_of()
    routed_evenly(model)
    limit = budget(model, 40)
    with headrace.offload(model, device="cpu", device_memory=limit) as handle:
        write(model, batch_size)
        stats = handle.stats()
    found = decoded(limit, batch_size, 0.0)
    assert found.even is not None
    assert stats.expert_uses == pytest.approx(TOKENS * LAYERS * found.wanted_experts, rel=0.02)
    assert 1 - stats.expert_loads / stats.expert_uses == pytest.approx(found.even.hit_rate, abs=0.08)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:the filesystem of disk=")
def test_even_routing_reads_what_is_planned(compute_device: torch.device, tmp_path: Path) -> None:
    """Of experts that neither the device nor host memory has; within what the draws differ by."""
    model = model_of()
    routed_evenly(model)
    limit = budget(model, 12)
    host = sum(p.nbytes for p in model.parameters()) * 3 // 4
    with headrace.offload(model, device=compute_device, device_memory=limit, host_memory=host, disk=tmp_path) as handle:
        host_bytes = handle._tiers._placement.experts_bytes
        write(model, 2)
        handle.reset_stats()
        for _ in range(3):
            write(model, 2)
        stats = handle.stats()
    found = decoded(limit, 2, 0.0)
    assert found.cut is not None
    assert found.even is not None
    assert host_bytes >= EXPERTS * found.cut.expert_bytes
    share = (1 - found.even.hit_rate) * found.cut.read_share(host_bytes)
    assert 0.2 < share < 0.8
    reads = stats.expert_loads - stats.expert_host_loads
    assert reads / stats.expert_uses == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize("slots", [20, 40])
def test_training_beside_frozen_experts_loads_what_is_planned(banks: list[int], slots: int) -> None:
    """Forward and backward, in the second of two steps; every expert is wanted by so many tokens."""
    model = model_of("grouped_mm")
    model.model.embed_tokens.requires_grad_()
    limit = budget(model, slots)
    ids = torch.randint(64, (4, 64))
    with headrace.offload(model, device="cpu", device_memory=limit) as handle:
        for _ in range(2):
            before = handle.stats()
            model(ids, labels=ids).loss.backward()
        after = handle.stats()
    shape = shape_of(CONFIG).with_adapters(4)
    work = Work(training=Training.ADAPTER, batch_size=4, sequence_length=64)
    case = Case(shape, work, Spread(), STREAMED, MACHINE)
    cut = cut_of(case, limit)
    assert cut is not None
    assert cut.banks == (len(banks), banks[0])
    loads = [own.parts for own in traffic_of(case, cut)]
    moved = after.expert_bytes - before.expert_bytes
    assert moved == pytest.approx(2 * sum(one.nbytes for one in loads), rel=1e-6)


def test_a_prompt_loads_what_is_planned() -> None:
    model = model_of("grouped_mm")
    limit = budget(model, 20)
    ids = torch.randint(64, (4, 64))
    with headrace.offload(model, device="cpu", device_memory=limit) as handle, torch.no_grad():
        for _ in range(2):
            before = handle.stats()
            model(ids)
        after = handle.stats()
    shape = shape_of(CONFIG).frozen()
    work = Work(training=Training.NONE, batch_size=4, sequence_length=64)
    case = Case(shape, work, Spread(), STREAMED, MACHINE)
    loads = [own.parts for own in traffic_of(case, cut_of(case, limit))]
    moved = after.expert_bytes - before.expert_bytes
    assert moved == pytest.approx(sum(one.nbytes for one in loads), rel=1e-6)


@pytest.mark.extended
@pytest.mark.emu("lazy", h2d_bytes_per_second=1e7, op_latency_seconds=1e-7, launch_seconds=0.0)
def test_blocks_know_of_the_link_that_experts_take(emu_device: Any) -> None:
    """Most of a visit's time is that of its experts' loads: in it no block hides, so no more come than have to.

    Of 8 layers of which half have room, a few more than the fewest visit: all of them would, if plans took the waits
    for experts for compute.
    """
    config = CONFIG | {"num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 16}
    model = model_of("batched_mm", config)
    experts = sum(parameter.nbytes for name, parameter in model.named_parameters() if ".experts." in name)
    others = sum(parameter.nbytes for parameter in model.parameters()) - experts
    limit = others // 2 + ROUTED * experts // (8 * EXPERTS) + 4096
    with headrace.offload(model, device="emu", device_memory=limit) as handle:
        tokens = torch.ones(1, 1, dtype=torch.int64)
        with torch.no_grad():
            for token in range(12):
                if token == 6:
                    before = handle.stats()
                model(tokens)
        after = handle.stats()
        assert handle.plan is not None
        fewest = fewest_bytes(handle.plan.problem)
    moved = (after.onload_bytes - after.expert_bytes) - (before.onload_bytes - before.expert_bytes)
    assert 0.8 * fewest <= moved / 6 <= 1.2 * fewest  # plans may take turns
    assert moved / 6 < 0.7 * others
