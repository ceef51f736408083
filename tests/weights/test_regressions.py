"""Which bugs were found once and must not come back?"""

import contextlib
import copy
import inspect
import random
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import headrace
from headrace.weights.passes.call import Passes
from tests.support.compare import assert_same, assert_same_gradients
from tests.support.held import weight_bytes
from tests.support.interrupts import Strike
from tests.support.loops import loss_of, steps
from tests.support.models import Decoder


def _train(model: Decoder, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Losses, which tell gradients too: each but the first follows from those before."""
    model.zero_grad()
    return steps(model, torch.optim.SGD(model.parameters(), lr=0.1), [tokens] * 3, loss_of)


def test_a_handle_can_be_removed_after_an_interrupt_that_somebody_keeps(decoder: Decoder, tokens: torch.Tensor) -> None:
    """It struck while hooks of homes were about to be called, and its traceback keeps that undone."""

    def interrupt(frame: FrameType, event: str, _arg: Any) -> None:
        manager = frame.f_locals.get("self") if event == "return" and frame.f_code.co_name == "__enter__" else None
        if getattr(getattr(manager, "gen", None), "gi_code", None) is begun:
            sys.setprofile(None)
            raise KeyboardInterrupt

    begun = inspect.unwrap(Passes.hooks_of_homes).__code__
    handle = headrace.offload(decoder, device="cpu", device_memory=20000)
    loss = loss_of(decoder, tokens)
    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt) as kept:
        loss.backward()
    assert sys.getprofile() is None
    handle.remove()
    del kept


@pytest.mark.timeout(60)
@pytest.mark.parametrize("device_memory", [20000, "64MiB"])
def test_training_after_interrupts_anywhere_in_the_engine_equals_plain(
    decoder: Decoder, tokens: torch.Tensor, device_memory: int | str
) -> None:
    weights = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    expected = _train(decoder, tokens)
    decoder.load_state_dict(weights)
    decoder.zero_grad()
    chance = random.Random(0)
    with headrace.offload(decoder, device="cpu", device_memory=device_memory):
        for _ in range(8):
            with contextlib.suppress(KeyboardInterrupt):
                Strike(chance.randrange(1, 1200), ("/headrace/weights/",)).during(lambda: _train(decoder, tokens))
            with torch.no_grad():
                decoder(tokens)
            decoder.load_state_dict(weights)
            decoder.zero_grad()
            assert_same(_train(decoder, tokens), expected)
            decoder.zero_grad()


class _Renormed(nn.Module):
    """Its embedding writes into its own weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8, max_norm=0.5)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().sum()


def test_weights_written_in_forward_are_written_at_home(compute_device: torch.device, tokens: torch.Tensor) -> None:
    torch.manual_seed(0)
    plain = _Renormed()
    model = copy.deepcopy(plain)
    with headrace.offload(model, device=compute_device, device_memory=1600, blocks=["embedding", "layers.*"]):
        for each in (plain, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                each(tokens).backward()
                optimizer.step()
        assert_same(plain.parameters(), model.parameters())


class _Codebook(nn.Module):
    """It writes to its own weights through `data` while it computes: in place, and by pointing it elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(32, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.embedding(tokens, self.codes) * self.scale
        self.codes.data.mul_(0.9)
        self.scale.data = self.scale.data + 0.125
        return hidden


def test_weights_written_through_data_in_forward_are_written_at_home(
    compute_device: torch.device, tokens: torch.Tensor
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(_Codebook(), *(nn.Linear(8, 8) for _ in range(3)))
    model = copy.deepcopy(plain)
    with headrace.offload(model, device=compute_device, device_memory=2048, blocks=["*"]), torch.no_grad():
        for _ in range(3):
            assert torch.equal(plain(tokens), model(tokens).cpu())
        assert_same(plain.parameters(), model.parameters())


class _Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j, -2 + 0.5j]))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.weight * self.weight.conj() * self.weight.conj().imag


class _Halves(nn.Module):
    """Two parameters that are parts of one storage, side by side in each row."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(48.0).view(4, 12)
        self.left, self.right = nn.Parameter(whole[:, :6]), nn.Parameter(whole[:, 6:])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values[:4, None] * self.left * self.right.square()


@pytest.mark.parametrize("make", [_Conjugated, _Halves])
def test_gradients_of_weights_with_views_of_their_own(compute_device: torch.device, make: Any) -> None:
    plain, model = make(), make()
    values = torch.arange(3.0) if make is _Conjugated else torch.arange(4.0)
    with headrace.offload(model, device=compute_device, device_memory="64KiB", blocks=[model]):
        for _ in range(3):
            for each in (plain, model):
                torch.view_as_real(each(values) + 0j).square().sum().backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("device_memory", ["1MiB", "2KiB"])
def test_a_block_without_bytes(compute_device: torch.device, device_memory: str) -> None:
    class Hollow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty, self.full = nn.LayerNorm(0, bias=False), nn.Linear(8, 8)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.full(values) + self.empty(values[:, :0]).sum()

    plain, model = Hollow(), Hollow()
    plain.load_state_dict(model.state_dict())
    with headrace.offload(model, device=compute_device, device_memory=device_memory, blocks=["empty", "full"]):
        for _ in range(3):
            assert torch.equal(model(torch.ones(2, 8)).cpu(), plain(torch.ones(2, 8)))


def test_a_slice_of_a_module_list_is_an_ordinary_one(compute_device: torch.device, tokens: torch.Tensor) -> None:
    plain, model = Decoder(), Decoder()
    plain.load_state_dict(model.state_dict())
    with headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2), torch.no_grad():
        for each in (plain, model):
            for parameter in each.layers[1:3].parameters():
                parameter.mul_(2)
        assert type(model.layers[1:3]) is nn.ModuleList
        assert list(model.layers[1:3].state_dict()) == list(plain.layers[1:3].state_dict())
        assert torch.equal(model(tokens).cpu(), plain.to(compute_device)(tokens.to(compute_device)).cpu())


def test_a_pattern_means_the_outermost_modules_that_match(decoder: Decoder) -> None:
    with headrace.offload(decoder, device="cpu", blocks=["layers.*"]) as handle:
        assert [block.name for block in handle.settled_blocks("a look") if "layers" in block.name] == [
            f"layers.{index}" for index in range(5)
        ]


class SparseAndDense(nn.Module):
    """Its table gets a dense gradient of a nested backward, and then a sparse one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, sparse=True)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight
        self.unused = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.head, self.table(ids), use_reentrant=True)  # type: ignore[no-any-return]


def test_a_sparse_gradient_after_a_dense_one_that_has_not_left() -> None:
    model = SparseAndDense()
    plain = copy.deepcopy(model)
    with headrace.offload(model, device="cpu", blocks=[model.unused]):
        for step in range(2):
            ids = torch.tensor([[1, 2, 3 + step]])
            for one in (model, plain):
                one.zero_grad()
                one(ids).square().sum().backward()
            assert_same_gradients(model, plain, some_missing=True)


class Scaled(nn.Module):
    """Computes with a frozen weight as it is, so that the gradient's own graph saves just that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width, width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.scale)


def test_what_a_graph_of_a_gradient_has_saved_stays_as_it_was(compute_device: torch.device) -> None:
    """Its memory is given to no other block before that graph is gone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (Scaled(16), nn.Linear(16, 16))))
    plain = copy.deepcopy(model).to(compute_device)

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 256, device=compute_device).view(16, 16).requires_grad_()
        loss = model(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    with headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2) as handle:
        for _ in range(2):
            model.zero_grad()
            plain.zero_grad()
            for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
                assert torch.equal(ours, theirs)
        assert handle.stats().onload_bytes > weight_bytes(model)


class Scaling(nn.Module):
    """Multiplies element by element, to the same bits whatever the strides of its weight are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def _reversed(model: nn.Sequential) -> None:
    state, last = model.state_dict(), len(model) - 1
    model.load_state_dict({name: state[f"{last - int(name[0])}{name[1:]}"] for name in state}, assign=True)


def _swapped(model: nn.Sequential) -> None:
    one, other = model[0], model[1]
    one.weight, other.weight = nn.Parameter(other.weight.data), nn.Parameter(one.weight.data)


def _transposed(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(model[1].weight.data.t())
    model[2].weight.data = model[2].weight.data.t()


@pytest.mark.parametrize("change", [_reversed, _swapped, _transposed])
def test_parameters_that_take_the_memory_of_others_have_its_values(change: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Scaling(64) for _ in range(4)))
    model, x = copy.deepcopy(plain), torch.randn(64, 64)
    with headrace.offload(model, device="cpu", device_memory=3 * 64 * 64 * 4, blocks=list(model)):
        model(x).sum().backward()
        for one in (plain, model):
            change(one)
        for _ in range(2):
            assert_same(model(x), plain(x))
        assert_same(model.state_dict(), plain.state_dict())
    assert_same(model(x), plain(x))


@pytest.mark.parametrize("keep", [lambda weight: weight.data, lambda weight: weight.detach(), lambda weight: weight])
def test_what_somebody_keeps_of_a_parameter_outlives_that(keep: Any) -> None:
    model, x = nn.Sequential(*(Scaling(64) for _ in range(4))), torch.randn(64, 64)
    with headrace.offload(model, device="cpu", device_memory=3 * 64 * 64 * 4, blocks=list(model)):
        model(x)
        kept = keep(model[1].weight)
        before = kept.detach().clone()
        model[1].weight = nn.Parameter(torch.ones(64, 64))
        model(x)
        assert_same(kept.detach(), before)
        assert_same(model[1].weight.detach(), torch.ones(64, 64))


class Growing(nn.Module):
    """Its buffer has one more element after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.data = torch.cat((self.seen, x.detach().mean().view(1)))
        return x * self.weight


def test_a_buffer_that_forward_gives_another_shape_has_it_for_whoever_asks(compute_device: torch.device) -> None:
    model = nn.Sequential(Growing(), Growing())
    with headrace.offload(model, device=compute_device):
        for count in (1, 2):
            model(torch.ones(3))
            seen = model[0].seen
            assert (len(seen), seen.numel(), seen.size(0), seen.shape[0]) == (count,) * 4
