"""Does an embedding table travel by rows, with the bits of a plain run, and within a budget below its size?"""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import headrace
from tests.support.compare import assert_same_gradients, assert_same_weights
from tests.support.loops import steps
from tests.support.models import Layer

ROWS, WIDTH = 600, 16
TABLE_BYTES = ROWS * WIDTH * 4
BUDGET = TABLE_BYTES // 2


class Encoder(nn.Module):
    """A table that is larger than all layers, looked up once or several times."""

    def __init__(self, *, calls: int = 1, checkpointed: bool = False, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=padding_idx)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(3))
        self.calls, self.checkpointed = calls, checkpointed

    def begin(self, ids: torch.Tensor) -> torch.Tensor:
        return sum(self.table(ids.roll(turn) // (turn + 1)) for turn in range(self.calls))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.begin, ids, use_reentrant=False) if self.checkpointed else self.begin(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def ids_of(seed: int, count: int = 48) -> torch.Tensor:
    return torch.randint(ROWS, (4, count // 4), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: object, *, accumulate: int = 1) -> None:
    batches = [ids_of(10 * step + micro).to(device) for step in range(3) for micro in range(accumulate)]
    steps(model, optimizer, batches, micro_batches=accumulate)


VARIANTS = {
    "once": {},
    "several": {"calls": 3},
    "checkpointed": {"checkpointed": True, "calls": 2},
    "padding": {"padding_idx": 7},
}


@pytest.fixture
def pair(compute_device, request):
    torch.manual_seed(0)
    model = Encoder(**VARIANTS[getattr(request, "param", "once")])
    return model, copy.deepcopy(model).to(compute_device)


@pytest.mark.core(accumulate=2)
@pytest.mark.parametrize("pair", VARIANTS, indirect=True)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_training_has_the_bits_of_a_plain_run(compute_device, pair, kind, accumulate):
    model, plain = pair
    with headrace.offload(model, device=compute_device, device_memory=BUDGET) as handle:
        train(model, kind(model.parameters(), lr=0.1), compute_device, accumulate=accumulate)
        stats = handle.stats()
    train(plain, kind(plain.parameters(), lr=0.1), compute_device, accumulate=accumulate)
    assert_same_weights(model, plain)
    assert stats.device_peak_bytes <= BUDGET


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_host_optimizers_update_tables_by_rows_as_whole_ones(compute_device, pair, overlap):
    model, _ = pair
    whole = copy.deepcopy(model)
    for one, budget in ((model, BUDGET), (whole, "1MiB")):
        with headrace.offload(one, device=compute_device, device_memory=budget):
            optimizer = headrace.optim.AdamW(one.parameters(), lr=0.1, overlap=overlap)
            for _ in range(2):
                train(one, optimizer, compute_device, accumulate=1)
    assert_same_weights(model, whole)


@pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O
def test_a_table_on_disk_travels_by_rows(compute_device, pair, tmp_path):
    model, plain = pair
    options = {"device": compute_device, "device_memory": BUDGET, "disk": tmp_path, "host_memory": "80KiB"}
    with headrace.offload(model, **options) as handle:
        train(model, torch.optim.AdamW(model.parameters(), lr=0.1), compute_device, accumulate=2)
        assert handle.stats().disk_bytes >= TABLE_BYTES
        assert handle.stats().device_peak_bytes <= BUDGET
        train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), compute_device, accumulate=2)
        assert_same_weights(model, plain)


def test_only_rows_that_are_used_cross_the_link(compute_device, pair):
    model, plain = pair
    model.requires_grad_(False)
    layer_bytes = sum(parameter.nbytes for parameter in model.layers.parameters())
    ids = ids_of(0)
    with headrace.offload(model, device=compute_device, device_memory=layer_bytes + 2**13) as handle, torch.no_grad():
        for _ in range(4):  # after these the layers stay
            found = model(ids.to(compute_device))
        handle.reset_stats()
        assert torch.equal(model(ids.to(compute_device)).cpu(), found.cpu())
        assert handle.stats().onload_bytes == len(ids.unique()) * WIDTH * 4
        assert torch.equal(found.cpu(), plain(ids.to(compute_device)).cpu())
        with torch.inference_mode():
            assert torch.equal(model(ids.to(compute_device)).cpu(), found.cpu())


def test_gradients_of_rows_leave_alone(compute_device, pair):
    model, plain = pair
    ids = ids_of(0)
    model.layers.requires_grad_(False)
    with headrace.offload(model, device=compute_device, device_memory=BUDGET) as handle:
        model(ids.to(compute_device)).sum().backward()
        plain(ids.to(compute_device)).sum().backward()
        assert handle.stats().offload_bytes == len(ids.unique()) * WIDTH * 4
        assert torch.equal(model.table.weight.grad, plain.table.weight.grad.cpu())


def test_where_few_rows_have_room_a_lookup_takes_turns(compute_device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 2))
    plain = copy.deepcopy(model).to(compute_device)
    budget = 16 * WIDTH * 4 + 256  # sixteen rows, beside the layer, which stays
    with headrace.offload(model, device=compute_device, device_memory=budget) as handle:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), compute_device)
        assert handle.stats().device_peak_bytes <= budget
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), compute_device)
    assert_same_weights(model, plain)


@pytest.mark.parametrize("param_dtype", [torch.bfloat16, {"*": torch.bfloat16}], ids=["dtype", "policies"])
def test_a_table_in_another_dtype(compute_device, pair, param_dtype):
    model, _ = pair
    whole = copy.deepcopy(model)
    for one, budget in ((model, BUDGET // 2), (whole, "1MiB")):
        options = {"device_memory": budget, "param_dtype": param_dtype, "grad_dtype": torch.float32}
        with headrace.offload(one, device=compute_device, **options):
            train(one, torch.optim.SGD(one.parameters(), lr=0.1), compute_device, accumulate=2)
    assert_same_weights(model, whole)


class Borrows(Encoder):
    """A head that computes with the whole table, without a call of its own."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(super().forward(ids), self.table.weight)


def test_a_table_that_is_needed_whole_travels_whole_from_then_on(compute_device):
    torch.manual_seed(0)
    model = Borrows(calls=3)
    plain = copy.deepcopy(model).to(compute_device)
    budget = TABLE_BYTES + 2**10
    with headrace.offload(model, device=compute_device, device_memory=budget) as handle:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), compute_device, accumulate=2)
        assert handle.stats().device_peak_bytes <= budget
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), compute_device, accumulate=2)
    assert_same_weights(model, plain)


def test_a_whole_table_that_does_not_fit_is_told_of(compute_device):
    model = Borrows()
    with headrace.offload(model, device=compute_device, device_memory=BUDGET):
        with pytest.raises(headrace.BudgetError, match=r"block 'table' needs 37\.5 KiB as a whole, as more is done"):
            model(ids_of(0).to(compute_device))
        found = model.table(ids_of(0).to(compute_device))  # and rows still have room
        assert torch.equal(found.cpu(), model.table.weight[ids_of(0)])


def test_hooks_of_the_home_see_the_whole_gradient(compute_device, pair):
    model, plain = pair
    seen: dict[nn.Module, torch.Tensor] = {}
    with headrace.offload(model, device=compute_device, device_memory=BUDGET):
        for one in (model, plain):
            one.table.weight.register_hook(lambda gradient, one=one: seen.update({one: gradient.cpu()}))
            one(ids_of(0).to(compute_device)).square().sum().backward()
    assert torch.equal(seen[model], seen[plain])


def test_a_row_that_is_not_there(compute_device, pair):
    model, _ = pair
    with headrace.offload(model, device=compute_device, device_memory=BUDGET):
        with pytest.raises(IndexError, match="'table' has 600 rows, and row 600 is asked for"):
            model(torch.full((4, 4), ROWS).to(compute_device))
        assert model(torch.zeros(0, 4, dtype=torch.int64).to(compute_device)).shape == (0, 4, WIDTH)


def test_no_gradient_comes_after_removal(compute_device, pair):
    model, _ = pair
    with headrace.offload(model, device=compute_device, device_memory=BUDGET):
        found = model.table(ids_of(0).to(compute_device))
    with pytest.raises(headrace.StateError, match="let go of"):
        found.sum().backward()
    assert "forward" not in vars(model.table)
    assert model.table.weight.grad is None


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_backward_that_raises_leaves_no_gradient(compute_device, pair):
    model, _ = pair
    with headrace.offload(model, device=compute_device, device_memory=BUDGET):
        with pytest.raises(headrace.StateError, match="create_graph=True"):
            model.table(ids_of(0).to(compute_device)).square().sum().backward(create_graph=True)
        assert model.table.weight.grad is None
        model.table(ids_of(1).to(compute_device)).sum().backward()
        assert set(model.table.weight.grad.sum(1).nonzero().flatten().tolist()) == set(ids_of(1).flatten().tolist())


def test_which_tables_travel_by_rows(compute_device, pair):
    model, _ = pair
    others = {
        "fits": (model, TABLE_BYTES * 2),
        "tied": (tied(), BUDGET),
        "max_norm": (nn.Sequential(nn.Embedding(ROWS, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 2)), BUDGET),
        "sparse": (nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, 2)), BUDGET),
    }
    with headrace.offload(others["fits"][0], device=compute_device, device_memory=others["fits"][1]):
        assert "forward" not in vars(model.table)
    for name in ("tied", "max_norm", "sparse"):
        other, budget = others[name]
        with pytest.raises(headrace.BudgetError, match="needs"):
            headrace.offload(other, device=compute_device, device_memory=budget)
    with headrace.offload(model, device=compute_device, device_memory=BUDGET):
        assert "forward" in vars(model.table)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False))
    model[1].weight = model[0].weight
    return model


def test_texts_say_what_travels_by_rows(compute_device, pair):
    model, _ = pair
    with headrace.offload(model, device=compute_device, device_memory=BUDGET) as handle:
        for step in range(3):
            model(ids_of(step).to(compute_device)).sum().backward()
        rows = sum(len(ids_of(step).unique()) for step in range(3))
        assert handle.stats().row_bytes == rows * WIDTH * 4
        assert "of it tables, by rows" in handle.stats().to_text()
        assert handle.plan.problem.by_rows == {0}
        assert "\nby rows   0\n" in handle.plan.to_text()


class Tied(nn.Module):
    """Its table is looked up in a checkpoint, and is the head as well, which nobody can see before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.table, ids, use_reentrant=False)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.linear(hidden, self.table.weight)


def test_a_checkpoint_that_looks_up_again_in_the_whole_table(compute_device):
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model).to(compute_device)
    with headrace.offload(model, device=compute_device, device_memory=TABLE_BYTES + 5000, blocks=["layers.*"]):
        assert "forward" in vars(model.table)
        for one in (model, plain):
            train(one, torch.optim.SGD(one.parameters(), lr=0.1), compute_device)
        assert_same_weights(model, plain)


def test_what_is_set_between_calls(compute_device, pair):
    """A table frozen between forward and backward, and a padding row counted from the end."""
    model, _ = pair
    model.table.padding_idx = -1
    with headrace.offload(model, device=compute_device, device_memory=BUDGET):
        model(torch.tensor([[ROWS - 1, 3]]).to(compute_device)).sum().backward()
        assert not model.table.weight.grad[ROWS - 1].any()
        assert model.table.weight.grad[3].any()
        model.zero_grad()
        loss = model(ids_of(0).to(compute_device)).sum()
        model.table.weight.requires_grad_(False)
        loss.backward()
        assert model.table.weight.grad is None


def test_errors_are_those_of_a_plain_lookup(compute_device, pair):
    model, plain = pair
    ids = torch.tensor([[1.0, 2.0]]).to(compute_device)
    with headrace.offload(model, device=compute_device, device_memory=BUDGET):
        for wrong in (ids, ids.to(torch.uint8)):
            with pytest.raises(RuntimeError, match="Expected tensor for argument #1 'indices'"):
                plain(wrong)
            with pytest.raises(RuntimeError, match="Expected tensor for argument #1 'indices'"):
                model(wrong)


class Selective(Encoder):
    """Each part is computed again but for its matrix products, in which PyTorch counts all operators that it sees."""

    def computed(self, part: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor) -> torch.Tensor:
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        contexts = partial(create_selective_checkpoint_contexts, products)
        return checkpoint(part, value, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.computed(self.begin, ids)
        for first in range(0, len(self.layers), 2):
            hidden = self.computed(nn.Sequential(*self.layers[first : first + 2]), hidden)
        return hidden


@pytest.mark.core(share=0.5)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_selective_checkpoint_sees_no_copy_of_ours(compute_device: torch.device, share: float) -> None:
    """Which copies forward needs depends on what was there; the computation again may need others."""
    torch.manual_seed(0)
    model = Selective()
    plain = copy.deepcopy(model).to(compute_device)
    limit = int(share * sum(parameter.nbytes for parameter in model.layers.parameters())) + 4096
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
        for seed in range(3):
            for one in (model, plain):
                one(ids_of(seed).to(compute_device)).square().mean().backward()
            assert_same_gradients(model, plain)
        stats = handle.stats()
        assert stats.row_bytes > 0
        assert stats.device_peak_bytes <= limit
