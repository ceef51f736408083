"""Are forwards exact that save what few models save, or save it where few do?"""

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import headrace
from tests.activations.models import ROWS, SAVED_BYTES, WIDTH, rows, step
from tests.support.compare import assert_same


class Between(nn.Module):
    """Linear maps and tanh with something odd behind each."""

    def __init__(self, odd: Callable[[Tensor], Tensor], count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.odd(torch.tanh(layer(x)))
        return x


class SavesViews(torch.autograd.Function):
    """Saves inputs, outputs, views of each kind, nothing, and no elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        views = y[3:7], y.t(), y.expand(2, *y.shape), y.as_strided((4, 4), (1, 1)), y[:0]
        ctx.save_for_backward(x, y, None, *views, x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        x, y, none, part, turned, expanded, overlapping, empty, again = ctx.saved_tensors
        assert none is None
        assert empty.numel() == 0
        assert expanded.stride() == (0, WIDTH, 1)
        assert overlapping.stride() == (1, 1)
        sums = part.sum() + overlapping.sum() + empty.sum()
        return gradient * y + expanded.sum(0) + turned.t() + sums + again - x / 2


class SavesLowPrecision(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.to(torch.float8_e4m3fn), x.bfloat16(), x.cpu().exp())
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        eighth, half, on_cpu = ctx.saved_tensors
        assert on_cpu.device.type == "cpu"
        return gradient * eighth.float() + half.float() + on_cpu.to(gradient.device)


def complex_conjugates(x: Tensor) -> Tensor:
    number = torch.complex(x, x / 2)
    product = number.conj() * number.t().conj().t() * number.conj().exp()
    return torch.tanh(torch.view_as_real(product).sum(-1) + number.conj().imag.sin())


def selective_checkpoint(x: Tensor) -> Tensor:
    def policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        saves = operator in (torch.ops.aten.mm.default, torch.ops.aten.exp.default)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    inner = lambda y: torch.tanh(y.exp() @ y.t() @ y / 1000)  # noqa: E731
    return checkpoint(inner, x, use_reentrant=False, context_fn=contexts)  # type: ignore[return-value]


def nested_checkpoints(x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return checkpoint(lambda z: z.exp().tanh(), y.sin(), use_reentrant=False)  # type: ignore[return-value]

    return checkpoint(inner, checkpoint(inner, x, use_reentrant=True), use_reentrant=False)  # type: ignore[return-value]


def saved_on_cpu_inside(x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        x = x.exp().tanh()
    return x.sin()


def mapped(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: torch.tanh(row.exp() * row.sum()))(x)  # type: ignore[no-any-return]


def gradient_inside(x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(x.exp().sin().sum(), x, create_graph=True)
    return torch.tanh(gradient * x)


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.mul_(0.5)
    y[3:5].mul_(2)
    y.relu_()
    z = y + 1
    return z.exp_() / 10


def halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first.sigmoid() * second, second.exp().tanh()], -1)


def expanded(x: Tensor) -> Tensor:
    return x.unsqueeze(0).expand(3, -1, -1).mul(x).sum(0).tanh()


def part_of_a_large_buffer(x: Tensor) -> Tensor:
    buffer = torch.empty(10, *x.shape, device=x.device)
    buffer[3] = x.detach()
    return x * buffer[3].sin() * buffer[3]


def sparse(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return x.tanh()  # the emulated device has no sparse kernels, nor nested ones
    return torch.tanh(torch.sparse.mm(torch.eye(ROWS).to_sparse(), x) * x)


def nested_tensors(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return x.tanh()
    parts = [x[:10].exp(), x[10:].exp()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        nested = torch.nested.as_nested_tensor(parts)
        square = nested * nested
        ragged = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    return x * (torch.nested.to_padded_tensor(square, 0.0).sum() + (ragged * ragged).values()).tanh()


def attention(x: Tensor) -> Tensor:
    heads = x.view(1, 4, ROWS, -1)
    result = nn.functional.scaled_dot_product_attention(heads, heads, heads.sin(), is_causal=True)
    return result.reshape(ROWS, WIDTH)


ODD: list[Any] = [
    SavesViews.apply,
    SavesLowPrecision.apply,
    complex_conjugates,
    selective_checkpoint,
    nested_checkpoints,
    saved_on_cpu_inside,
    mapped,
    gradient_inside,
    in_place,
    halves,
    expanded,
    part_of_a_large_buffer,
    sparse,
    nested_tensors,
    attention,
]


def check(odd: Callable[[Tensor], Tensor], device: torch.device, budget: int) -> None:
    plain, model = Between(odd).to(device), Between(odd).to(device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=budget) as handle:
        for seed in range(3):
            assert_same(step(model, rows(device, seed)), step(plain, rows(device, seed)))
        assert handle.stats().offloads > 0
    assert handle.stats().host_held_bytes == 0


# PyTorch 2.15 tells that a selective checkpoint keeps tensors past the hooks, and that it will not in future.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: getattr(odd, "__qualname__", "").split(".")[0])
def test_odd_forwards(odd: Callable[[Tensor], Tensor], compute_device: torch.device) -> None:
    check(odd, compute_device, budget=0)


@pytest.mark.emu("random:0", "random:1", "lazy")
@pytest.mark.parametrize("budget", [0, 3 * SAVED_BYTES])
def test_several_streams(emu_device: ModuleType, budget: int) -> None:
    """Memory that a stream saved must not be given out while a copy that another one waited for reads it."""
    side = torch.Stream("emu")

    def on_two_streams(x: Tensor) -> Tensor:
        main = torch.accelerator.current_stream()
        side.wait_event(main.record_event())
        x.record_stream(side)  # type: ignore[arg-type]
        with side:
            y = x.exp().tanh()
            for _ in range(3):
                y = (y * 1.01).sin()
        z = x.sin().cos()
        main.wait_event(side.record_event())
        y.record_stream(main)  # type: ignore[arg-type]
        return y + z

    check(on_two_streams, torch.device("emu", 1), budget)
    assert emu_device.take_reports() == []


def test_a_value_that_is_dropped(compute_device: torch.device) -> None:
    """Logging in grad mode: what it saved is given up, and then saved again by what comes after it."""
    metrics: list[float] = []

    def logged(x: Tensor) -> Tensor:
        y = x * 2
        metrics.append(y.pow(2).mean().item())
        return y * y.sin()

    model = Between(logged).to(compute_device)
    plain = step(model, rows(compute_device))
    expected = list(metrics)
    for settings in ({"device_memory": 0}, {}, {"all_leave": True}):
        with headrace.offload_activations(model, min_bytes=0, **settings) as handle:
            for _ in range(3):
                metrics.clear()
                assert_same(step(model, rows(compute_device)), plain)
                assert metrics == expected
            assert handle.stats().offload_bytes > 0
            assert handle.stats().host_held_bytes == 0


def test_what_is_dropped_counts_alike_in_every_forward(compute_device: torch.device) -> None:
    """Recorded or planned: the plan fits, and what the host has of it is free when backward is over."""

    def logged(x: Tensor) -> Tensor:
        y = x * x.sin()
        y.cos().sum().item()
        return y.tanh() * y

    model = Between(logged).to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=4 * SAVED_BYTES) as handle:
        for count in (ROWS, ROWS, ROWS, 2 * ROWS, 3 * ROWS, 4 * ROWS):
            step(model, rows(compute_device, count=count))
            assert handle.stats().host_held_bytes == 0
        assert handle.stats().offload_bytes > 0
        assert handle.stats().similar_forwards == 3
