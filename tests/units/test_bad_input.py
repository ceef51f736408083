"""Is what cannot work refused with a name, the numbers and the next action, and the model left as it was?"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

import headrace
from headrace.config import parse_bytes
from headrace.weights.passes import attachment
from tests.support.compare import assert_same_gradients
from tests.support.models import some_tokens
from tests.units.models import Decoder, Snapshot

LARGEST_BYTES, KEPT_BYTES = 4096, 768  # of the Decoder: its embedding; its positions and the scales of its layers


@pytest.fixture
def model() -> Decoder:
    return Decoder()


@pytest.fixture(autouse=True)
def _no_watch_is_left() -> Iterator[None]:
    """Whatever is refused, PyTorch's global registration hooks are not left behind."""
    before = len(attachment._registrations.hooks._users)
    yield
    assert len(attachment._registrations.hooks._users) == before


def refused(
    model: nn.Module, error: type[Exception], match: str, device: torch.device | str = "cpu", **settings: Any
) -> str:
    """The message with which `offload` refuses; the model is as it was."""
    before = Snapshot(model)
    with pytest.raises(error, match=match) as caught:
        headrace.offload(model, device=device, **settings)
    before.assert_unchanged()
    message = str(caught.value)
    if isinstance(caught.value, headrace.BudgetError):  # the budget that is named first is the one that is too small
        assert caught.value.tier == re.findall(r"(device|host)_memory", message)[0]
    return message


def works(model: nn.Module, device: torch.device, **settings: Any) -> None:
    with headrace.offload(model, device=device, **settings):
        model(some_tokens()).sum().backward()


# budgets ------------------------------------------------------------------------------------------------------------
def test_a_budget_below_the_largest_block(compute_device: torch.device, model: Decoder) -> None:
    message = refused(
        model,
        headrace.BudgetError,
        r"block 'embedding' needs 4 KiB beside 768 B of resident.*device_memory allows 3.91 KiB; raise it to at least",
        compute_device,
        device_memory=4000,
        blocks=["embedding", "head"],
    )
    advised = message.split("at least ")[1].split(",")[0]
    assert LARGEST_BYTES + KEPT_BYTES <= parse_bytes(advised) < 1.01 * (LARGEST_BYTES + KEPT_BYTES)
    works(model, compute_device, device_memory=advised, blocks=["embedding", "head"])


def test_the_size_of_blocks_that_is_advised_works(compute_device: torch.device) -> None:
    model = Decoder(vocabulary=16, layers=3)
    blocks = [model.layers]
    message = refused(
        model, headrace.BudgetError, "or pass smaller blocks", compute_device, blocks=blocks, device_memory=2700
    )
    works(model, compute_device, device_memory=2700, blocks=message.split("blocks='")[1].split("'")[0])


@pytest.mark.parametrize("size", [0, "0B"])
def test_no_memory_at_all(model: Decoder, size: Any) -> None:
    refused(model, headrace.BudgetError, r"device_memory allows 0 B; raise it to at least 4.75 KiB", device_memory=size)


def test_residents_above_the_budget(compute_device: torch.device, model: Decoder) -> None:
    refused(
        model,
        headrace.BudgetError,
        r"beside 9.38 KiB of resident weights .*device_memory allows 8 KiB; raise it to at least 1\d",
        compute_device,
        device_memory="8KiB",
        resident=["layers.[0-3]"],
    )


def test_buffers_count(compute_device: torch.device, model: Decoder) -> None:
    model.register_buffer("table", torch.zeros(100_000))
    refused(
        model,
        headrace.BudgetError,
        r"beside 391 KiB of resident weights and buffers",
        compute_device,
        device_memory="64KiB",
    )


def test_a_budget_may_be_a_share_of_the_weights(compute_device: torch.device, model: Decoder) -> None:
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with headrace.offload(model, device=compute_device, device_memory="150%", host_memory="8G") as handle:
        assert handle.stats().device_budget_bytes == weight_bytes * 3 // 2


@pytest.mark.parametrize("setting", ["device_memory", "host_memory"])
@pytest.mark.parametrize(
    ("size", "error", "match"),
    [
        ("8 gigs", ValueError, r"='8 gigs' is not a size; give bytes"),
        ("-8GiB", ValueError, r"=-8GiB is negative; give a size of 0 bytes or more"),
        ("24", ValueError, r"='24' is 24 bytes; did you mean \"24GB\"\?"),
        (-1, ValueError, r"=-1 is negative; give"),
        (0.5, TypeError, r" is 0.5; give bytes"),
    ],
)
def test_a_budget_that_is_no_size(model: Decoder, setting: str, size: Any, error: Any, match: str) -> None:
    refused(model, error, setting + match, **{setting: size})


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_a_host_budget_below_the_weights(compute_device: torch.device, share: float) -> None:
    """Also one that is short of nothing but the rest of the last page: refused, and before anything is changed."""
    model = Decoder(width=30)
    budget_bytes = int(sum(parameter.nbytes for parameter in model.parameters()) * share)
    message = refused(
        model, headrace.BudgetError, r"weights need .* of host memory .*host_memory allows .* raise it", compute_device,
        host_memory=budget_bytes,
    )  # fmt: skip
    advised = message.split("at least ")[1].split(",")[0]
    with headrace.offload(model, device=compute_device, host_memory=advised), torch.no_grad():
        model(some_tokens())


@pytest.mark.emu("lazy", allocator="exact", device_memory=1 << 20)
def test_a_device_without_memory_for_the_plan(emu_device: Any) -> None:
    model = Decoder(width=128, layers=8)
    refused(
        model,
        headrace.BudgetError,
        r"device_memory=1.2 MiB is more than emu:1 has free, [0-9.]+ .iB; lower it, or end what else",
        "emu",
        device_memory="1.2MiB",
    )
    taken = torch.empty(980 << 10, dtype=torch.uint8, device="emu")
    refused(model, headrace.BudgetError, r"device_memory allows [23]\d.*; raise it", "emu")  # a tenth less than is free
    del taken
    works(model, torch.device("emu", 1), device_memory="300KiB")


# devices and settings -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("device", "match"),
    [
        ("gpu", r"device='gpu' is not a device; give one such as"),
        ("xpu:3", r"device='xpu:3' is not available here; available: .* and cpu"),
        ("meta", r"device='meta' is not available here"),
    ],
)
def test_an_unknown_device(model: Decoder, device: str, match: str) -> None:
    refused(model, ValueError, match, device)


def test_a_device_index_that_does_not_exist(emu_device: Any, model: Decoder) -> None:
    refused(model, ValueError, r"device='emu:7' does not exist: there are 2 devices of type 'emu'", "emu:7")


@pytest.mark.parametrize("device", [3.5, ["cpu"]])
def test_what_is_no_device(model: Decoder, device: Any) -> None:
    refused(model, TypeError, "device", device)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"prefetch": -1}, ValueError, r"prefetch=-1 is negative; give"),
        ({"prefetch": "some"}, TypeError, r"prefetch='some' is neither"),
        ({"prefetch": True}, TypeError, r"prefetch=True is neither"),
        ({"param_dtype": torch.int8}, TypeError, r"param_dtype=torch.int8 is not a floating-point"),
        ({"grad_dtype": "float32"}, TypeError, r"grad_dtype='float32' is not a floating-point"),
        ({"blocks": ["no.such.*"]}, ValueError, r"blocks='no.such.\*' matches no module"),
        ({"blocks": ["layers.*", "layers.0.up"]}, ValueError, r"blocks overlap: 'layers.0"),
        ({"blocks": "many"}, ValueError, r"blocks='many' is not a size"),
        ({"blocks": 2.5}, TypeError, r"blocks=2.5 is neither"),
        ({"blocks": 0}, ValueError, r"blocks=0 names no blocks; give"),
        ({"blocks": ()}, ValueError, r"blocks=\(\) names no blocks; give"),
        ({"disk": ""}, ValueError, r"disk='' names no path; give one"),
        ({"resident": None}, TypeError, r"resident=None names no modules"),
        ({"resident": "no.such"}, ValueError, r"resident='no.such' matches no module"),
        ({"resident": nn.Linear(2, 2)}, ValueError, r"resident names a Linear that is not a part"),
    ],
)
def test_settings_that_make_no_sense(model: Decoder, settings: Any, error: Any, match: str) -> None:
    refused(model, error, match, **settings)


def test_what_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"model is a dict; give a torch.nn.Module"):
        headrace.offload({})  # type: ignore[arg-type]


# models -------------------------------------------------------------------------------------------------------------
def test_a_model_that_is_offloaded_already(compute_device: torch.device, model: Decoder) -> None:
    with headrace.offload(model, device=compute_device):
        for part, name in ((model, "the model"), (model.layers[1], "the model"), (nn.Sequential(model), "module '0'")):
            with pytest.raises(headrace.StateError, match=rf"{name} is offloaded already; .*remove\(\)"):
                headrace.offload(part, device=compute_device)
        model(some_tokens()).sum().backward()  # and the handle that there is goes on
    before = Snapshot(model)
    works(model, compute_device)
    assert all(type(module).__name__ == type(module).__qualname__ for module in model.modules())
    before_facts = {key: value for key, value in before._facts.items() if key.startswith("module")}
    assert {key: value for key, value in Snapshot(model)._facts.items() if key.startswith("module")} == before_facts


def test_accelerates_hooks(model: Decoder) -> None:
    add_hook_to_module(model.layers[1], ModelHook())
    refused(model, headrace.StateError, r"module 'layers.1' carries an accelerate hook.*remove_hook_from_submodules")


def test_accelerates_offloading(model: Decoder) -> None:
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(headrace.StateError, match="carries an accelerate hook"):
        headrace.offload(model, device="cpu")


def test_diffusers_hooks(model: Decoder) -> None:
    from diffusers.hooks import HookRegistry
    from diffusers.hooks import ModelHook as DiffusersHook

    registry = HookRegistry.check_if_exists_or_initialize(model.layers[2])
    registry.register_hook(DiffusersHook(), "group_offloading")
    refused(model, headrace.StateError, r"module 'layers.2' carries a diffusers hook.*disable group offloading first")


def put(model: Decoder, parameter: nn.Parameter) -> Decoder:
    model.layers[1].up.weight = parameter
    return model


def quantised() -> nn.Parameter:
    return nn.Parameter(torch.quantize_per_tensor(torch.ones(16, 16), 0.1, 0, torch.qint8), requires_grad=False)


@pytest.mark.filterwarnings("ignore:.*quant:UserWarning", "ignore:.*quantize:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Parameter(torch.empty(16, 16, device="meta")), "on the meta device .* pass checkpoint="),
        (lambda: nn.Parameter(torch.eye(16).to_sparse()), r"layout is torch.sparse_coo; call to_dense\(\)"),
        (quantised, "torch.qint8 is quantised; call dequantize"),
        (nn.parameter.UninitializedParameter, "not initialised yet; run the lazy module once"),
    ],
)
def test_parameters_that_have_no_plain_bytes(model: Decoder, make: Any, reason: str) -> None:
    match = rf"parameter 'layers.1.up.weight' cannot be offloaded: .*{reason}"
    refused(put(model, make()), headrace.LayoutError, match)


def interleaved() -> nn.Sequential:
    """Columns of one matrix, in two blocks."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    both = torch.randn(8, 16)
    model[0].weight, model[1].weight = nn.Parameter(both[:, :8]), nn.Parameter(both[:, 8:])
    return model


def in_one_memory() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    return model


def test_two_parameters_in_the_same_memory(compute_device: torch.device) -> None:
    """They are refused where a write to one would no longer be one to the other, and both may be written to."""
    model = in_one_memory()
    for settings in ({"blocks": [*model]}, {"blocks": [model], "param_dtype": torch.bfloat16}):
        with pytest.raises(headrace.LayoutError, match="are two that lie in the same memory"):
            headrace.offload(model, device=compute_device, **settings)  # type: ignore[arg-type]
    for works, blocks in ((model, [model]), (interleaved(), None), (in_one_memory().requires_grad_(False), None)):
        headrace.offload(works, device=compute_device, blocks=blocks or [*works]).remove()


def with_view(model: Decoder, where: str) -> Decoder:
    weight = model.layers[1].up.weight
    half: Any = weight[:8] if where == "slice" else weight.detach().t() if where == "transposed" else weight.data
    model.layers[0].kept = {"list": [None, half], "dict": {"a": half}}.get(where, half)
    return model


@pytest.mark.parametrize("where", ["slice", "transposed", "data", "list", "dict"])
def test_an_attribute_that_is_a_view_of_a_weight(compute_device: torch.device, where: str) -> None:
    """It would keep the values of before, and no update would reach it."""
    refused(
        with_view(Decoder(), where),
        headrace.LayoutError,
        r"attribute 'layers.0.kept', of shape .*, is a view of parameter 'layers.1.up.weight', and .*; make it in for",
        compute_device,
    )


def test_attributes_that_are_no_views_of_trained_weights(compute_device: torch.device) -> None:
    """Another part of the same memory, the parameter itself, a value of its own, and views of what is not trained."""
    both = torch.randn(2, 4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(both[0])
    kept: Any = model
    kept.other, kept.copied, kept.itself = both[1], model[1].weight.detach().clone(), [model[1].weight]
    headrace.offload(model, device=compute_device).remove()
    with headrace.offload(model, device=compute_device):
        model(torch.ones(1, 4, device=compute_device)).sum().backward()
    frozen = with_view(Decoder(), "data").requires_grad_(False)
    with headrace.offload(frozen, device=compute_device):
        frozen(some_tokens())


def test_a_scripted_part(compute_device: torch.device) -> None:
    """A class that nothing can be mixed into."""
    model = Decoder()
    with torch.no_grad():
        model.traced = torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4))
    refused(model, headrace.StateError, r"'traced' .*TorchScript, which headrace cannot manage", compute_device)
    del model.traced
    works(model, compute_device)


def test_an_error_half_way_is_undone(compute_device: torch.device, model: Decoder, monkeypatch: Any) -> None:
    """The device runs out when the residents are brought: another process may have taken what was free."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("of another process")

    monkeypatch.setattr("headrace.weights.movement.residency.DeviceBuffers.allocate", full)
    before = Snapshot(model, addresses=False)  # the values lie in other memory now
    with pytest.raises(torch.OutOfMemoryError, match="of another process"):
        headrace.offload(model, device=compute_device, device_memory="1MiB")
    before.assert_unchanged()
    monkeypatch.undo()
    works(model, compute_device)


# after offloading ---------------------------------------------------------------------------------------------------
def test_a_shape_that_changes_later(compute_device: torch.device, model: Decoder) -> None:
    weight, kept = model.layers[1].up.weight, model.layers[1].up.weight.detach().clone()
    with headrace.offload(model, device=compute_device):
        model(some_tokens()).sum().backward()
        weight.data = torch.zeros(16, 20)
        with pytest.raises(
            headrace.LayoutError,
            match=r"'layers.1.up.weight' was offloaded with shape \(16, 16\) and now has shape \(16, 20\); call remove",
        ):
            model(some_tokens())
        weight.data = kept.clone()
        model.zero_grad()
        model(some_tokens()).sum().backward()  # set right, the model goes on
        assert weight.grad is not None
    assert torch.equal(weight, kept)


def test_a_weight_that_changes_between_forward_and_backward(compute_device: torch.device, model: Decoder) -> None:
    with headrace.offload(model, device=compute_device, device_memory="8KiB"):
        loss = model(some_tokens()).sum()
        with torch.no_grad():
            model.layers[1].down.weight.mul_(2)
        with pytest.raises(
            headrace.WeightChangedError,
            match=r"'layers.1.down.weight' was modified in place .*version \d+; expected version \d+.* backward before",
        ):
            loss.backward()
        model.zero_grad()
        model(some_tokens()).sum().backward()
        expected = Decoder()
        expected.load_state_dict(model.state_dict())
        expected.to(compute_device)(some_tokens().to(compute_device)).sum().backward()
        assert_same_gradients(model, expected)
