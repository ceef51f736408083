"""Do experts of a user's own module come one by one, bit for bit, once headrace.experts() was told of it?"""

import contextlib
import copy
import gc
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import headrace
from headrace.weights.movement.block import Block
from headrace.weights.movement.slices import Slices
from tests.support.compare import Outcome, assert_same, assert_same_gradients, same
from tests.support.held import weight_bytes
from tests.support.interrupts import interrupted_at
from tests.support.loops import adamw, random_batches, steps, trained_parameters
from tests.support.models import Stack

EXPERTS, FEATURES, HIDDEN = 8, 16, 24


class Experts(nn.Module):
    """Stacked weights, taken in ways that people write."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.kept: list[torch.Tensor] = []
        self.up = nn.Parameter(torch.randn(EXPERTS, FEATURES, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FEATURES) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, FEATURES))
        self.scale = nn.Parameter(torch.rand(EXPERTS))

    def forward(self, tokens: torch.Tensor, *, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(tokens)
        if self.way == "gather":
            hidden = torch.einsum("tf,tkfh->tkh", tokens, self.up[chosen]).relu()
            given = torch.einsum("tkh,tkhf->tkf", hidden, self.down[chosen]) + self.bias[chosen]
            return (given * (shares * self.scale[chosen])[:, :, None]).sum(1)
        if self.way == "all at once":
            every = torch.einsum("eth,ehf->etf", torch.einsum("tf,efh->eth", tokens, self.up).relu(), self.down)
            for expert in range(EXPERTS):
                share = (shares * (chosen == expert)).sum(1, keepdim=True) * self.scale[expert]
                found = found + (every[expert] + self.bias[expert]) * share
            return found
        if not len(tokens):
            return found
        if self.way == "mean":
            tokens = tokens * self.scale.mean()
        order: dict[str, Any] = {"loop": chosen.unique().tolist(), "downwards": chosen.unique().tolist()[::-1]}
        order["numpy"] = chosen.unique().cpu().numpy()
        if self.way in ("writes", "keeps", "mean"):
            order[self.way] = order["loop"]
            self.kept = []
        if self.way == "one ahead":
            hit = order["loop"]
            ahead = [(self.up[hit[0]], self.down[hit[0]])]
            order[self.way] = hit
        for number, expert in enumerate(order.get(self.way, range(len(self.up)))):
            if self.way == "one ahead":  # the next one's weights are taken before it computes with these
                up = down = None
                following = hit[min(number + 1, len(hit) - 1)]
                ahead.append((self.up[following], self.down[following]))
                up, down = ahead.pop(0)
            else:
                up, down = self.up[expert], self.down[expert]
            if self.way == "writes":
                with torch.no_grad():
                    up.mul_(1.5)
                    self.bias[expert, 1:3].add_(0.5)
            if self.way == "keeps":
                self.kept.append(up)
            at, place = torch.where(chosen == expert)
            given = (tokens[at] @ up).relu() @ down + self.bias[expert, :]
            found = found.index_add(0, at, given * (shares[at, place] * self.scale[expert])[:, None])
        return found


class Layer(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, EXPERTS)
        self.experts = headrace.experts(Experts(way), argument="chosen")
        self.last = nn.Linear(FEATURES, FEATURES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        shares, chosen = F.softmax(self.router(tokens), -1).topk(2)
        return self.last(tokens + self.experts(tokens, shares=shares, chosen=chosen))


def model_of(way: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(way) for _ in range(3)))


def one_bytes() -> int:
    return sum(parameter[0].nbytes for parameter in Experts("loop").parameters())


def budget(model: nn.Sequential, slots: int) -> int:
    experts = nn.ModuleList(layer.experts for layer in model)
    one = 4 * 2 * FEATURES * HIDDEN + 2 * 256  # the bias and the scale take 256 bytes each
    return weight_bytes(model) - weight_bytes(experts) + slots * one + 2**10


def forwards(model: nn.Module, device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with torch.no_grad():
        return [model(torch.randn(count, FEATURES).to(device)).cpu() for count in (7, 1, 0, 1, 3, 1, 9)]


WAYS = ["loop", "downwards", "every expert", "gather", "one ahead", "numpy"]


@pytest.mark.core(slots=3)
@pytest.mark.parametrize("slots", [2, 3, 5, 12])
@pytest.mark.parametrize("way", WAYS)
def test_forwards_have_the_bits_of_a_plain_run(compute_device: torch.device, way: str, slots: int) -> None:
    model = model_of(way)
    wanted = forwards(copy.deepcopy(model).to(compute_device), compute_device)
    limit = budget(model, slots)
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
        for _ in range(2):
            assert_same(forwards(model, compute_device), wanted)
        stats = handle.stats()
        assert stats.expert_bytes == stats.expert_loads * one_bytes() > 0
        assert stats.device_peak_bytes <= limit
        blocks = handle.settled_blocks("a look")
        assert all(block.presence.name == "ABSENT" for block in blocks if block.experts is not None)


@pytest.mark.emu("random:0", alignment_canary=256)
def test_experts_lie_where_kernels_find_them_as_in_a_plain_run(emu_device: ModuleType) -> None:
    """At multiples of 256 bytes in each slot, whatever small tensors an expert has beside its matrices."""
    model, device = model_of("loop"), torch.device("emu:1")
    wanted = forwards(copy.deepcopy(model).to(device), device)
    with headrace.offload(model, device=device, device_memory=budget(model, 5)) as handle:
        assert_same(forwards(model, device), wanted)
        assert handle.stats().expert_loads > 0


@pytest.mark.parametrize("way", ["loop", "gather"])
def test_what_crosses_the_link_are_the_chosen_experts(way: str) -> None:
    model = model_of(way)
    chosen: list[int] = []
    for layer in model:
        layer.experts.register_forward_pre_hook(
            lambda _module, _args, kwargs: chosen.append(len(kwargs["chosen"].unique())), with_kwargs=True
        )
    with headrace.offload(model, device="cpu", device_memory=budget(model, 8)) as handle, torch.no_grad():
        model(torch.randn(1, FEATURES))
        assert handle.stats().expert_bytes == sum(chosen) * one_bytes() == 6 * one_bytes()
        assert handle.stats().onload_bytes == 6 * one_bytes() + sum(
            block.nbytes for block in handle.settled_blocks("a look") if block.experts is None and block.index >= 0
        )


def train(model: nn.Module, device: torch.device) -> Outcome:
    losses = steps(model, adamw(trained_parameters(model)), random_batches(3, 4, FEATURES, device=device))
    return Outcome(losses).read(model)


@pytest.mark.core(frozen=True)
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_training(compute_device: torch.device, way: str, frozen: bool) -> None:
    model = model_of(way)
    for layer in model:
        layer.experts.requires_grad_(not frozen)
    wanted = train(copy.deepcopy(model).to(compute_device), compute_device)
    limit = budget(model, 9)
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
        assert_same(train(model, compute_device), wanted)
        assert handle.stats().expert_loads > 0
        assert handle.stats().expert_bytes == handle.stats().expert_loads * one_bytes()
        assert handle.stats().device_peak_bytes <= limit


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_micro_batches_together_of_which_some_use_most_experts(
    compute_device: torch.device, checkpointing: str
) -> None:
    """Experts come whole for these, and one by one for the others: gradients are added up in the loop's order."""
    torch.manual_seed(1)
    of = [100 * torch.randn(count, FEATURES).to(compute_device) for count in (1, 9, 1, 9, 2)]
    model = Stack(model_of("loop"), checkpointing=checkpointing)
    plain = copy.deepcopy(model).to(compute_device)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    limit = budget(model_of("loop"), 12)
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
        for _ in range(2):
            handle.forward_backward(of, lambda batch: loss(model, batch))
            for batch in of:
                loss(plain, batch).backward()
            assert_same_gradients(model, plain)
        stats = handle.stats()
        assert stats.micro_batches_together == 2 * len(of)
        assert stats.expert_bytes == stats.expert_loads * one_bytes() > 0
        assert stats.device_peak_bytes <= limit


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_checkpoints_around_experts_of_which_more_is_used(compute_device: torch.device, checkpointing: str) -> None:
    """The first call finds out, and computes again as it did; later ones have all experts from the start.

    What is trained is known when a call begins.
    """
    model = Stack(model_of("mean"), checkpointing=checkpointing).requires_grad_(False)
    plain = copy.deepcopy(model).to(compute_device)
    limit = budget(model_of("mean"), 10)
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
        for one in (model, plain):
            one.requires_grad_()
        for batch in random_batches(4, 1, FEATURES, device=compute_device):
            outputs = []
            for one in (model, plain):
                output = one(batch.requires_grad_())
                output.square().mean().backward()
                outputs.append(output.detach())
            assert_same(*outputs)
            assert_same_gradients(model, plain)
        stats = handle.stats()
        assert stats.onload_bytes > 0
        assert stats.device_peak_bytes <= limit


@pytest.mark.core(way="gather")
@pytest.mark.parametrize("way", ["gather", "loop"])
def test_a_checkpoint_takes_experts_as_its_call_did(
    compute_device: torch.device, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A plan has loaded all experts of a block; in forward they cannot be evicted, as their copies are under way. So
    they come whole in the call, and computing it again must not take them one by one, which saves something else.
    """
    model = Stack(model_of(way), checkpointing="non-reentrant")
    plain = copy.deepcopy(model).to(compute_device)
    under_way: list[Block] = []
    is_free: Any = Block.is_free
    monkeypatch.setattr(Block, "is_free", property(lambda block: block not in under_way and is_free.fget(block)))
    tokens = torch.randn(1, FEATURES).to(compute_device)
    with headrace.offload(model, device=compute_device, device_memory=budget(model_of(way), EXPERTS + 4)) as handle:
        block = next(block for block in handle.settled_blocks("a look") if block.experts is not None)
        handle._executor.prefetch(block)
        under_way.append(block)
        output = model(tokens)
        under_way.clear()
        output.square().mean().backward()
        plain(tokens).square().mean().backward()
        assert_same_gradients(model, plain)
        assert handle.stats().expert_loads == 2 * 2  # two in two layers, which stay until they are needed again


@pytest.mark.core(checkpointing="none")
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_a_loss_that_is_kept_holds_no_later_call_to_its_way(checkpointing: str) -> None:
    """Once a call has needed all of a weight, the next step brings all at once, although `loss` is still there."""
    model = Stack(model_of("mean"), checkpointing=checkpointing)
    with headrace.offload(model, device="cpu", device_memory=budget(model_of("mean"), 10)) as handle:
        loads = []
        for batch in random_batches(4, 1, FEATURES):
            loss = model(batch).square().mean()
            loss.backward()
            loads.append(handle.stats().expert_loads)
        assert loss.grad_fn is not None
        assert loads[0] > 0
        assert loads == 4 * loads[:1]


def test_a_loss_that_is_kept_brings_no_later_call_all_experts() -> None:
    """All were there in the first step; in the second one they are not, and only those that are used come."""
    model = model_of("loop")
    for layer in model:
        layer.experts.requires_grad_(False)
    with headrace.offload(model, device="cpu", device_memory=budget(model, EXPERTS + 4)) as handle:
        block = next(block for block in handle.settled_blocks("a look") if block.experts is not None)
        handle._executor.prefetch(block)
        tokens = torch.randn(1, FEATURES)
        loss = model(tokens).square().mean()
        first = handle.stats().expert_uses
        handle._executor.evict(block)
        later = model(tokens).square().mean()
        assert loss.grad_fn is not None
        assert later.grad_fn is not None
        assert first == 2 * 2  # two in two layers
        assert handle.stats().expert_uses == first + 3 * 2


@pytest.mark.parametrize("way", ["gather", "loop"])
def test_selective_checkpoints_around_frozen_experts_that_are_there_in_forward_alone(way: str) -> None:
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
    contexts = partial(create_selective_checkpoint_contexts, products)
    model = model_of(way)
    for layer in model:
        layer.experts.requires_grad_(False)
    plain = copy.deepcopy(model)
    with headrace.offload(model, device="cpu", device_memory=budget(model, EXPERTS + 4)) as handle:
        block = next(block for block in handle.settled_blocks("a look") if block.experts is not None)
        handle._executor.prefetch(block)
        for one in (model, plain):
            tokens = torch.ones(1, FEATURES)
            for layer in one:
                tokens = checkpoint(layer, tokens, use_reentrant=False, context_fn=contexts)
            handle._executor.evict(block)
            tokens.square().mean().backward()
        assert handle.stats().expert_loads > 0
        assert_same(*([parameter.grad for parameter in trained_parameters(one)] for one in (model, plain)))


@pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O
@pytest.mark.core(every=499)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("every", [499, 197])
@pytest.mark.parametrize("disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("trains", [False, True])
def test_ctrl_c_at_any_moment_of_a_pass(
    compute_device: torch.device, tmp_path: Path, trains: bool, disk: bool, every: int
) -> None:
    """The passes after it have their bits and their budget."""
    model = nn.Sequential(*(Layer(way) for way in ("mean", "loop", "gather"))).requires_grad_(trains)
    plain = copy.deepcopy(model).to(compute_device)
    tokens = torch.ones(2, FEATURES).to(compute_device)
    limit = budget(model, 10)

    def a_pass(one: nn.Module) -> None:
        loss = one(tokens).square().sum()
        if trains:
            loss.backward()

    package = str(Path(headrace.__file__).parent)
    tiers: dict[str, Any] = {"disk": tmp_path, "host_memory": 150_000} if disk else {}
    with headrace.offload(model, device=compute_device, device_memory=limit, **tiers) as handle:
        for _ in range(3):
            a_pass(model)
        model.zero_grad()
        a_pass(plain)
        with torch.no_grad():
            wanted = plain(tokens).cpu()
        moment, struck = 1, 0
        while interrupted_at(moment, partial(a_pass, model), package):
            moment, struck = moment + every, struck + 1
            model.zero_grad()
            gc.collect()  # a graph that was broken off may keep weights, which count on the CPU
            handle.reset_stats()
            a_pass(model)
            if trains:
                assert_same_gradients(model, plain)
            with torch.no_grad():
                assert_same(model(tokens).cpu(), wanted)
            assert handle.stats().device_peak_bytes <= limit
            model.zero_grad()
        assert struck > 5
        assert handle.stats().expert_bytes > 0


@pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O
def test_ctrl_c_just_after_an_expert_was_asked_for_from_disk(
    compute_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives before its memory is given to something else."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(way) for way in ("mean", "loop", "gather")))
    plain = copy.deepcopy(model).to(compute_device)
    tokens = torch.ones(2, FEATURES).to(compute_device)
    plain(tokens).square().sum().backward()
    fetch = Slices._fetch
    with headrace.offload(
        model, device=compute_device, device_memory=budget(model, 10), host_memory=40_000, disk=tmp_path
    ) as handle:
        for last in range(5):
            left = [last]

            def interrupted(*arguments: Any, left: list[int] = left) -> Any:
                found = fetch(*arguments)
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
                return found

            monkeypatch.setattr(Slices, "_fetch", interrupted)
            with contextlib.suppress(KeyboardInterrupt):  # no frame is kept
                model(tokens).square().sum().backward()
            model.zero_grad()
            model(tokens).square().sum().backward()
            assert_same_gradients(model, plain)
            model.zero_grad()
        assert handle.stats().expert_loads > 0
        assert handle.stats().device_peak_bytes <= budget(model, 10)


def test_training_all_of_a_weight_after_single_experts(compute_device: torch.device) -> None:
    """One call takes single experts, and another one of the same module all of the weight, before one backward."""
    model = model_of("loop")
    plain = copy.deepcopy(model).to(compute_device)
    found = []
    limit = budget(model, 12)
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
        for one in (model, plain):
            for ways in (("loop", "loop"), ("loop", "all at once", "loop")):
                torch.manual_seed(3)  # the same experts are chosen
                loss = torch.zeros((), device=compute_device)
                for way in ways:
                    for layer in one:
                        layer.experts.way = way
                    tokens = torch.randn(1, FEATURES) * len(ways)
                    loss = loss + one(tokens.to(compute_device)).square().mean()
                loss.backward()  # the second one adds to the first one's
            found.append([parameter.grad.cpu() for parameter in one.parameters()])
        assert handle.stats().expert_loads > 0
        assert handle.stats().device_peak_bytes <= limit
    assert all(map(same, *found))


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O
@pytest.mark.parametrize("way", WAYS)
def test_from_disk(compute_device: torch.device, tmp_path: Path, way: str) -> None:
    model = model_of(way)
    wanted = forwards(copy.deepcopy(model).to(compute_device), compute_device)
    host = weight_bytes(model) // 2
    with headrace.offload(
        model, device=compute_device, device_memory=budget(model, 5), host_memory=host, disk=tmp_path
    ) as handle:
        assert any(block.experts is not None and block.is_fetched for block in handle.settled_blocks("a look"))
        assert_same(forwards(model, compute_device), wanted)
        assert handle.stats().expert_bytes == handle.stats().expert_loads * one_bytes() > 0


def test_other_uses_bring_all_experts_and_run_once(compute_device: torch.device) -> None:
    model = model_of("all at once")
    wanted = forwards(copy.deepcopy(model).to(compute_device), compute_device)
    calls: list[int] = []
    model[1].experts.register_forward_hook(lambda *_: calls.append(1))
    limit = budget(model, 9)
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
        assert_same(forwards(model, compute_device), wanted)
        assert len(calls) == len(wanted)
        assert handle.stats().device_peak_bytes <= limit


@pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O
@pytest.mark.parametrize("disk", [False, True])
def test_what_is_written_to_experts_is_kept(compute_device: torch.device, tmp_path: Path, disk: bool) -> None:
    model = model_of("writes")
    plain = copy.deepcopy(model).to(compute_device)
    wanted = forwards(plain, compute_device)
    limit = budget(model, 9)
    options: dict[str, Any] = {"host_memory": weight_bytes(model) * 2 // 3, "disk": tmp_path} if disk else {}
    with headrace.offload(model, device=compute_device, device_memory=limit, **options) as handle:
        assert_same(forwards(model, compute_device), wanted)
        assert handle.stats().expert_loads > 0
        assert handle.stats().device_peak_bytes <= limit
        with torch.no_grad():
            assert_same(model.parameters(), plain.parameters())


@pytest.mark.parametrize("slots", [8, 12])
def test_experts_that_are_kept_beyond_a_call_are_copies(compute_device: torch.device, slots: int) -> None:
    model = model_of("keeps")
    plain = copy.deepcopy(model).to(compute_device)
    wanted = forwards(plain, compute_device)
    limit = budget(model, slots)
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
        for _ in range(2):
            assert_same(forwards(model, compute_device), wanted)
            for layer, other in zip(model, plain, strict=True):
                assert_same(layer.experts.kept, other.experts.kept)
        assert 0 < handle.stats().expert_loads < handle.stats().expert_uses
        assert handle.stats().device_peak_bytes <= limit


def test_numbers_of_no_expert_are_left_out(compute_device: torch.device) -> None:
    model = nn.Sequential(*(headrace.experts(Experts("loop"), argument="chosen") for _ in range(3)))
    plain = copy.deepcopy(model).to(compute_device)
    tokens, shares = torch.randn(2, FEATURES).to(compute_device), torch.rand(2, 2).to(compute_device)
    chosen = torch.tensor([[3, -1], [6, 3]])
    for module in (*model, *plain):
        module.up.requires_grad_(False)
    with headrace.offload(model, device=compute_device, device_memory=4 * 2**12) as handle, torch.no_grad():
        for one, other in zip(model, plain, strict=True):
            ours = chosen.to(compute_device)
            assert same(
                one(tokens, chosen=ours.clamp(min=3), shares=shares).cpu(),
                other(tokens, chosen=ours.clamp(min=3), shares=shares).cpu(),
            )
        assert handle.stats().expert_loads == 6
        with pytest.raises(IndexError, match=r"out of bounds|out of range"):
            model[0](tokens, chosen=chosen.clamp(min=3) + EXPERTS, shares=shares)


def test_what_cannot_be() -> None:
    with pytest.raises(TypeError, match="is a int"):
        headrace.experts(3, argument="chosen")  # type: ignore[type-var]
    with pytest.raises(ValueError, match="has no argument 'index'; it has 'tokens', 'chosen', 'shares'"):
        headrace.experts(Experts("loop"), argument="index")
    odd = nn.Linear(4, 3)
    odd.bias = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"do not all have the experts as first dimension: 'weight' \(3, 4\), 'bias'"):
        headrace.experts(odd, argument="input")
    with pytest.raises(ValueError, match="no parameters"):
        headrace.experts(nn.ReLU(), argument="input")
    model = model_of("loop")
    with (
        headrace.offload(model, device="cpu", device_memory="1MiB"),
        pytest.raises(headrace.StateError, match=r"before headrace\.offload"),
    ):
        headrace.experts(model[0].experts, argument="chosen")


def test_a_copy_is_marked_too() -> None:
    model = copy.deepcopy(model_of("loop"))
    with headrace.offload(model, device="cpu", device_memory=budget(model, 4)) as handle:
        forwards(model, torch.device("cpu"))
        assert handle.stats().expert_loads > 0
    assert same(forwards(model, torch.device("cpu"))[0], forwards(model_of("loop"), torch.device("cpu"))[0])


def test_a_nested_backward_adds_up_what_is_its_own(compute_device: torch.device) -> None:
    """Several parts of the outer one are there already, and autograd adds these up by themselves."""
    torch.manual_seed(0)
    layer, other = Experts("loop"), nn.Linear(FEATURES, FEATURES)
    model = nn.Sequential(headrace.experts(layer, argument="chosen"), other)
    plain = copy.deepcopy(model)

    def losses(model: nn.Module, device: torch.device | str) -> torch.Tensor:
        total = torch.zeros((), device=device)
        for seed in range(3):
            tokens = torch.randn(6, FEATURES, generator=torch.Generator().manual_seed(seed)).to(device)
            shares, chosen = torch.ones(6, 2, device=device), torch.tensor([[0, 1]] * 6, device=device)
            call = partial(model.get_submodule("0"), chosen=chosen, shares=shares)
            hidden = checkpoint(call, tokens.requires_grad_(), use_reentrant=True)
            total = total + call(model.get_submodule("1")(hidden)).square().mean()
        return total

    class Whole(nn.Module):
        def __init__(self, layers: nn.Sequential) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, device: torch.device | str) -> torch.Tensor:
            return losses(self.layers, device)

    whole = Whole(model)
    with headrace.offload(whole, device=compute_device, device_memory=weight_bytes(model) // 2) as handle:
        whole(compute_device).backward()
        assert handle.stats().expert_loads > 0
        losses(plain, "cpu").backward()
        assert_same_gradients(model, plain)
