"""Do operators, recurrent networks and the models of transformers and diffusers give the CPU's results, bit for bit?"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .models import MODELS, build_model
from .operators import CASES

pytestmark = pytest.mark.emu("random:0")
RECURRENT = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, tuple | list) else []


def run(function: Callable[..., Any], arguments: list[Tensor], device: str) -> list[Tensor | None]:
    """Results, then gradients of a weighted sum of all of them."""
    inputs = [argument.detach().clone().to(device) for argument in arguments]
    for tensor in inputs:
        tensor.requires_grad_(tensor.is_floating_point())
    results = leaves(function(*inputs))
    weighted = [
        (result.float() * torch.linspace(0.5, 1.5, result.numel()).to(device).view(result.shape)).sum()
        for result in results
        if result.requires_grad
    ]
    if weighted:
        torch.stack(weighted).sum().backward()
    return [
        *(result.detach().cpu() for result in results),
        *(x.grad.cpu() if x.grad is not None else None for x in inputs),
    ]


def assert_bit_equal(actual: Tensor | None, expected: Tensor | None, what: object) -> None:
    assert (actual is None) == (expected is None), what
    if actual is None or expected is None:
        return
    assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride()), what
    difference = (actual.double() - expected.double()).abs().max() if actual.numel() else 0
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num()), f"{what}: differs by up to {difference}"


@pytest.mark.parametrize("case", CASES)
def test_operator(emu_device: ModuleType, case: str) -> None:
    function, arguments = CASES[case]
    expected, actual = run(function, arguments, "cpu"), run(function, arguments, "emu")
    assert len(actual) == len(expected)
    for position, pair in enumerate(zip(actual, expected, strict=True)):
        assert_bit_equal(*pair, f"result or gradient {position}")


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_network(emu_device: ModuleType, kind: str, bidirectional: bool, packed: bool) -> None:
    torch.manual_seed(0)
    network = RECURRENT[kind](8, 6, num_layers=2, batch_first=True, bidirectional=bidirectional)
    rows = torch.randn(3, 5, 8)

    def forward(x: Tensor, *weights: Tensor) -> list[Tensor]:
        inputs = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2], batch_first=True) if packed else x
        named = dict(zip((name for name, _ in network.named_parameters()), weights, strict=True))
        output, state = torch.func.functional_call(network, named, (inputs,))
        return leaves([output.data if packed else output, state])

    arguments = [rows, *network.parameters()]
    for position, pair in enumerate(zip(run(forward, arguments, "emu"), run(forward, arguments, "cpu"), strict=True)):
        assert_bit_equal(*pair, position)
    with torch.inference_mode():
        moved = network.to("emu")(rows.to("emu"))[0].cpu()
        assert_bit_equal(moved, network.to("cpu")(rows)[0], "inference")


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # said by the CPU
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_variants(emu_device: ModuleType, kind: str) -> None:
    torch.manual_seed(0)
    x, state = torch.randn(3, 8), torch.randn(3, 6)
    cell = nn.LSTMCell(8, 6) if kind == "lstm" else nn.GRUCell(8, 6)
    states = (state, state.clone()) if kind == "lstm" else state
    expected = leaves(cell(x, states))
    moved = tuple(part.to("emu") for part in states) if kind == "lstm" else state.to("emu")
    for pair in zip(leaves(cell.to("emu")(x.to("emu"), moved)), expected, strict=True):
        assert_bit_equal(pair[0].detach().cpu(), pair[1].detach(), "cell")
    if kind == "lstm":
        projected = nn.LSTM(8, 6, proj_size=4, bias=False)
        expected = projected(x[None])[0].detach()
        assert_bit_equal(projected.to("emu")(x[None].to("emu"))[0].detach().cpu(), expected, "projections")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_model(emu_device: ModuleType, name: str, dtype: torch.dtype) -> None:
    def step(device: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, inputs = build_model(name)
        model.to(dtype).to(device).train()
        moved = {key: value.to(device, dtype if value.is_floating_point() else None) for key, value in inputs.items()}
        output = model(**moved)
        loss = output.loss if "labels" in inputs else output.sample.float().square().mean()
        loss.backward()
        gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach().cpu(), **gradients}

    expected, actual = step("cpu"), step("emu")
    assert actual.keys() == expected.keys()
    assert len(expected) > 20
    for key, value in expected.items():
        assert_bit_equal(actual[key], value, key)


@pytest.mark.emu("lazy")
def test_a_number_on_the_host_is_taken_at_the_launch(emu_device: ModuleType) -> None:
    factor = torch.tensor(2.0)
    product = torch.arange(4.0).to("emu") * factor
    factor.fill_(5)
    assert product.cpu().tolist() == [0.0, 2.0, 4.0, 6.0]
