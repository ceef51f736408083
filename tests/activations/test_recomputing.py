"""Do checkpoints keep what headrace chose, give the same bits, and take as little time as they can?"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import headrace
from headrace.planning import recomputing
from tests.activations.models import SAVED_BYTES, WIDTH, Stack, all_leaving, rows, step
from tests.activations.plain import STEPS as PLAIN_STEPS
from tests.activations.plain import plain_run
from tests.activations.test_overlap import LAYERS, ROWS, step_seconds, wide
from tests.activations.test_overlap import SAVED_BYTES as WIDE_BYTES
from tests.activations.test_overlap import slow_link as slow_link
from tests.matrix.models import CASES, Case
from tests.support.compare import assert_same
from tests.support.loops import train

STEPS = 5
SETTLED = 5  # steps: two that compute everything again, two for a plan with the choice, one that follows it


@pytest.fixture
def keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever takes any time is kept, and leaves: as if the link took no time."""
    monkeypatch.setattr(recomputing, "_USED", 1e9)


# bits and bytes -------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("keeps_all")
@pytest.mark.parametrize("with_weights", [False, True])
def test_what_is_kept_leaves_and_gives_the_same_bits(with_weights: bool, compute_device: torch.device) -> None:
    """The first two steps keep the layers' inputs, the others their products, too."""
    expected = [step(Stack(8).to(compute_device), rows(compute_device, seed)) for seed in range(STEPS)]
    model = Stack(8, checkpointing="chosen")
    whole, handle = all_leaving(model, compute_device, with_weights=with_weights)
    for seed in range(STEPS):
        handle.reset_stats()
        assert_same(step(model, rows(compute_device, seed)), expected[seed])
        stats = handle.stats()
        tensors = 8 if seed < 2 else 16
        assert (tensors - 1) * SAVED_BYTES <= stats.offload_bytes <= (tensors + 1) * SAVED_BYTES
        assert stats.host_held_bytes == 0
    assert "addmm in layers.*" in str(handle.report())
    assert f"8 of float32 64x{WIDTH}" in str(handle.report())
    whole.remove()
    assert_same(step(model.to(compute_device), rows(compute_device, 4)), expected[4])


def test_without_offloading_it_is_a_plain_checkpoint() -> None:
    first, second = headrace.checkpoint_contexts()
    assert type(first) is type(second) is type(torch.utils.checkpoint.noop_context_fn()[0])
    assert_same(step(Stack(2, checkpointing="chosen"), rows("cpu")), step(Stack(2), rows("cpu")))


class Inside(nn.Module):
    """A layer and, behind it, a function of its output and of a weight in a checkpoint."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any], *, plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = Stack(1)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.function = function
        self.plain = plain

    def forward(self, x: Tensor) -> Any:
        contexts = {} if self.plain else {"context_fn": headrace.checkpoint_contexts}
        return checkpoint(self.function, self.layer(x), self.weight, use_reentrant=False, **contexts)  # type: ignore[arg-type]


def written_in_place(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).relu_() @ w).tanh_().sin()


def written_past_the_version(x: Tensor, w: Tensor) -> Tensor:
    """As kernels of other libraries write."""
    y = x @ w
    y.data.mul_(2)
    return (y.sin() @ w).cos()


def random(x: Tensor, w: Tensor) -> Tensor:
    y = F.dropout(x @ w) @ w
    q, k, v = (each.unflatten(1, (4, -1)).transpose(0, 1)[None] for each in (y, y.sin(), y.cos()))
    attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    return F.dropout(attended[0].transpose(0, 1).flatten(1) @ w).tanh()


def attention(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = ((each @ w).unflatten(1, (4, -1)).transpose(0, 1)[None] for each in (x, x.sin(), x.cos()))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (attended[0].transpose(0, 1).flatten(1) @ w).tanh()


def nested(x: Tensor, w: Tensor) -> Any:
    def inner(y: Tensor) -> Tensor:
        return ((y @ w).tanh() @ w).sin()

    y: Any = checkpoint(inner, (x @ w).tanh(), use_reentrant=False, context_fn=headrace.checkpoint_contexts)
    return (y @ w).cos() * x


def convolution(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(F.conv1d(x[None], w[:64, :64, None]).sin(), w[:64, :64, None]).tanh()[0]


def infinite_and_written(x: Tensor, w: Tensor) -> Tensor:
    """What is written does not change the sum, which is infinite."""
    y = torch.addmm(torch.full((WIDTH,), -torch.inf).index_fill(0, torch.arange(9), 0).to(x), x, w)
    y.data.mul_(2)
    return (y.sigmoid() @ w).cos()


def computed_in_forward_alone(x: Tensor, w: Tensor) -> Tensor:
    """The first product of each forward is there already when it is computed again, and is not the first one then."""
    known = _of_a_step.get(x.device.type)
    if known is None:
        with torch.no_grad():
            known = _of_a_step[x.device.type] = x.cos() @ w.cos()
    return ((x @ w).sin() @ w).tanh() * known


_of_a_step: dict[str, Tensor] = {}

FUNCTIONS = [
    written_in_place,
    written_past_the_version,
    random,
    attention,
    nested,
    convolution,
    infinite_and_written,
    computed_in_forward_alone,
]


@pytest.mark.usefixtures("keeps_all")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_odd_functions(function: Any, compute_device: torch.device) -> None:
    plain, model = Inside(function, plain=True).to(compute_device), Inside(function).to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, all_leave=True) as handle:
        for seed in range(STEPS):
            results = []
            for each in (plain, model):
                torch.manual_seed(seed)
                _of_a_step.clear()
                x = rows(compute_device, seed)
                results.append([*step(each, x), x.grad])
            assert_same(*results)
        assert handle.stats().offload_bytes > STEPS * SAVED_BYTES
    assert handle.stats().host_held_bytes == 0
    _of_a_step.clear()


@pytest.mark.usefixtures("keeps_all")
def test_complex_values_that_are_written_past_the_version_are_computed_again() -> None:  # emu has none
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = torch.complex(x, x.sin()) @ torch.complex(w, w.cos())
        y.data.mul_(2)
        return (y.abs() @ w).cos()

    plain, model = Inside(function, plain=True), Inside(function)
    with headrace.offload_activations(model, min_bytes=0, all_leave=True):
        for seed in range(STEPS):
            assert_same(step(model, rows("cpu", seed)), step(plain, rows("cpu", seed)))


@pytest.mark.usefixtures("keeps_all")
@pytest.mark.parametrize("first_seed", [0, 3])
def test_what_is_written_to_behind_the_checkpoint_is_computed_again(
    first_seed: int, compute_device: torch.device
) -> None:
    """What the checkpoint gives is not kept, or, if it did not give it while headrace measured, is not used."""

    class Writing(Inside):
        seed = 0

        def forward(self, x: Tensor) -> Tensor:
            first, second = super().forward(x)
            return first.add_(1) * second if self.seed >= first_seed else second * 2  # type: ignore[no-any-return]

    def two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = x @ w
        return first if Writing.seed >= first_seed else first + 1, (first.sin() @ w).tanh()

    plain, model = Writing(two, plain=True).to(compute_device), Writing(two).to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, all_leave=True) as handle:
        for seed in range(6):
            Writing.seed = seed
            assert_same(step(model, rows(compute_device, seed)), step(plain, rows(compute_device, seed)))
        report = str(handle.report())
        assert ": kept" in report
        assert ("something may write" in report) == (first_seed == 0)
    if compute_device.type == "emu":
        from emulator import emu

        emu.take_reports()  # the copy to the host may be torn: nobody uses it


@pytest.mark.usefixtures("keeps_all")
@pytest.mark.parametrize("change", [lambda y: y.data.mul_(2), lambda y: y.untyped_storage().resize_(0)])
def test_what_the_checkpoint_gives_may_be_changed_without_a_trace(change: Any, compute_device: torch.device) -> None:
    class Changing(Inside):
        def forward(self, x: Tensor) -> Tensor:
            first, second = super().forward(x)
            used = first.sum()
            change(first)
            return second * used  # type: ignore[no-any-return]

    def two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = x @ w
        return first, (first.sin() @ w).tanh()

    plain, model = Changing(two, plain=True).to(compute_device), Changing(two).to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, all_leave=True) as handle:
        for seed in range(STEPS):
            assert_same(step(model, rows(compute_device, seed)), step(plain, rows(compute_device, seed)))
        assert "recomputed, as something may write to them" in str(handle.report())


@pytest.mark.usefixtures("keeps_all")
def test_several_backwards_compute_again_what_is_gone(compute_device: torch.device) -> None:
    model, plain = Inside(attention).to(compute_device), Inside(attention, plain=True).to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, all_leave=True):
        for seed in range(STEPS):
            results = []
            for each in (plain, model):
                each.zero_grad()
                loss = each(rows(compute_device, seed)).square().sum()
                loss.backward(retain_graph=True)
                loss.backward()
                results.append([parameter.grad for parameter in each.parameters()])
            assert_same(*results)


@pytest.mark.usefixtures("keeps_all")
def test_autocast_and_lengths_that_change(compute_device: torch.device) -> None:
    plain, model = Stack(4, checkpointing="non-reentrant"), Stack(4, checkpointing="chosen")
    plain, model = plain.to(compute_device), model.to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, all_leave=True) as handle:
        for seed in range(STEPS):
            results = []
            for each in (plain, model):
                with torch.autocast(compute_device.type, dtype=torch.bfloat16):
                    loss = each(rows(compute_device, seed, count=32 + 8 * (seed // 2))).float().square().sum()
                each.zero_grad()
                loss.backward()
                results.append([loss, *(parameter.grad for parameter in each.parameters())])
            assert_same(*results)
        handle.reset_stats()
        step(model, rows(compute_device, 9, count=96))
        assert handle.stats().offload_bytes >= 7 * 1.5 * SAVED_BYTES


@pytest.mark.extended
@pytest.mark.usefixtures("keeps_all")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kind(case: Case, compute_device: torch.device) -> None:
    batches = case.on(compute_device, PLAIN_STEPS)
    plain, _ = plain_run(case.name, "non-reentrant", "full", compute_device)
    model = case.build("chosen", "full").to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, all_leave=True) as handle:
        assert_same(train(model, batches, case.forward), plain)
        assert "kept" in str(handle.report())


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.usefixtures("keeps_all")
@pytest.mark.parametrize("experts", [False, True])
def test_transformers(experts: bool, compute_device: torch.device) -> None:
    def run(contexts: Any, **settings: Any) -> tuple[list[list[Tensor]], int, str]:
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1 if experts else 0.0}
        if experts:
            config: Any = MixtralConfig(**sizes, **heads, num_local_experts=4, experts_implementation="eager")
            model: Any = MixtralForCausalLM(config).to(compute_device)
        else:
            model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(compute_device)
        model.train().gradient_checkpointing_enable({"use_reentrant": False, **contexts})
        given, kept_bytes, report = [], 0, ""
        with headrace.offload_activations(model, min_bytes=0, **settings) if settings else nullcontext() as handle:
            for seed in range(STEPS):
                torch.manual_seed(seed)
                ids = torch.randint(64, (2, 16)).to(compute_device)
                model.zero_grad()
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                given.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
            if handle is not None:
                kept_bytes, report = handle.plan.problem.nbytes, str(handle.report())
        return given, kept_bytes, report

    plain, _, _ = run({})
    other, least_bytes, _ = run({}, all_leave=True)
    chosen, kept_bytes, report = run({"context_fn": headrace.checkpoint_contexts}, all_leave=True)
    assert_same(other, plain)
    assert_same(chosen, plain)
    products = 5 * 2 * 16 * 4 * (32 + 2 * 16 + 32)  # of queries, keys, values and outputs
    assert kept_bytes >= least_bytes + products
    assert "mm in model.layers.*" in report


# time -----------------------------------------------------------------------------------------------------------------
def chosen_step(**settings: Any) -> tuple[float, headrace.ActivationOffloading]:
    gc.collect()  # memory of other tests that is freed in a forward makes it wait
    model = Stack(LAYERS, wide, "chosen").to("emu")
    with headrace.offload_activations(model, min_bytes=0, **settings) as handle:
        return step_seconds(model, SETTLED, 1), handle


def other_step(checkpointing: str) -> float:
    return step_seconds(Stack(LAYERS, wide, checkpointing).to("emu"), 0, 1)


@pytest.mark.emu("lazy")
def test_copies_that_take_less_than_the_forward_cost_nothing(slow_link: Any) -> None:
    """A layer's input and its product leave: two copies, which take 0.9 of its forward. Nothing is computed again."""
    slow_link(0.45)
    seconds, handle = chosen_step()
    plan = handle.plan
    assert seconds <= 1.03 * other_step("none") < 0.8 * other_step("non-reentrant")
    assert plan is not None
    assert plan.problem.nbytes == 2 * LAYERS * WIDE_BYTES
    assert plan.host_bytes >= (2 * LAYERS - 4) * WIDE_BYTES


@pytest.mark.emu("lazy")
def test_a_slower_link_keeps_some(slow_link: Any) -> None:
    """All inputs leave and half the products, which takes 0.9 of the forward: half the layers are computed again."""
    slow_link(0.6)
    seconds, handle = chosen_step()
    plan = handle.plan
    assert seconds <= 1.17 * other_step("none") < 0.9 * other_step("non-reentrant")
    assert plan is not None
    assert plan.problem.nbytes == (LAYERS + LAYERS // 2) * WIDE_BYTES
    assert plan.stall_seconds <= 0.01 * seconds
    assert "6 kept, the others recomputed, as neither device nor link has room" in str(handle.report())


@pytest.mark.emu("lazy")
def test_what_device_memory_has_room_for_is_kept(slow_link: Any, emu_device: ModuleType) -> None:
    """A link that is of no use: 12 inputs and 5 products, and two tensors of room for copies."""
    slow_link(50.0)
    seconds, handle = chosen_step(device_memory=(LAYERS + 5 + 2) * WIDE_BYTES)
    plan = handle.plan
    assert plan is not None
    assert plan.problem.nbytes == plan.peak_bytes == (LAYERS + 5) * WIDE_BYTES
    assert seconds <= (1 + (LAYERS - 5) / LAYERS / 3 + 0.01) * other_step("none")


@pytest.mark.emu("lazy")
def test_longer_inputs_are_recomputed_as_far_as_device_memory_demands(slow_link: Any) -> None:
    """Everything fits until the inputs are twice as long: then 12 inputs and 4 products do."""
    slow_link(50.0)
    gc.collect()
    model = Stack(LAYERS, wide, "chosen").to("emu")
    with headrace.offload_activations(model, min_bytes=0, device_memory=2 * (LAYERS + 4 + 2) * WIDE_BYTES) as handle:
        step_seconds(model, SETTLED, 1)
        assert handle.plan is not None
        assert handle.plan.problem.nbytes == 2 * LAYERS * WIDE_BYTES
        step_seconds(model, 2 * SETTLED, 1, rows=2 * ROWS)
        assert handle.plan.problem.nbytes == 2 * (LAYERS + 4) * WIDE_BYTES
        assert handle.plan.stall_seconds == 0
        step_seconds(model, SETTLED, 1)
        assert handle.plan.problem.nbytes == (LAYERS + 4) * WIDE_BYTES


@pytest.mark.emu("lazy")
def test_a_link_without_time_is_a_plain_checkpoint(slow_link: Any) -> None:
    slow_link(8.0)
    seconds, handle = chosen_step()
    assert seconds <= 1.001 * other_step("non-reentrant")
    assert handle.plan is not None
    assert handle.plan.problem.nbytes == LAYERS * WIDE_BYTES
