"""Do parameters of every layout travel unharmed: dtypes, strides, ties, shared storages, no elements at all?"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headrace
from tests.matrix.models import CASES, WIDTH, Decoder, UNet
from tests.support.compare import Outcome, assert_same, on_cpu, same
from tests.support.held import weight_bytes
from tests.support.loops import train
from tests.support.offloaded import assert_exact, assert_streamed, offload

UNET = CASES[3]


def vectors(device: torch.device, width: int = WIDTH) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(x.to(device), x.to(device)) for x in torch.randn(3, 4, width, generator=generator)]


def mean_square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    output = model(batch[0])
    return output, (output.float() - batch[1]).square().mean()


def assert_trains(make: Callable[[], nn.Module], device: torch.device, share: float = 0.5) -> Any:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return assert_exact(seeded, lambda model: train(model, vectors(device), mean_square), device, share)


class Mixed(nn.Module):
    """A layer of many dtypes: bfloat16 and float32 that learn, frozen float8, float16, int8, bool, and complex."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH)
        self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        weight = torch.randn(WIDTH, WIDTH)
        self.eight = nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
        self.sixteen = nn.Parameter(weight.half(), requires_grad=False)
        self.signs = nn.Parameter((weight * 20).to(torch.int8), requires_grad=False)
        self.mask = nn.Parameter(weight > 0, requires_grad=False)
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.bits = nn.Parameter(torch.arange(5, dtype=torch.int64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(x) + self.narrow(x.to(torch.bfloat16)).float()
        for weight in (self.eight, self.sixteen, self.signs, self.mask):
            x = x + 0.01 * F.linear(x, weight.float())
        return x * self.scale + self.phase.abs().sum() + self.bits.float().mean()


def test_mixed_dtypes(compute_device: torch.device) -> None:
    assert_trains(lambda: nn.Sequential(*(Mixed() for _ in range(4))), compute_device, 0.6)


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_channels_last(checkpointing: str, compute_device: torch.device) -> None:
    """Strides are kept: of weights, of gradients, and of what is saved."""
    formats: list[list[tuple[int, ...]]] = []

    def make() -> nn.Module:
        return UNET.build(checkpointing).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def script(model: nn.Module) -> Outcome:
        batches = UNET.on(compute_device)
        batches = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in batches]

        outcome = train(model, batches, UNET.forward)
        formats.append([parameter.stride() for parameter in model.parameters()])
        return outcome

    _, model = assert_exact(make, script, compute_device, UNET.share)
    assert formats[0] == formats[1]
    assert isinstance(model, UNet)
    assert model.middle.first.weight.is_contiguous(memory_format=torch.channels_last)


class Odd(nn.Module):
    """Transposed, expanded and sliced parameters, ones without elements, and single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).T)
        self.sliced = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.number = nn.Parameter(torch.randn(()))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.transposed / WIDTH + x @ self.sliced.contiguous() / WIDTH + (x @ self.empty.T).sum()
        return self.linear(x) * self.number


def test_strides_and_empty_parameters(compute_device: torch.device) -> None:
    assert_trains(lambda: nn.Sequential(*(Odd() for _ in range(5))), compute_device)


class SharedStorage(nn.Module):
    """Two parameters that are views of one storage: a write through one is seen through the other."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(3 * WIDTH, WIDTH) * 0.1
        self.query = nn.Parameter(whole[:WIDTH])
        self.key = nn.Parameter(whole[WIDTH : 2 * WIDTH])
        self.both = nn.Parameter(whole[: 2 * WIDTH], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.query) * F.linear(x, self.key) + F.linear(x, self.both).sum(-1, keepdim=True)


def test_parameters_that_share_a_storage(compute_device: torch.device) -> None:
    """On the CPU `.to()` keeps what is shared. Elsewhere the plain model has copies of it."""

    def forward_of(model: nn.Module) -> list[Tensor]:
        return [on_cpu(mean_square(model, batch)[0]) for batch in vectors(compute_device)]

    torch.manual_seed(0)
    model = nn.Sequential(*(SharedStorage() for _ in range(5)))
    handle = offload(model, compute_device, 0.5)
    layer: Any = model[2]
    for step in range(3):
        train(model, vectors(compute_device)[:1], mean_square)
        assert same(on_cpu(layer.both[:WIDTH]), on_cpu(layer.query)), step
        assert same(on_cpu(layer.both[WIDTH:]), on_cpu(layer.key)), step
    torch.manual_seed(0)
    plain = nn.Sequential(*(SharedStorage() for _ in range(5)))
    with torch.no_grad():
        for ours, theirs in zip(plain.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    plain = plain.to(compute_device)
    with torch.no_grad():
        for ours, theirs in zip(forward_of(model), forward_of(plain), strict=True):
            assert same(ours, theirs)
    assert_streamed(handle, model)


class Tied(Decoder):
    """One weight in several blocks: embedding and head, and the same projection in two layers."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        first: Any = self.layers[0]
        last: Any = self.layers[5]
        last.attention.query.weight = first.attention.query.weight
        last.mlp = first.mlp


@pytest.mark.core(checkpointing="non-reentrant")
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_weights_tied_across_blocks(checkpointing: str, compute_device: torch.device) -> None:
    dense = CASES[0]

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Tied()
        model.checkpointing = checkpointing
        return model

    batches = dense.on(compute_device)
    _, model = assert_exact(make, lambda model: train(model, batches, dense.forward), compute_device, 0.5)
    assert isinstance(model, Tied)
    assert model.head.weight is model.embedding.weight
    layers: Any = model.layers
    assert layers[5].mlp is layers[0].mlp


def test_batch_norm_statistics(compute_device: torch.device) -> None:
    """They change on the device, and are right on the host and in state_dict, also in its names and order."""

    batches = UNET.on(compute_device)

    def script(model: Any) -> Outcome:
        outcome = train(model, batches, UNET.forward)
        model.eval()
        with torch.no_grad():
            outcome.outputs.append(on_cpu(model(batches[0][0])))
        outcome.outputs.append(on_cpu(model.middle.first_norm.running_mean))
        model.middle.first_norm.reset_running_stats()
        with torch.no_grad():
            outcome.outputs.append(on_cpu(model(batches[0][0])))
        return outcome.read(model)

    handle, model = assert_exact(UNET.build, script, compute_device, UNET.share)
    assert all(buffer.device.type == "cpu" for buffer in model.buffers())
    handle.remove()
    assert all(buffer.device.type == "cpu" for buffer in model.buffers())


def test_sparse_embedding_gradients(compute_device: torch.device) -> None:
    if compute_device.type != "cpu":
        return  # the emulated accelerator has no sparse tensors

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Decoder()
        model.embedding.sparse = True
        return model

    dense = CASES[0]

    def script(model: Any) -> Outcome:
        batches = dense.on(compute_device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        outcome = Outcome()
        for batch in batches:
            for _ in range(2):  # accumulates
                output = model(batch[0])
                dense.loss(output, batch[1]).backward()
                outcome.outputs.append(on_cpu(output))
            assert model.embedding.weight.grad.is_sparse
            outcome.outputs.append(on_cpu(model.embedding.weight.grad.to_dense()))
            optimizer.step()
            optimizer.zero_grad()
        return outcome.read(model)

    assert_exact(make, script, compute_device)


def test_a_model_of_one_block(compute_device: torch.device) -> None:
    """Nothing to stream: the whole model fits, is exact, and comes once for each step."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(WIDTH, WIDTH)

    plain = train(make().to(compute_device), vectors(compute_device), mean_square)
    model = make()
    handle = offload(model, compute_device, 1.5)
    assert_same(train(model, vectors(compute_device), mean_square), plain)
    stats = handle.stats()
    assert weight_bytes(model) <= stats.device_peak_bytes <= stats.device_budget_bytes
    assert stats.onload_bytes >= 3 * weight_bytes(model)


def test_a_model_without_parameters(compute_device: torch.device) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Flatten())
    with headrace.offload(model, device=compute_device):
        assert model(torch.randn(2, 3)).device == compute_device


def test_tied_parameters_that_are_no_longer_one_are_refused(compute_device: torch.device) -> None:
    """As plain, a checkpoint that is assigned makes two of them: which of the two is meant is for the user to say."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.ones(2, 8).to(compute_device)
    with headrace.offload(model, device=compute_device):
        before = model(x).cpu()
        model.load_state_dict(state, assign=True)
        with pytest.raises(headrace.LayoutError, match=r"'0.weight' was offloaded as one that 2 modules share"):
            model(x)
        model[2].weight = model[0].weight
        assert torch.equal(model(x).cpu(), before)
        model[2].weight = nn.Parameter(torch.zeros(8, 8))
        with pytest.raises(headrace.LayoutError, match=r"model\.tie_weights"):
            model(x)
