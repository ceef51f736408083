"""Do the bytes that leave the device come to the bytes on the host, and the peak to the plan's?"""

import pytest
import torch
from torch import Tensor, nn

import headrace
from headrace.activations import passes
from tests.activations.models import ROWS, SAVED_BYTES, Layer, Stack, results, rows, step
from tests.support.compare import assert_same
from tests.support.held import Allocations

LAYERS = 12


def settled(device: torch.device, steps: int = 3, **settings: object) -> tuple[Stack, headrace.ActivationOffloading]:
    """A model whose plan is final."""
    model = Stack(LAYERS).to(device)
    handle = headrace.offload_activations(model, min_bytes=0, **settings)  # type: ignore[arg-type]
    for _ in range(steps):
        step(model, rows(device))
    handle.reset_stats()
    return model, handle


def forward_bytes(model: nn.Module, x: Tensor) -> int:
    """Device bytes that a forward holds when it has ended."""
    allocations = Allocations(x.device)
    loss = model(x).square().sum()
    allocations.forward_done(0)
    loss.backward()
    return allocations.after_forward_bytes[0]


def drop_gradients(model: nn.Module) -> None:
    """Every gradient of a weight goes as it comes."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)


def peak_bytes(model: nn.Module, x: Tensor) -> int:
    """The most that a step adds."""
    model.zero_grad()
    x.grad = None
    allocations = Allocations(x.device)
    model(x).sum().backward()  # a loss without temporaries: the plan cannot see those
    return allocations.peak_bytes


@pytest.mark.emu("random:0", "random:1")
@pytest.mark.parametrize("budget_tensors", [0, 3, 6])
def test_device_bytes_drop_by_the_bytes_on_the_host(emu_device, budget_tensors):
    device = torch.device("emu", 1)
    plain = forward_bytes(Stack(LAYERS).to(device), rows(device))
    model, handle = settled(device, device_memory=budget_tensors * SAVED_BYTES)
    model.zero_grad()
    x = rows(device)
    allocations = Allocations(device)
    loss = model(x).square().sum()
    allocations.forward_done(0)
    held = handle.stats().host_held_bytes
    loss.backward()
    assert plain - allocations.after_forward_bytes[0] == held > 0
    assert handle.stats().host_held_bytes == 0


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("budget_tensors", [5, 8])
@pytest.mark.parametrize("keeps_gradients", [False, True])
def test_the_peak_saving_is_as_planned(emu_device, budget_tensors, keeps_gradients):
    device = torch.device("emu", 1)
    plain, model = Stack(LAYERS).to(device), Stack(LAYERS).to(device)
    if not keeps_gradients:
        drop_gradients(plain)
        drop_gradients(model)
    x = rows(device, count=8 * ROWS)
    peak_bytes(plain, x)
    budget = budget_tensors * 8 * SAVED_BYTES
    with headrace.offload_activations(model, min_bytes=0, device_memory=budget) as handle:
        for _ in range(3):
            peak_bytes(model, x)
        offloaded = peak_bytes(model, x)
        plan = handle.plan
    assert plan is not None
    assert plan.peak_bytes <= budget
    assert abs(peak_bytes(plain, x) - offloaded - plan.saving_bytes) <= 0.02 * plan.saving_bytes


class Deep(nn.Sequential):
    """Six layers in the place of one."""

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(6)))


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("deep", [None, 5])
def test_the_peak_saving_counts_what_recomputation_makes(emu_device, checkpointing, deep):
    """To half a tensor: the gradient of a weight, while it is made, is not seen."""
    device = torch.device("emu", 1)
    x = rows(device, count=8 * ROWS)
    models = []
    for _ in range(2):
        model = Stack(LAYERS, checkpointing=checkpointing)
        if deep is not None:
            model.layers[deep] = Deep()
        drop_gradients(model)
        models.append(model.to(device))
    plain, model = models
    with headrace.offload_activations(model, min_bytes=0, device_memory=3 * 8 * SAVED_BYTES) as handle:
        for _ in range(3):
            peak_bytes(model, x)
        saved = peak_bytes(plain, x) - peak_bytes(model, x)
        plan = handle.plan
    assert plan is not None
    assert plan.saving_bytes >= 3 * 8 * SAVED_BYTES
    assert abs(saved - plan.saving_bytes) <= 0.5 * 8 * SAVED_BYTES


@pytest.mark.emu("random:0", "lazy")
def test_the_peak_is_the_same_at_every_step(emu_device):
    device = torch.device("emu", 1)
    model, _ = settled(device, device_memory=4 * SAVED_BYTES)
    assert len({peak_bytes(model, rows(device, seed)) for seed in range(4)}) == 1


def test_host_memory_is_made_once(compute_device):
    model, handle = settled(compute_device, device_memory=0)
    grown = handle.stats().pool_growths
    for seed in range(4):
        step(model, rows(compute_device, seed))
    stats = handle.stats()
    assert stats.pool_growths == grown
    assert stats.host_bytes <= (LAYERS + 1) * SAVED_BYTES


def test_everything_moves_when_nothing_may_stay(compute_device):
    model, handle = settled(compute_device, device_memory=0)
    step(model, rows(compute_device))
    stats, plan = handle.stats(), handle.plan
    assert plan is not None
    assert len(plan.offloaded) >= LAYERS - 1
    assert stats.offload_bytes == stats.onload_bytes == plan.host_bytes == len(plan.offloaded) * SAVED_BYTES


def test_what_fits_stays(compute_device):
    model, handle = settled(compute_device, device_memory=2 * LAYERS * SAVED_BYTES)
    step(model, rows(compute_device))
    assert handle.stats().offload_bytes == 0


def test_the_last_ones_stay(compute_device):
    _, handle = settled(compute_device, device_memory=5 * SAVED_BYTES)
    plan = handle.plan
    assert plan is not None
    count = len(plan.offloaded)
    assert plan.offloaded == frozenset(range(1, count + 1))  # saved first, needed last; the input is the caller's
    assert 0 < count < len(plan.problem.saved)


class Thrice(nn.Module):
    """Saves one tensor three times, twice as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = y * y.t().contiguous().t() + y.view(32, 256).sin().view_as(y) + y.t().exp().t()
        return torch.tanh(z + y[3:50].cos().mean())


def test_a_storage_is_stored_once_and_comes_back_with_its_strides(compute_device):
    x = rows(compute_device)
    expected = step(Stack(3, Thrice).to(compute_device), x)
    model = Stack(3, Thrice).to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0) as handle:
        for _ in range(3):
            assert_same(step(model, x), expected)
        plan = handle.plan
    assert plan is not None
    # for each layer: its input, y (five times), the contiguous transpose of y, and the result of exp
    assert len(plan.problem.saved) == 3 * 4 + 1


def test_a_small_part_of_a_large_tensor_goes_alone(compute_device):
    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp().sum() + x[5:9].sin().sum()

    wide = nn.Sequential(nn.Linear(128, 128), Part()).to(compute_device)
    x = rows(compute_device)
    expected = step(wide, x)
    with headrace.offload_activations(wide, min_bytes=0, device_memory=0) as handle:
        assert_same(step(wide, x), expected)
        plan = handle.plan
    assert plan is not None
    assert min(saved.nbytes for saved in plan.problem.saved) == 4 * 128 * 4


class Parts(nn.Module):
    """Saves parts of what one projection makes, as attention does with queries, keys and values."""

    def __init__(self, shares: tuple[int, ...]) -> None:
        super().__init__()
        self.shares = shares
        self.linear = nn.Linear(128, 384)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.linear(x).t().contiguous().split([64 * share for share in self.shares])
        return torch.cat([part.sin() for part in parts]).view(3, 128, -1).sum(0).t().contiguous()


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("all_leave", [True, False])
@pytest.mark.parametrize("shares", [(2, 2, 2), (4, 1, 1), (1, 1, 4), (1, 1, 1, 1, 1, 1)], ids=str)
def test_parts_of_one_storage_leave_and_it_goes_with_them(emu_device, shares, all_leave):
    device = torch.device("emu", 1)
    plain, model = (Stack(6, lambda: Parts(shares)).to(device) for _ in range(2))
    bytes_of_parts = 3 * SAVED_BYTES
    settings = {"all_leave": True} if all_leave else {"device_memory": 2 * bytes_of_parts}
    with headrace.offload_activations(model, min_bytes=0, **settings) as handle:
        for seed in range(3):
            assert_same(step(model, rows(device, seed)), step(plain, rows(device, seed)))
        handle.reset_stats()
        held = forward_bytes(model, rows(device))
        assert forward_bytes(plain, rows(device)) - held >= (5 if all_leave else 4) * bytes_of_parts
        assert handle.stats().offload_bytes <= 6 * (bytes_of_parts + SAVED_BYTES)  # and inputs: each storage once
        assert handle.stats().skipped == 0


@pytest.mark.emu("random:0")
def test_what_attention_saves_leaves(emu_device):
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(128, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    device = torch.device("emu", 1)
    plain, model = (Stack(6, Attends).to(device) for _ in range(2))
    with headrace.offload_activations(model, min_bytes=0, all_leave=True) as handle:
        for seed in range(3):
            assert_same(step(model, rows(device, seed)), step(plain, rows(device, seed)))
        assert forward_bytes(model, rows(device)) < forward_bytes(plain, rows(device)) // 4
        assert handle.stats().skipped == 0


def test_fraction_caps_what_leaves(compute_device):
    _, handle = settled(compute_device, device_memory=0, fraction=0.5)
    plan = handle.plan
    assert plan is not None
    assert 0.3 * plan.problem.nbytes < plan.host_bytes <= 0.5 * plan.problem.nbytes


def test_at_most_so_many_copies_are_in_flight(compute_device):
    _, handle = settled(compute_device, device_memory=0, most_in_flight=1)
    plan = handle.plan
    assert plan is not None
    leaving = 0
    for index, releases in enumerate(plan.releases):
        leaving += (index in plan.offloaded) - len(releases)
        assert leaving <= 2  # the one that was saved just now, whose copy begins, and one more


def test_small_tensors_stay(compute_device):
    model = Stack(4).to(compute_device)
    with headrace.offload_activations(model, device_memory=0) as handle:  # 1 MiB is the least
        step(model, rows(compute_device))
        assert handle.stats().offload_bytes == 0


def test_layers_and_modules_choose(compute_device):
    for settings, wanted in (
        ({"layers": 3}, {"layers.0", "layers.1", "layers.2"}),
        ({"layers": ["layers.1?"]}, {"layers.10", "layers.11"}),
        ({"modules": ["*.linear"], "layers": 2}, {"layers.0.linear", "layers.1.linear"}),
        ({"layers": 0}, set()),
    ):
        _, handle = settled(compute_device, device_memory=0, **settings)
        plan = handle.plan
        names = set() if plan is None else {saved.name for saved in plan.problem.saved}
        assert names == wanted
        handle.remove()


def test_marked_tensors_stay(compute_device):
    class Marks(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            headrace.mark_not_offload(y)
            return y.sin() + y.view(32, 256).cos().view_as(y)

    model = Stack(4, Marks).to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0) as handle:
        step(model, rows(compute_device))
        assert handle.stats().offloads == 4  # the inputs of the linear maps


def test_a_tensor_that_the_user_keeps_does_not_leave(compute_device):
    kept: list[Tensor] = []

    class Keeps(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            kept.append(y)
            return y

    model = Stack(6, Keeps).to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0) as handle:
        for _ in range(3):
            step(model, rows(compute_device))
            kept.clear()
        handle.reset_stats()
        step(model, rows(compute_device))
        assert handle.stats().offload_bytes == 0  # it would free nothing


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("together", [1, 2, 3])
def test_forwards_that_wait_together_share_the_ceiling(emu_device, together):
    """As in the first stage of a pipeline, whose micro-batches come one after the other before the first backward."""
    device, ceiling_bytes = torch.device("emu", 1), (LAYERS + 1) * SAVED_BYTES
    model, handle = settled(device, device_memory=ceiling_bytes)
    plain = Stack(LAYERS).to(device)
    for _ in range(4):
        handle.reset_stats()
        model.zero_grad()
        inputs = [rows(device, seed) for seed in range(together)]
        allocations = Allocations(device)
        losses = [model(x).square().sum() for x in inputs]
        allocations.forward_done(0)
        for loss in losses:
            loss.backward()
    assert allocations.after_forward_bytes[0] <= ceiling_bytes + SAVED_BYTES  # and losses
    saved_bytes = together * ceiling_bytes
    assert saved_bytes - ceiling_bytes <= handle.stats().offload_bytes <= saved_bytes
    assert handle.stats().offload_bytes > 0 or together == 1
    plain_losses = [plain(x).square().sum() for x in inputs]
    for loss in plain_losses:
        loss.backward()
    assert_same(results(model, *losses), results(plain, *plain_losses))


def test_the_ceiling_is_whole_again_after_an_unusual_step(emu_device, monkeypatch):
    """Three forwards wait once, as where somebody keeps losses of an evaluation."""
    monkeypatch.setattr(passes, "_REMEMBERED_FORWARDS", 4)
    device = torch.device("emu", 1)
    model, handle = settled(device, device_memory=(LAYERS + 1) * SAVED_BYTES)
    losses = [model(rows(device, seed)).square().sum() for seed in range(3)]
    del losses
    left_bytes = []
    for _ in range(6):
        handle.reset_stats()
        step(model, rows(device))
        left_bytes.append(handle.stats().offload_bytes)
    assert left_bytes[0] > 0
    assert left_bytes[-1] == 0
