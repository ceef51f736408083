"""Do experts that are modules come when they are called, and only then, with the bits of a plain run?"""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import headrace
from headrace.weights.movement.block import Block
from headrace.weights.movement.executor import Executor
from tests.support import loops
from tests.support.compare import Outcome, assert_same, assert_same_gradients
from tests.support.held import weight_bytes
from tests.support.loops import random_batches

EXPERTS, FEATURES, HIDDEN, LAYERS, ROUTED = 8, 16, 32, 3, 2  # no gaps between weights in a block


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, FEATURES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(tokens)))


class Layer(nn.Module):
    """As in older versions of transformers, and in models that bring their code."""

    def __init__(self, way: str, name: str) -> None:
        super().__init__()
        self.way, self.name = way, name
        self.norm = nn.LayerNorm(FEATURES)
        self.gate = nn.Linear(FEATURES, EXPERTS, bias=False)
        listed = [Expert() for _ in range(EXPERTS)]
        made = nn.ModuleDict({str(key): one for key, one in enumerate(listed)}) if way == "dict" else None
        self.add_module(name, made or nn.ModuleList(listed))
        self.shared = nn.Linear(FEATURES, FEATURES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normed = self.norm(tokens)
        shares, chosen = F.softmax(self.gate(normed), -1).topk(ROUTED)
        found = torch.zeros_like(tokens)
        experts = self.get_submodule(self.name)
        for number in range(EXPERTS) if self.way == "every expert" else chosen.unique().tolist():
            at, place = torch.where(chosen == number)
            expert = experts[str(number)] if self.way == "dict" else experts[number]
            found = found.index_add(0, at, expert(normed[at]) * shares[at, place, None])
        return tokens + found + self.shared(normed)


class Model(nn.Module):
    def __init__(self, way: str = "hit", *, name: str = "experts", checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(way, name) for _ in range(LAYERS))
        self.head = nn.Linear(FEATURES, 4)
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            tokens = checkpoint(layer, tokens, use_reentrant=False) if self.checkpointed else layer(tokens)
        return self.head(tokens)


WAYS = ["hit", "every expert", "dict"]


def model_of(way: str = "hit", **options: Any) -> Model:
    torch.manual_seed(0)
    return Model(way, **options).eval()  # lists are known by their name


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Expert)]


def one_bytes(model: nn.Module) -> int:
    return weight_bytes(experts_of(model)[0])


def budget(model: nn.Module, slots: int) -> int:
    """Room for all other weights, and so many experts."""
    return weight_bytes(model) - weight_bytes(nn.ModuleList(experts_of(model))) + slots * one_bytes(model) + 2**10


def forwards(model: nn.Module, device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with torch.no_grad():
        return [model(torch.randn(count, FEATURES).to(device)).cpu() for count in (5, 1, 1, 3, 1, 7, 1, 1)]


@pytest.mark.core(slots=2)
@pytest.mark.parametrize("slots", [1, 2, 5, 12])
@pytest.mark.parametrize("way", WAYS)
def test_forwards_have_the_bits_of_a_plain_run(compute_device: torch.device, way: str, slots: int) -> None:
    model = model_of(way)
    wanted = forwards(copy.deepcopy(model).to(compute_device), compute_device)
    limit = budget(model, slots)
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
        for _ in range(2):
            assert_same(forwards(model, compute_device), wanted)
        stats = handle.stats()
        assert 0 < stats.expert_loads <= stats.expert_uses
        assert stats.expert_bytes == stats.expert_loads * one_bytes(model)
        assert stats.device_peak_bytes <= limit


@pytest.mark.core(slots=5)
@pytest.mark.parametrize("slots", [2, 5, 12, 23])
@pytest.mark.parametrize("way", WAYS)
def test_what_crosses_the_link_is_what_is_called_and_not_there(way: str, slots: int) -> None:
    model = model_of(way)
    called: list[nn.Module] = []
    for expert in experts_of(model):
        expert.register_forward_pre_hook(lambda module, args: called.append(module) if len(args[0]) else None)
    with headrace.offload(model, device="cpu", device_memory=budget(model, slots)) as handle:
        forwards(model, torch.device("cpu"))  # all other weights have come to stay
        blocks = {id(param.home): block for block in handle.settled_blocks("a look") for param in block.params}
        block_of = {expert: blocks[id(expert.up.weight)] for expert in experts_of(model)}
        called.clear()
        handle.reset_stats()
        loads, torch_seed = 0, torch.manual_seed(3)
        assert torch_seed is not None
        for count in (1, 1, 4, 1):
            there = {expert for expert, block in block_of.items() if block.buffer is not None}
            with torch.no_grad():
                model(torch.randn(count, FEATURES))
            missing = [expert for expert in called if expert not in there]
            assert handle.stats().expert_uses == len(called)
            if slots >= len(set(called)) + len(there):  # else one may have gone and come again
                assert handle.stats().expert_loads - loads == len(missing)
            assert handle.stats().expert_loads - loads >= len(missing)
            assert handle.stats().expert_loads - loads <= len(called)
            loads = handle.stats().expert_loads
            called.clear()
            handle.reset_stats()
            loads = 0
        with torch.no_grad():
            model(torch.randn(1, FEATURES))
        stats = handle.stats()
        assert stats.onload_bytes == stats.expert_bytes == stats.expert_loads * one_bytes(model)


def train(model: nn.Module, device: torch.device) -> Outcome:
    return loops.train(model, random_batches(3, 3, FEATURES, device=device))


@pytest.mark.core(slots=2, checkpointed=True)
@pytest.mark.parametrize("slots", [1, 2, 9])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_full_training(compute_device: torch.device, way: str, checkpointed: bool, slots: int) -> None:
    model = model_of(way, checkpointed=checkpointed)
    wanted = train(copy.deepcopy(model).to(compute_device), compute_device)
    limit = budget(model, slots)
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
        assert_same(train(model, compute_device), wanted)
        stats = handle.stats()
        assert stats.expert_bytes > 0
        assert stats.device_peak_bytes - stats.device_gradient_peak_bytes <= limit


@pytest.mark.core(slots=2)
@pytest.mark.parametrize("slots", [2, 9])
@pytest.mark.parametrize("way", WAYS)
def test_adapters_on_experts(compute_device: torch.device, way: str, slots: int) -> None:
    def adapted() -> Any:
        config = peft.LoraConfig(r=1, target_modules=["up", "down"], init_lora_weights=False)
        return peft.get_peft_model(model_of(way), config).eval()

    model = adapted()
    wanted = train(copy.deepcopy(model).to(compute_device), compute_device)
    frozen = sum(parameter.nbytes for parameter in experts_of(model)[0].parameters() if not parameter.requires_grad)
    limit = budget(model_of(way), slots) + 4 * 2**12 + 2**15
    limit = min(limit, weight_bytes(model) - 2**12)
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
        assert_same(train(model, compute_device), wanted)
        stats = handle.stats()
        assert stats.expert_bytes == stats.expert_loads * frozen > 0
        assert stats.device_peak_bytes <= limit


def test_backward_brings_each_once_and_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    for layer in model.layers:
        layer.get_submodule("experts").requires_grad_(False)
    called: list[nn.Module] = []
    for expert in experts_of(model):
        expert.register_forward_pre_hook(lambda module, _args: called.append(module))
    with headrace.offload(model, device="cpu", device_memory=budget(model, 2)) as handle:
        ahead: list[str] = []
        own = Executor.prefetch

        def prefetch(executor: Executor, block: Block) -> None:
            ahead.append(block.name)
            own(executor, block)

        monkeypatch.setattr(Executor, "prefetch", prefetch)
        model(torch.randn(1, FEATURES)).sum().backward()
        there = 2  # of the last layer, when backward begins
        assert handle.stats().expert_loads == 2 * len(called) - there
        backwards = [name for name in ahead if "experts" in name]
        assert len(backwards) == len(called) - 1  # each but the first of backward


@pytest.mark.core(trained=True)
@pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_from_disk(compute_device: torch.device, tmp_path: Path, way: str, trained: bool) -> None:
    model = model_of(way)
    run = train if trained else forwards
    wanted = run(copy.deepcopy(model).to(compute_device), compute_device)
    options = {"host_memory": weight_bytes(model) * (3 if trained else 1) // 2, "disk": tmp_path}
    with headrace.offload(model, device=compute_device, device_memory=budget(model, 4), **options) as handle:
        assert any(block.expert_key is not None and block.is_fetched for block in handle.settled_blocks("a look"))
        assert_same(run(model, compute_device), wanted)
        assert handle.stats().fetch_bytes > 0
        assert handle.stats().expert_bytes == handle.stats().expert_loads * one_bytes(model)


def test_a_list_of_another_name_is_told_of(compute_device: torch.device) -> None:
    model = model_of(name="branches")
    plain = copy.deepcopy(model).to(compute_device)
    for layer in model.layers:
        assert headrace.experts(layer.get_submodule("branches")) is layer.get_submodule("branches")
    with headrace.offload(model, device=compute_device, device_memory=budget(model, 4)) as handle:
        assert_same(forwards(model, compute_device), forwards(plain, compute_device))
        assert handle.stats().expert_loads > 0
    with pytest.raises(ValueError, match="two or more of one class, and no argument"):
        headrace.experts(nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]))
    with pytest.raises(ValueError, match=r"which argument of Expert\.forward"):
        headrace.experts(Expert())


class Tied(Expert):
    """Uses a weight's values, whatever it is given."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.up.weight.sum() + self.down.weight.mean()


def test_an_idle_expert_that_uses_its_values_comes(compute_device: torch.device) -> None:
    torch.manual_seed(0)
    model = Model("every expert")
    for layer in model.layers:
        layer.experts = nn.ModuleList(Tied() for _ in range(EXPERTS))
    wanted = forwards(copy.deepcopy(model).to(compute_device), compute_device)
    with headrace.offload(model, device=compute_device, device_memory=budget(model, 3)) as handle:
        assert_same(forwards(model, compute_device), wanted)
        assert handle.stats().onloads > 0


def test_all_weights_have_room(compute_device: torch.device) -> None:
    model = model_of()
    with headrace.offload(model, device=compute_device, device_memory=2 * weight_bytes(model)) as handle:
        forwards(model, compute_device)
        assert handle.stats().expert_uses == 0


def test_micro_batches_together() -> None:
    model = model_of()
    plain = copy.deepcopy(model)
    batches = [torch.randn(3, FEATURES) for _ in range(3)]
    for batch in batches:
        (plain(batch).square().mean() / 3).backward()
    with headrace.offload(model, device="cpu", device_memory=budget(model, 4)) as handle:
        handle.forward_backward(batches, lambda batch: model(batch).square().mean() / 3)
        assert_same_gradients(model, plain, some_missing=True)


class Borrowing(nn.Module):
    """Computes with the weights of experts, but calls none."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(FEATURES, FEATURES)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(EXPERTS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = self.own(tokens)
        for expert in self.experts:
            tokens = tokens + F.linear(tokens, expert.weight, expert.bias)
        return tokens


@torch.no_grad()
def test_writes_are_seen_also_where_all_experts_stay(compute_device: torch.device) -> None:
    """There, nothing is visited. Others had the room when experts were told apart, and have given it back since."""
    torch.manual_seed(0)
    model = nn.Sequential(Borrowing(), Borrowing()).eval()
    plain = copy.deepcopy(model).to(compute_device)
    tokens = torch.randn(4, FEATURES).to(compute_device)
    with headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) * 7 // 8) as handle:
        handle._engine._take_off_budget("what others gave back", -weight_bytes(model))
        stayed = 0
        for _ in range(8):
            for run in (model, plain):
                torch._foreach_mul_([*run[0].experts.parameters()], 0.9)
            for _ in range(6):
                assert torch.equal(model(tokens), plain(tokens))
            stayed += handle._executor.everything_is_here
        assert stayed
