"""Is what cannot work refused, before anything changes, by an error that says what, how much and what to do?"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from tests.matrix.models import DENSE, Decoder
from tests.support.compare import assert_same, on_cpu
from tests.support.held import weight_bytes

ENOUGH = 200_000
Offload = Callable[[Any], Any]


def refused(offload: Offload, error: type[Exception], *words: str, model: Any = None) -> None:
    """The call raises `error` with all the words, in order, and leaves the model as it was."""
    model = DENSE.build() if model is None else model
    identities = [id(p) for p in model.parameters()]
    classes = [type(module) for module in model.modules()]
    plain = [p for p in model.parameters() if p.device.type == "cpu" and p.layout == torch.strided]
    before = {str(index): on_cpu(p) for index, p in enumerate(plain)}
    with pytest.raises(error, match=".*".join(re.escape(word) for word in words)):
        offload(model)
    assert [id(p) for p in model.parameters()] == identities
    assert [type(module) for module in model.modules()] == classes
    assert_same({str(index): on_cpu(p) for index, p in enumerate(plain)}, before, "weights")


def with_settings(device: torch.device, **settings: Any) -> Offload:
    return lambda model: headrace.offload(model, device=device, **{"device_memory": ENOUGH, **settings})


# budgets -------------------------------------------------------------------------------------------------------------
def test_budget_below_the_largest_block(compute_device: torch.device) -> None:
    refused(
        with_settings(compute_device, device_memory=9_000, blocks=["layers.*"]),
        headrace.BudgetError,
        "block 'layers.",
        "KiB",
        "device_memory allows 8.79 KiB",
        "raise it to at least",
    )


@pytest.mark.parametrize(
    ("size", "error", "words"),
    [
        (-1, ValueError, ("device_memory=-1 is negative",)),
        ("-1GiB", ValueError, ("device_memory=-1GiB is negative",)),
        ("lots", ValueError, ("device_memory='lots' is not a size", "8GiB", "25%")),
        ("24", ValueError, ("device_memory='24' is 24 bytes", '"24GB"')),
        ("8 parsecs", ValueError, ("device_memory='8 parsecs'",)),
        ("", ValueError, ("device_memory=''",)),
        (True, TypeError, ("device_memory is True",)),
        (2.5, TypeError, ("device_memory is 2.5", "bytes as an int")),
        ([1], TypeError, ("device_memory is [1]",)),
    ],
)
def test_unreadable_budgets(
    size: Any, error: type[Exception], words: tuple[str, ...], compute_device: torch.device
) -> None:
    refused(with_settings(compute_device, device_memory=size), error, *words)


def test_host_memory_too_small(compute_device: torch.device) -> None:
    settings = with_settings(compute_device, host_memory="64KiB")
    refused(settings, headrace.BudgetError, "host memory", "host_memory allows 64 KiB")
    refused(with_settings(compute_device, host_memory="much"), ValueError, "host_memory='much'")


# devices -------------------------------------------------------------------------------------------------------------
def test_unknown_devices() -> None:
    refused(with_settings("abacus"), ValueError, "device='abacus'")  # type: ignore[arg-type]
    refused(with_settings("cuda:0"), ValueError, "'cuda:0' is not available here", "cpu")  # type: ignore[arg-type]
    refused(with_settings("meta"), ValueError, "'meta'")  # type: ignore[arg-type]


def test_device_that_does_not_exist(compute_device: torch.device) -> None:
    if compute_device.type != "cpu":
        refused(with_settings(torch.device("emu", 7)), ValueError, "emu:7", "does not exist", "2")


def test_device_without_memory_for_the_plan(compute_device: torch.device) -> None:
    """The budget is larger than what the device has: refused, or an error of memory that changes nothing."""
    if compute_device.type == "cpu":
        return
    from emulator import emu

    with emu.configured(device_memory=20_000):
        refused(with_settings(compute_device), headrace.BudgetError, "KiB")


# models --------------------------------------------------------------------------------------------------------------
def test_model_offloaded_already(compute_device: torch.device) -> None:
    model = DENSE.build()
    handle = headrace.offload(model, device=compute_device, device_memory=ENOUGH)
    again = with_settings(compute_device)
    refused(again, headrace.StateError, "the model is offloaded already", "remove()", model=model)
    refused(again, headrace.StateError, "the model is offloaded already", "remove()", model=model.layers[2])
    with pytest.raises(headrace.StateError, match="module '0' is offloaded already"):
        again(nn.Sequential(model))
    handle.remove()
    again(model)


def test_a_parameter_of_two_models(compute_device: torch.device) -> None:
    first, second = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))
    second[0].weight = first[0].weight
    handle = headrace.offload(first, device=compute_device)
    with pytest.raises(headrace.LayoutError, match=r"'0\.weight'.*another offloaded model.*as one.*remove\(\)"):
        headrace.offload(second, device=compute_device)
    handle.remove()
    headrace.offload(second, device=compute_device)


def test_hooks_of_accelerate(compute_device: torch.device) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = DENSE.build()
    add_hook_to_module(model.layers[1], AlignDevicesHook(execution_device="cpu"))
    refused(
        with_settings(compute_device),
        headrace.StateError,
        "'layers.1' carries an accelerate hook",
        "remove_hook_from_submodules",
        model=model,
    )


def test_hooks_of_diffusers(compute_device: torch.device) -> None:
    from diffusers.hooks import apply_group_offloading

    model = DENSE.build()
    device = torch.device("cpu")
    apply_group_offloading(model, onload_device=device, offload_device=device, offload_type="leaf_level")
    refused(with_settings(compute_device), headrace.StateError, "carries a diffusers hook", model=model)


def test_meta_parameters(compute_device: torch.device) -> None:
    with torch.device("meta"):
        model = Decoder()
    refused(with_settings(compute_device), headrace.LayoutError, "'embedding.weight'", "meta", "load", model=model)


def test_parameters_without_plain_bytes(compute_device: torch.device) -> None:
    sparse = DENSE.build()
    sparse.head.weight = nn.Parameter(torch.eye(48, 32).to_sparse())
    refused(with_settings(compute_device), headrace.LayoutError, "'head.weight'", "sparse", "to_dense()", model=sparse)

    lazy = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8))
    with pytest.raises(headrace.LayoutError, match=r"'1\.weight'.*not initialised"):
        with_settings(compute_device)(lazy)

    class Packed(nn.Parameter):
        """A parameter whose bytes are elsewhere."""

    packed = DENSE.build()
    packed.head.weight = Packed(torch.randn(48, 32))
    refused(with_settings(compute_device), headrace.LayoutError, "'head.weight'", "Packed", model=packed)


def test_not_a_module(compute_device: torch.device) -> None:
    with pytest.raises(TypeError, match="model"):
        headrace.offload([nn.Linear(2, 2)], device=compute_device)  # type: ignore[arg-type]


# blocks --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("blocks", "error", "words"),
    [
        (["layers.*", "layers.3"], ValueError, ("blocks overlap", "layers.3")),
        (["layers.3", "layers.3.mlp"], ValueError, ("blocks overlap", "layers.3")),
        (["layers.99"], ValueError, ("'layers.99' matches no module", "named_modules()")),
        ([3], TypeError, ("blocks=3 names no modules", "give modules and name patterns")),
        ("many", ValueError, ("blocks='many'",)),
        (-5, ValueError, ("blocks=-5 is negative",)),
        (1.5, TypeError, ("blocks",)),
    ],
)
def test_blocks_that_make_no_sense(
    blocks: Any, error: type[Exception], words: tuple[str, ...], compute_device: torch.device
) -> None:
    refused(with_settings(compute_device, blocks=blocks), error, *words)


def test_blocks_of_another_model(compute_device: torch.device) -> None:
    refused(with_settings(compute_device, blocks=[nn.Linear(2, 2)]), ValueError, "Linear", "not a part of the model")
    refused(with_settings(compute_device, blocks=[nn.ModuleList([nn.Linear(2, 2)])]), ValueError, "Linear")
    refused(with_settings(compute_device, resident=[nn.Linear(2, 2)]), ValueError, "resident", "Linear")
    refused(with_settings(compute_device, resident=["nothing*"]), ValueError, "resident='nothing*' matches no")


def test_a_block_without_parameters(compute_device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    refused(with_settings(compute_device, blocks=[model[1]]), ValueError, "block '1' holds no parameters", model=model)


# other settings ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"prefetch": -1}, ValueError, ("prefetch=-1 is negative",)),
        ({"prefetch": "far"}, TypeError, ("prefetch='far'", "auto")),
        ({"prefetch": True}, TypeError, ("prefetch=True",)),
        ({"param_dtype": "bf16"}, TypeError, ("param_dtype='bf16'", "torch.bfloat16")),
        ({"param_dtype": torch.int8}, TypeError, ("param_dtype=torch.int8",)),
        ({"grad_dtype": torch.int32}, TypeError, ("grad_dtype=torch.int32",)),
    ],
)
def test_other_settings(
    settings: dict[str, Any], error: type[Exception], words: tuple[str, ...], compute_device: torch.device
) -> None:
    refused(with_settings(compute_device, **settings), error, *words)


def test_a_budget_that_just_fits_is_accepted(compute_device: torch.device) -> None:
    """What the message of the error proposes works."""
    model = DENSE.build()
    with pytest.raises(headrace.BudgetError) as refusal:
        headrace.offload(model, device=compute_device, device_memory=12_000, blocks=["layers.*"])
    proposed = re.search(r"at least ([0-9.]+ \w+)", str(refusal.value))
    assert proposed is not None
    handle = headrace.offload(model, device=compute_device, device_memory=proposed[1], blocks=["layers.*"])
    tokens = DENSE.batches(1)[0][0]
    model(tokens).sum().backward()
    stats = handle.stats()
    assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes < weight_bytes(model) / 2
