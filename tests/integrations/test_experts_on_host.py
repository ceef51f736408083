"""Beside a disk, does host memory hold the experts that the device gave up, and are no others read?"""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode

import headrace
from headrace.memory.ledger import Tier
from headrace.planning import Keeping, passes_through
from tests.integrations.test_experts import (
    IMPLEMENTATIONS,
    PROMPT,
    SIZES,
    answer,
    budget,
    expert_bytes,
    experts_in,
    train,
)
from tests.support.compare import assert_same, same
from tests.support.held import weight_bytes

pytestmark = pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O
LAYERS, EXPERTS = 3, 32


def model_of(implementation: str) -> Any:
    """An expert's parts are whole pages, too far from each other for one read."""
    torch.manual_seed(0)
    own = {"num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 8}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**{**SIZES, **own})).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    model.set_experts_implementation(implementation)
    return model.requires_grad_(False)


def on_disk(model: Any, tier: str, path: Path) -> tuple[Any, dict[str, Any]]:
    """The model, and options that leave experts of one layer on the host."""
    host_bytes = 3 * weight_bytes(model) // 4
    if tier == "disk":
        return model, {"disk": path / "disk", "host_memory": host_bytes}
    save_file(model.state_dict(), path / "model.safetensors")
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    model = model.to("meta")
    for key, value in buffers.items():
        owner, _, name = key.rpartition(".")
        model.get_submodule(owner)._buffers[name] = value
    return model, {"checkpoint": path / "model.safetensors", "host_memory": host_bytes}


def host_slots(handle: Any) -> int:
    """Slots on the host that experts have; one more is always free."""
    cache = handle._executor.slices._host_cache
    return 0 if cache is None else int(cache.room)


def bytes_on_disk(handle: Any, layer: int, expert: int) -> int:
    """Of the whole pages in which one expert lies."""
    block = [block for block in handle._blocks() if block.experts is not None][layer]
    sizes = [(param.layout.offset, param.layout.nbytes // EXPERTS) for param in block.params]
    ranges = [(offset + expert * nbytes, nbytes, 0) for offset, nbytes in sizes]
    return sum(piece.nbytes for piece in block.rest.pieces(2**20, ranges))


class TwoTiers:
    """What is loaded and read for calls in a bank of so many slots, beside a host of so many, by `Keeping` alone."""

    def __init__(self, slots: int, host_slots: int) -> None:
        self.slots, self.host_slots = slots, host_slots
        self.banks = max(1, slots // EXPERTS)
        self.held: list[set[tuple[int, int]]] = [set() for _ in range(self.banks)]
        self.keeping = [Keeping(slots // self.banks, -(-LAYERS // self.banks)) for _ in range(self.banks)]
        self.on_host: set[tuple[int, int]] = set()
        self.below = Keeping(max(1, host_slots), LAYERS)
        self.begin()

    def begin(self) -> None:
        """Counts anew."""
        self.loads = self.given_up = 0
        self.reads: list[tuple[int, int]] = []

    def call(self, layer: int, experts: list[int]) -> None:
        held, keeping = self.held[layer % self.banks], self.keeping[layer % self.banks]
        wanted = [(layer, expert) for expert in experts]
        for key in wanted:
            if key in held:
                continue
            self.loads += 1
            self.reads += [key] if key not in self.on_host else []
            self.on_host.discard(key)
            self.below.went(key)
            if len(held) == self.slots // self.banks:
                gone = keeping.victim(layer, wanted)
                assert gone is not None
                held.remove(gone)
                keeping.went(gone)
                self.give_up(gone, wanted)
            held.add(key)
            keeping.came(key)
        keeping.used(layer, experts)
        self.below.used(layer, experts)

    def give_up(self, key: tuple[int, int], wanted: list[tuple[int, int]]) -> None:
        if not self.host_slots:
            return
        self.below.came(key)
        if len(self.on_host) == self.host_slots:
            going = self.below.victim(key[0], wanted)
            assert going is not None
            self.below.went(going)
            if going == key:
                return
            self.on_host.remove(going)
        self.given_up += 1
        self.on_host.add(key)


@pytest.mark.core(implementation="grouped_mm", tier="checkpoint")
@pytest.mark.emu("random:0", "lazy")
@pytest.mark.parametrize("tier", ["disk", "checkpoint"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_read_is_what_neither_has(
    compute_device: torch.device, tmp_path: Path, implementation: str, tier: str
) -> None:
    model = model_of(implementation)
    plain = copy.deepcopy(model).to(compute_device)
    one_bytes, prompt = expert_bytes(model), PROMPT[:1, :2].to(compute_device)
    routing: list[tuple[int, list[int]]] = []
    for layer, module in enumerate(experts_in(plain)):
        module.register_forward_pre_hook(
            lambda _module, args, layer=layer: routing.append((layer, args[1].unique().tolist()))
        )
    wanted = answer(plain, prompt, tokens=24, sampled=True)
    limit = budget(model, 14)
    model, options = on_disk(model, tier, tmp_path)
    with headrace.offload(model, device=compute_device, device_memory=limit, **options) as handle:
        assert all(block.is_fetched for block in handle._blocks() if block.experts is not None)
        assert host_slots(handle) == EXPERTS - 1
        ours = TwoTiers(14, host_slots(handle))
        for turn in range(3):
            assert_same(answer(model, prompt, tokens=24, sampled=True), wanted)
            for layer, experts in routing:
                ours.call(layer, experts)
            stats = handle.stats()
            assert stats.expert_loads == ours.loads
            assert stats.expert_host_loads == ours.loads - len(ours.reads)
            assert stats.expert_kept_bytes == ours.given_up * one_bytes
            if turn:  # all other weights stay on the device
                assert stats.fetch_bytes == sum(bytes_on_disk(handle, *key) for key in ours.reads)
            assert 0 < len(ours.reads) < sum(len(experts) for _, experts in routing)
            assert ours.loads > len(ours.reads)
            assert stats.device_peak_bytes <= limit
            assert stats.host_peak_bytes <= options["host_memory"]
            ours.begin()
            handle.reset_stats()
        ledger = handle._ledger
    assert ledger.held_bytes(Tier.HOST) < EXPERTS * one_bytes // 2  # other weights


def test_homes_that_change_are_read_anew(compute_device: torch.device, tmp_path: Path) -> None:
    model = model_of("batched_mm")
    plain, limit = copy.deepcopy(model).to(compute_device), budget(model, 14)
    prompt = PROMPT.to(compute_device)
    model, options = on_disk(model, "disk", tmp_path)
    with headrace.offload(model, device=compute_device, device_memory=limit, **options) as handle:
        for turn in range(4):
            before = handle.stats().expert_host_loads
            assert all(map(same, answer(model, prompt, tokens=3), answer(plain, prompt, tokens=3))), turn
            assert handle.stats().expert_host_loads > before
            assert handle.stats().host_peak_bytes <= options["host_memory"]
            for one in (model, plain):
                module = experts_in(one)[turn % LAYERS]
                with torch.no_grad():
                    module.down_proj.mul_(1.5)
                    if turn == 1:
                        module.gate_up_proj.data = module.gate_up_proj.data.flip(0).contiguous()


@pytest.mark.core(implementation="batched_mm")
@pytest.mark.emu("random:0", "lazy")
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_training_beside_frozen_experts(compute_device: torch.device, tmp_path: Path, implementation: str) -> None:
    model = model_of(implementation).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    plain, limit = copy.deepcopy(model).to(compute_device), budget(model, 14)
    wanted = train(plain, PROMPT.to(compute_device), checkpointed=False)
    model, options = on_disk(model, "disk", tmp_path)
    with headrace.offload(model, device=compute_device, device_memory=limit, **options) as handle:
        assert host_slots(handle) > 0
        assert_same(train(model, PROMPT.to(compute_device), checkpointed=False), wanted)
        stats = handle.stats()
        assert handle.stats().expert_host_loads > 0
        assert stats.expert_loads > stats.expert_host_loads
        assert stats.device_peak_bytes <= limit
        assert stats.host_peak_bytes <= options["host_memory"]


def test_where_calls_want_all_experts_whole_layers_rest_on_the_host(tmp_path: Path) -> None:
    model = model_of("grouped_mm").train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    limit = budget(model, 14)
    model, options = on_disk(model, "disk", tmp_path)
    with headrace.offload(model, device="cpu", device_memory=limit, **options) as handle:
        assert host_slots(handle) == 0
        assert any(not block.is_fetched for block in handle._blocks() if block.experts is not None)


def test_a_limit_on_copies(compute_device: torch.device, tmp_path: Path) -> None:
    model = model_of("eager")
    plain, limit = copy.deepcopy(model).to(compute_device), budget(model, 8)
    prompt = PROMPT.to(compute_device)
    model, options = on_disk(model, "disk", tmp_path)
    with headrace.offload(model, device=compute_device, device_memory=limit, **options) as handle:
        for rate in (None, "64MiB", None):
            handle.limit_copies(rate)
            before = handle.stats().expert_host_loads
            assert_same(answer(model, prompt, tokens=4), answer(plain, prompt, tokens=4))
            assert handle.stats().expert_host_loads > before


def test_what_needs_host_memory_gets_it(compute_device: torch.device, tmp_path: Path) -> None:
    model = model_of("eager")
    plain, limit = copy.deepcopy(model).to(compute_device), budget(model, 8)
    one_bytes, prompt = expert_bytes(model), PROMPT.to(compute_device)
    model, options = on_disk(model, "disk", tmp_path)
    with headrace.offload(model, device=compute_device, device_memory=limit, **options) as handle:
        assert_same(answer(model, prompt, tokens=4), answer(plain, prompt, tokens=4))
        held_bytes = handle.stats().host_bytes
        assert handle._tiers.make_room(options["host_memory"] - held_bytes + one_bytes)
        assert handle.stats().host_bytes == held_bytes - EXPERTS * one_bytes
        assert host_slots(handle) == 0
        before = handle.stats()
        assert_same(answer(model, prompt, tokens=4), answer(plain, prompt, tokens=4))
        assert handle.stats().expert_host_loads == before.expert_host_loads
        assert handle.stats().expert_loads > before.expert_loads


@pytest.mark.core(slots=14, implementation="batched_mm", gradients=True)
@pytest.mark.parametrize("slots", [8, 14, 40])
@pytest.mark.parametrize(
    ("implementation", "gradients"), [*((one, False) for one in IMPLEMENTATIONS), ("eager", True), ("batched_mm", True)]
)
def test_calls_that_use_all_read_no_more_than_with_whole_layers_on_the_host(
    compute_device: torch.device, tmp_path: Path, implementation: str, gradients: bool, slots: int
) -> None:
    model = model_of(implementation).requires_grad_(False)
    model.model.embed_tokens.requires_grad_(gradients)
    plain, limit = copy.deepcopy(model).to(compute_device), budget(model, slots)
    text, prompt = torch.randint(64, (4, 48), generator=torch.Generator().manual_seed(0)), PROMPT[:1, :2]
    used: list[int] = []
    for module in experts_in(plain):
        module.register_forward_pre_hook(lambda _module, args: used.append(len(args[1].unique())))
    with torch.no_grad():
        wanted = plain(text.to(compute_device)).logits
    assert all(passes_through(count, EXPERTS) for count in used)
    every = sum(used)
    one = answer(plain, prompt.to(compute_device), tokens=4)
    model, options = on_disk(model, "disk", tmp_path)
    with headrace.offload(model, device=compute_device, device_memory=limit, **options) as handle:
        for turn in range(5):
            if turn == 3:  # what tokens bring is theirs, until others pass through
                assert_same(answer(model, prompt.to(compute_device), tokens=4), one)
                used.clear()
                for own, other in zip(experts_in(model), experts_in(plain), strict=True):
                    own.down_proj.data.mul_(0.5)
                    other.down_proj.data.mul_(0.5)
                with torch.no_grad():
                    wanted = plain(text.to(compute_device)).logits
                every = sum(used)
            handle.reset_stats()
            with torch.set_grad_enabled(gradients):
                assert same(model(text).logits.detach(), wanted)
            stats = handle.stats()
            assert stats.expert_uses == every >= stats.expert_loads
            reads = stats.expert_loads - stats.expert_host_loads
            if turn in (1, 2):
                assert reads <= every - max(used[:LAYERS])
            elif turn == 4:  # tokens may have brought experts that the text does not use
                assert reads <= LAYERS * EXPERTS - host_slots(handle)
            assert stats.device_peak_bytes <= limit
            assert stats.host_peak_bytes <= options["host_memory"]


@pytest.mark.core(implementation="grouped_mm")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_experts_that_are_trained_after_all(compute_device: torch.device, tmp_path: Path, implementation: str) -> None:
    """While they are frozen the host has single experts; a step writes to what they were."""
    model = model_of(implementation)
    plain, limit = copy.deepcopy(model).to(compute_device), budget(model, 40)
    prompt, several = PROMPT[:1, :2].to(compute_device), PROMPT.to(compute_device)
    model, options = on_disk(model, "disk", tmp_path)
    with headrace.offload(model, device=compute_device, device_memory=limit, **options) as handle:
        assert host_slots(handle) > 0
        for one in (model, plain):
            one.requires_grad_()
        for ids in (prompt, several, prompt):
            found: list[list[torch.Tensor]] = []
            for one in (model, plain):
                tokens = answer(one, prompt, tokens=4)
                one(ids, labels=ids).loss.backward()
                gradients = [parameter.grad.detach().cpu().clone() for parameter in one.parameters()]
                torch.optim.AdamW(one.parameters(), lr=0.01).step()
                one.zero_grad()
                found.append([*tokens, *gradients, *answer(one, several, tokens=3)])
            assert all(map(same, *found))
        assert handle.stats().expert_host_loads > 0
        assert handle.stats().device_peak_bytes <= limit


def test_experts_that_are_kept_keep_their_values(tmp_path: Path) -> None:
    model = model_of("grouped_mm")
    plain, limit = copy.deepcopy(model), budget(model, 40)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Holding(TorchFunctionMode):
        """Has the weights that a call computes with: a view of each layer's experts."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            weights = [one for one in args if type(one) is torch.Tensor and one.dim() == 3 and one.shape[0] > 8]
            kept.extend((weight, weight.clone()) for weight in weights)
            return func(*args, **(kwargs or {}))

    model, options = on_disk(model, "disk", tmp_path)
    with headrace.offload(model, device="cpu", device_memory=limit, **options):
        wanted = answer(plain, PROMPT, tokens=2)
        with Holding():
            assert_same(answer(model, PROMPT, tokens=2), wanted)
        assert kept
        assert_same(answer(model, PROMPT, tokens=8), answer(plain, PROMPT, tokens=8))
        assert all(same(weight, values) for weight, values in kept)


@pytest.mark.emu("random:0", "lazy")
def test_it_sleeps_with_the_model(compute_device: torch.device, tmp_path: Path) -> None:
    """It is dropped, since the disk has its experts, and holds as many of them after the next pass as before."""
    model, prompt = model_of("grouped_mm"), PROMPT[:1, :2]
    plain = copy.deepcopy(model).to(compute_device)
    prompt = prompt.to(compute_device)
    wanted = answer(plain, prompt, tokens=8)
    limit = budget(model, 14)
    model, options = on_disk(model, "disk", tmp_path)
    with headrace.offload(model, device=compute_device, device_memory=limit, **options) as handle:
        assert_same(answer(model, prompt, tokens=8), wanted)
        slots = host_slots(handle)
        assert slots == EXPERTS - 1
        handle.sleep(host=True)
        assert host_slots(handle) == 0
        gc.collect()
        assert handle._ledger.held_bytes(Tier.HOST, "weights") <= 2 * 4096  # through which rows of the table pass
        handle.reset_stats()
        assert_same(answer(model, prompt, tokens=8), wanted)
        assert host_slots(handle) == slots
        assert handle.stats().expert_host_loads
