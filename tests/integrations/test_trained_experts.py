"""Are stacked experts trained one by one as in a plain run, and do only those cross the link that tokens went to?"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from tests.integrations import test_experts as alone
from tests.integrations.test_experts import ARCHITECTURES, IMPLEMENTATIONS, budget, expert_bytes, experts_in
from tests.support.compare import assert_same, same
from tests.support.held import weight_bytes

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
FEW = torch.tensor([[5, 9]])  # of 16 experts, tokens go to half at the most
NEAR = torch.tensor([[5, 7]])  # to mostly the same ones
MANY = torch.tensor([[5, 9, 33, 2, 60, 41, 17, 8, 50, 12, 7, 29], [1, 3, 4, 6, 10, 11, 13, 14, 15, 16, 18, 19]])


def model_of(name: str, implementation: str = "eager", monkeypatch: Any = None) -> Any:
    """As there, with 16 experts."""
    more = {key: 16 for key in ARCHITECTURES[name] if key in COUNTS}
    monkeypatch.setitem(ARCHITECTURES, name, {**ARCHITECTURES[name], **more})
    return alone.model_of(name, implementation).train()


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return lambda name="Qwen3Moe", implementation="eager": model_of(name, implementation, monkeypatch)


def count_hits(model: nn.Module) -> list[int]:
    """How many experts the calls of each module use, from now on."""
    hits: list[int] = []
    for module in experts_in(model):
        module.register_forward_pre_hook(lambda _module, args: hits.append(len(args[1].unique())))
    return hits


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def train(
    model: Any,
    batches: list[list[torch.Tensor]],
    optimizer_of: Callable[..., Any] = adamw,
    *,
    backward: Callable[[Any, list[torch.Tensor]], None] | None = None,
) -> list[torch.Tensor]:
    """Gradients of each step, then weights and the optimizer's state; a step has some micro-batches."""
    torch.manual_seed(7)
    optimizer = optimizer_of([parameter for parameter in model.parameters() if parameter.requires_grad])
    found: list[torch.Tensor] = []
    for step in batches:
        if backward is None:
            for ids in step:
                model(ids, labels=ids).loss.backward()
        else:
            backward(model, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found += [parameter.grad.detach().cpu().clone() for parameter in model.parameters() if parameter.requires_grad]
        optimizer.step()
        optimizer.zero_grad()
    found += [parameter.detach().cpu().clone() for parameter in model.parameters()]
    states = (value for state in optimizer.state.values() for value in state.values())
    return [*found, *(value.cpu() for value in states if isinstance(value, torch.Tensor))]


def on(device: torch.device, *steps: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [[ids.to(device) for ids in step] for step in steps]


def check(
    model: Any,
    device: torch.device,
    steps: list[list[torch.Tensor]],
    slots: int,
    *,
    backward: Callable[[Any, list[torch.Tensor]], None] | None = None,
    **options: Any,
) -> Any:
    """Trains it offloaded, and plain: all is equal. What was moved, as the handle says."""
    plain = copy.deepcopy(model).to(device)
    wanted = train(plain, steps, backward=backward)
    limit = budget(model, slots)
    with headrace.offload(model, device=device, device_memory=limit, **options) as handle:
        found = train(model, steps, backward=backward)
        stats = handle.stats()
    assert len(found) == len(wanted)
    assert_same(found, wanted)
    assert stats.expert_bytes == stats.expert_loads * expert_bytes(model)
    assert stats.device_peak_bytes <= limit
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers]
    assert stats.device_gradient_peak_bytes <= 2 * max(layers) + model.lm_head.weight.nbytes
    return stats


@pytest.mark.core(name=["Qwen3Moe", "DeepseekV3"], implementation="grouped_mm")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_three_steps(build: Any, name: str, implementation: str) -> None:
    device = torch.device("cpu")
    for slots in (8, 20):
        model = build(name, implementation)
        hits = count_hits(model)
        stats = check(model, device, on(device, *([FEW.roll(turn, 1)] for turn in range(3))), slots)
        assert hits
        assert max(hits) <= 8
        assert 0 < stats.expert_loads <= stats.expert_uses


@pytest.mark.core(implementation="grouped_mm", name="GptOss")
@pytest.mark.emu("random:0", "lazy")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_on_an_accelerator(compute_device: torch.device, build: Any, name: str, implementation: str) -> None:
    for slots in (8, 20):
        model = build(name, implementation)
        stats = check(model, compute_device, on(compute_device, [FEW], [FEW.flip(1), FEW], [FEW]), slots)
        assert stats.expert_loads > 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_crosses_the_link(compute_device: torch.device, build: Any, implementation: str) -> None:
    """One slice for each expert that is used and not there; one for each gradient."""
    model = build("Qwen3Moe", implementation)
    routing: list[tuple[int, list[int]]] = []
    for layer, module in enumerate(experts_in(model)):
        module.register_forward_pre_hook(
            lambda _module, args, layer=layer: routing.append((layer, args[1].unique().tolist()))
        )
    experts = [parameter for module in experts_in(model) for parameter in module.parameters()]
    others = [parameter for parameter in model.parameters() if all(parameter is not one for one in experts)]
    ids = FEW.to(compute_device)
    with headrace.offload(model, device=compute_device, device_memory=budget(model, 40)) as handle:
        slots: dict[tuple[int, int], int] = {}  # of two banks: the layer whose expert each holds
        for turn in range(3):
            handle.reset_stats()
            routing.clear()
            model(ids, labels=ids).loss.backward()
            stats = handle.stats()
            assert len(routing) == len(experts_in(model))
            used = sum(len(experts) for _, experts in routing)
            loads = 0
            for layer, numbers in [*routing, *(routing[::-1] if implementation == "grouped_mm" else ())]:
                for number in numbers:
                    loads += slots.get((layer % 2, number)) != layer
                    slots[layer % 2, number] = layer
            if implementation == "eager":  # any slot will do, and all have one
                loads = 0 if turn else used
            assert stats.expert_loads == loads
            assert stats.expert_bytes == loads * expert_bytes(model)
            assert stats.offload_bytes == used * expert_bytes(model) + sum(one.nbytes for one in others)
            for module in experts_in(model):
                gradient = module.down_proj.grad
                assert torch.count_nonzero(gradient.flatten(1).any(1)) < len(gradient)


def test_a_batch_that_uses_most_experts_brings_whole_blocks(compute_device: torch.device, build: Any) -> None:
    model = build()
    stats = check(model, compute_device, on(compute_device, [MANY], [MANY.flip(0)]), 40)
    assert stats.expert_loads == 0
    assert stats.offload_bytes >= 2 * weight_bytes(model) - stats.offload_bytes // 10


@pytest.mark.core(implementation="batched_mm")
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_where_a_layer_has_no_room_experts_come_in_turns(
    compute_device: torch.device, build: Any, implementation: str
) -> None:
    model = build("Qwen3Moe", implementation)
    stats = check(model, compute_device, on(compute_device, [MANY], [MANY.flip(0), FEW]), 6)
    assert stats.expert_loads > 0
    assert stats.device_peak_bytes < sum(parameter.nbytes for parameter in experts_in(model)[0].parameters())


@pytest.mark.core(implementation="grouped_mm")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_few_and_many_in_one_pass(compute_device: torch.device, build: Any, implementation: str) -> None:
    """Parts and whole gradients of one weight meet, and are added up in autograd's order."""

    def both(model: Any, step: list[torch.Tensor]) -> None:
        model(step[-1], labels=step[-1]).loss.backward()  # to which those of the others are added
        sum(model(ids, labels=ids).loss for ids in step).backward()

    steps = on(compute_device, [FEW, MANY, FEW.flip(1)], [MANY, FEW], [FEW, FEW.flip(1)])
    stats = check(build("Qwen3Moe", implementation), compute_device, steps, 40, backward=both)
    assert stats.expert_loads > 0


@pytest.mark.core(implementation="grouped_mm", reentrant=False)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_checkpointed(compute_device: torch.device, build: Any, implementation: str, reentrant: bool) -> None:
    for slots in (8, 40):
        model = build("GptOss", implementation)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        steps = on(compute_device, [FEW], [MANY], [FEW.flip(1), FEW])
        stats = check(model, compute_device, steps, 40 if implementation == "grouped_mm" else slots)
        assert stats.expert_loads > 0


@pytest.mark.core(implementation="grouped_mm", name="Olmoe")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["Olmoe", "GraniteMoe"])
def test_layers_that_use_about_half(compute_device: torch.device, name: str, implementation: str) -> None:
    """From step to step they go one way or the other, and plans bring blocks of which few experts are used."""
    model = alone.model_of(name, implementation).train()
    model.activation_checkpointing_enable()
    hits = count_hits(model)
    check(model, compute_device, on(compute_device, *([FEW.roll(step, 1) + step] for step in range(6))), 12)
    assert min(hits) <= 4 < max(hits)


@pytest.mark.core(implementation="grouped_mm")
@pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_on_disk(compute_device: torch.device, tmp_path: Path, build: Any, implementation: str) -> None:
    model = build("GptOss", implementation)
    options = {"disk": tmp_path, "host_memory": weight_bytes(model)}
    steps = on(compute_device, [FEW], [FEW.flip(1), FEW], [FEW])
    stats = check(model, compute_device, steps, 20, **options)
    assert stats.expert_loads > 0
    assert stats.fetch_bytes > 0
    assert stats.spill_bytes > 0


@pytest.mark.core(implementation="grouped_mm", what="router")
@pytest.mark.parametrize("what", ["router", "one weight", "a layer"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_partly_frozen(compute_device: torch.device, build: Any, implementation: str, what: str) -> None:
    model = build("Qwen3Moe", implementation)
    for layer in model.model.layers:
        if what == "router":
            layer.mlp.gate.requires_grad_(False)
        elif what == "one weight":
            layer.mlp.experts.gate_up_proj.requires_grad_(False)
    if what == "a layer":
        model.model.layers[1].requires_grad_(False)
    stats = check(model, compute_device, on(compute_device, [FEW], [FEW.flip(1)]), 20)
    assert stats.expert_loads > 0


@pytest.mark.core(overlap="forward")
@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_host_optimizers(compute_device: torch.device, build: Any, overlap: str) -> None:
    """They update what a plain run updates: weights of experts that no token went to move as well."""
    model = build()
    whole = copy.deepcopy(model)
    before = [module.down_proj.detach().clone() for module in experts_in(model)]
    found = []
    for one, limit in ((model, budget(model, 20)), (whole, 2 * weight_bytes(model))):
        with headrace.offload(one, device=compute_device, device_memory=limit) as handle:
            optimizer = headrace.optim.AdamW(one.parameters(), lr=0.01, weight_decay=0.1, overlap=overlap)
            for step in range(4):
                ids = FEW.roll(step, 1).to(compute_device)
                one(ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert (handle.stats().expert_loads > 0) == (one is model)
            found.append([parameter.detach().clone() for parameter in one.parameters()])
    assert all(map(same, *found))
    for module, weight in zip(experts_in(model), before, strict=True):
        assert (module.down_proj != weight).flatten(1).any(1).all()


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_host_optimizers_of_weights_on_disk(
    compute_device: torch.device, tmp_path: Path, build: Any, tier: str
) -> None:
    model = build()
    whole = copy.deepcopy(model)
    nbytes = weight_bytes(model)
    on_disk = {"disk": tmp_path / "weights", "host_memory": (4 if tier == "host" else 1) * nbytes}
    state = {"tier": "disk", "disk": tmp_path / "state"} if tier == "disk" else {}
    found = []
    for one, limit, options in ((model, budget(model, 20), on_disk), (whole, 2 * nbytes, {})):
        with headrace.offload(one, device=compute_device, device_memory=limit, **options) as handle:
            optimizer = headrace.optim.AdamW(one.parameters(), lr=0.01, **(state if options else {}))
            for step in ([FEW], [MANY], [FEW, FEW.flip(1)], [FEW]):
                for ids in step:
                    one(ids.to(compute_device), labels=ids.to(compute_device)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert (handle.stats().fetch_bytes > 0) == (one is model and tier == "disk")
            assert (handle.stats().expert_loads > 0) == (one is model)
            found.append([parameter.detach().clone() for parameter in one.parameters()])
    assert all(map(same, *found))


def test_hooks_see_whole_gradients(compute_device: torch.device, build: Any) -> None:
    """Those of a parameter, and those after it has its gradient."""
    model = build()
    plain = copy.deepcopy(model).to(compute_device)
    seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}

    def backward(one: Any) -> None:
        up, down, found = experts_in(one)[0].gate_up_proj, experts_in(one)[2].down_proj, seen[one is model]
        # Hooks that have the model would never be collected.
        up.register_hook(lambda gradient: found.append(gradient.detach().cpu().clone()))
        down.register_post_accumulate_grad_hook(lambda home: found.append(home.grad.cpu().clone()))
        for ids in (FEW, FEW.flip(1)):
            one(ids.to(compute_device), labels=ids.to(compute_device)).loss.backward()

    backward(plain)
    with headrace.offload(model, device=compute_device, device_memory=budget(model, 20)) as handle:
        backward(model)
        assert handle.stats().expert_loads > 0
    assert len(seen[True]) == 4
    by_shape = [sorted(found, key=lambda gradient: gradient.shape) for found in seen.values()]
    assert all(map(same, *by_shape))


def test_grad_scaler(build: Any) -> None:
    model = build()
    plain = copy.deepcopy(model)

    def scaled(one: Any) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
        for _ in range(3):
            scaler.scale(one(FEW, labels=FEW).loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in one.parameters()]

    wanted = scaled(plain)
    with headrace.offload(model, device="cpu", device_memory=budget(model, 20)) as handle:
        assert_same(scaled(model), wanted)
        assert handle.stats().expert_loads > 0


@pytest.mark.core(implementation="grouped_mm")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_micro_batches_together(compute_device: torch.device, build: Any, implementation: str) -> None:
    model = build("Qwen3Moe", implementation)
    plain = copy.deepcopy(model).to(compute_device)
    steps = on(compute_device, [FEW, FEW.flip(1), FEW], [MANY, FEW, MANY])
    wanted = train(plain, steps)
    with headrace.offload(model, device=compute_device, device_memory=budget(model, 40)) as handle:

        def together(one: Any, step: list[torch.Tensor]) -> None:
            handle.forward_backward(step, lambda ids: one(ids, labels=ids).loss)

        assert_same(train(model, steps, backward=together), wanted)
        assert handle.stats().micro_batches_together > 0
        assert handle.stats().expert_loads > 0


@pytest.mark.core(implementation="grouped_mm")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16(compute_device: torch.device, build: Any, implementation: str) -> None:
    """Homes in float32 that travel in bfloat16, and gradients in float32: as when all of them travel whole."""
    model = build("GptOss", implementation)
    whole = copy.deepcopy(model)
    dtypes = {"param_dtype": torch.bfloat16, "grad_dtype": torch.float32}
    found = []
    for one, limit in ((model, budget(copy.deepcopy(model).bfloat16(), 20)), (whole, 2 * weight_bytes(model))):
        with headrace.offload(one, device=compute_device, device_memory=limit, **dtypes) as handle:
            found.append(train(one, on(compute_device, [FEW], [FEW.flip(1), FEW])))
            assert (handle.stats().expert_loads > 0) == (one is model)
            assert handle.stats().device_peak_bytes <= limit
    assert all(map(same, *found))


class Penalised(nn.Module):
    """A loss with a term that reads all of a weight, in every second call."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner, self.calls = model, 0
        self.model, self.lm_head = model.model, model.lm_head

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        output = self.inner(ids, labels=labels)
        self.calls += 1
        if self.calls % 2 == 0:
            output.loss = output.loss + experts_in(self)[1].down_proj.square().sum() / 3
        return output


def test_all_of_a_weight_is_used_beside(compute_device: torch.device, build: Any) -> None:
    model = Penalised(build())
    stats = check(model, compute_device, on(compute_device, [FEW, NEAR], [FEW, NEAR]), 40)
    assert stats.expert_loads > 0  # of the other layers


def test_an_exception_in_backward_leaves_no_gradients(compute_device: torch.device, build: Any) -> None:
    model = build()
    plain = copy.deepcopy(model).to(compute_device)
    steps = on(compute_device, [FEW], [FEW.flip(1)])
    wanted = train(plain, steps)
    with headrace.offload(model, device=compute_device, device_memory=budget(model, 20)):
        ids = FEW.to(compute_device)

        def fail(_gradient: torch.Tensor) -> None:
            raise RuntimeError("stop")

        embedded = model.model.embed_tokens.register_forward_hook(
            lambda _m, _a, output: (output.register_hook(fail), output)[1]
        )
        with pytest.raises(RuntimeError, match="stop"):
            model(ids, labels=ids).loss.backward()
        embedded.remove()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert_same(train(model, steps), wanted)
