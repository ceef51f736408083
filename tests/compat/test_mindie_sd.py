"""Does code written for MindIE-SD's enable_offload run, exactly, and where the original could not?

A comment that begins with "There" says what MindIE-SD's own function did in the case that is tested.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.compat import disable_offload, enable_offload, handle_of
from tests.compat.models import run_steps
from tests.support.compare import assert_same
from tests.support.models import Layer, Stack, seeded

pytestmark = pytest.mark.core(device="emu")

WIDTH = 64
BLOCK_BYTES = 2 * (WIDTH * WIDTH + WIDTH) * 4
INPUTS = torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(0))  # (steps, batch, width)


class Dit(nn.Module):
    """Something before, blocks in sequence, something after. `skip` names blocks that a step cache leaves out."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.transformer_blocks = nn.ModuleList(
            Layer(WIDTH, WIDTH, norm=False, activation=nn.functional.gelu) for _ in range(count)
        )
        self.after = nn.Linear(WIDTH, WIDTH)
        self.skip: frozenset[int] = frozenset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for index, block in enumerate(self.transformer_blocks):
            if index not in self.skip:
                x = block(x)
        return self.after(x)


def stats_of(model: nn.Module) -> headrace.Stats:
    return handle_of(model).stats()


def forward(model: nn.Module, device: torch.device, x: torch.Tensor = INPUTS[0]) -> torch.Tensor:
    with torch.no_grad():
        return model(x.to(device)).cpu()


@pytest.mark.parametrize("reserved", [0, 1, 2, 3, 7])
def test_inference_is_exact_and_the_peak_is_that_of_the_original(device: torch.device, reserved: int):
    expected = [forward(seeded(Dit), torch.device("cpu"), x) for x in INPUTS]
    model = seeded(Dit)
    assert enable_offload(model, model.transformer_blocks, min_reserved_blocks_count=reserved) is None
    model.to(device)
    for x, output in zip(INPUTS, expected, strict=True):
        assert torch.equal(forward(model, device, x), output)
    stats = stats_of(model)
    around = 2 * (WIDTH * WIDTH + WIDTH) * 4
    assert stats.device_peak_bytes <= around + min(2 * reserved + 1, 8) * BLOCK_BYTES
    travelling = (8 - reserved) * BLOCK_BYTES
    assert stats.onload_bytes >= travelling
    assert stats.offload_bytes == 0


def test_two_blocks_stay_unless_the_caller_says_otherwise(device: torch.device):
    model, by_default = seeded(Dit), seeded(Dit)
    enable_offload(model, model.transformer_blocks, 2)
    enable_offload(by_default, by_default.transformer_blocks)
    assert stats_of(by_default).device_budget_bytes == stats_of(model).device_budget_bytes


# There, backward failed.
@pytest.mark.parametrize("reserved", [0, 2])
def test_training_is_exact(device: torch.device, reserved: int):
    plain = run_steps(seeded(Dit), list(INPUTS))
    model = seeded(Dit)
    enable_offload(model, model.transformer_blocks, reserved)
    assert_same(run_steps(model, list(INPUTS.to(device))), plain)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    stats = stats_of(model)
    assert stats.onload_bytes > 0
    assert stats.device_peak_bytes <= stats.device_budget_bytes


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": "a model"}, TypeError, "model is a str; give a torch.nn.Module"),
        ({"blocks": []}, TypeError, "blocks is a list; give a torch.nn.ModuleList"),
        ({"blocks": nn.Sequential(nn.Linear(1, 1))}, TypeError, "blocks is a Sequential"),
        ({"blocks": nn.ModuleList()}, ValueError, "blocks is empty"),
        ({"min_reserved_blocks_count": 1.0}, TypeError, "min_reserved_blocks_count is a float; give an int"),
        ({"min_reserved_blocks_count": True}, TypeError, "min_reserved_blocks_count is a bool; give an int"),
        ({"min_reserved_blocks_count": -1}, ValueError, "min_reserved_blocks_count is -1; give 0 to 7"),
        ({"min_reserved_blocks_count": 8}, ValueError, "8; give 0 to 7, fewer than the 8 blocks"),
        ({"blocks": nn.ModuleList([nn.Linear(1, 1)] * 3)}, ValueError, "not a part of the model"),
    ],
)
def test_errors_have_the_types_of_the_original(change: dict[str, Any], error: type[Exception], says: str):
    model = Dit()
    arguments = {"model": model, "blocks": model.transformer_blocks, "min_reserved_blocks_count": 2} | change
    with pytest.raises(error, match=says):
        enable_offload(**arguments)
    assert forward(model, torch.device("cpu")).shape == INPUTS[0].shape


def test_a_second_call_that_fails_leaves_the_first_as_it_was(device: torch.device):
    expected = forward(seeded(Dit), torch.device("cpu"))
    model = seeded(Dit)
    enable_offload(model, model.transformer_blocks, 3)
    with pytest.raises(ValueError, match="not a part of the model"):
        enable_offload(model, nn.ModuleList([nn.Linear(1, 1)] * 3))
    reserved = seeded(Dit)
    enable_offload(reserved, reserved.transformer_blocks, 3)
    assert stats_of(model).device_budget_bytes == stats_of(reserved).device_budget_bytes
    assert torch.equal(forward(model, device), expected)
    disable_offload(model)


def test_a_block_that_is_no_module_is_refused():
    model = Dit()
    model.transformer_blocks._modules["3"] = "a block"
    with pytest.raises(TypeError, match=r"blocks\[3\] is a str; give a torch.nn.Module"):
        enable_offload(model, model.transformer_blocks)


# There, state_dict() had every block twice, once by another name.
def test_the_model_keeps_its_names_and_its_attributes(device: torch.device):
    model, plain = seeded(Dit), seeded(Dit)
    attributes = set(vars(model))
    enable_offload(model, model.transformer_blocks)
    forward(model, device)
    methods = {"compile", "zero_grad"}  # which the model has as before
    assert {name for name in vars(model) if not name.startswith("_")} - methods <= attributes
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), tensor), name


# There, a second list of blocks crashed.
def test_two_lists_of_blocks_travel(device: torch.device):
    class DoubleStream(Dit):
        def __init__(self) -> None:
            super().__init__(4)
            self.single_blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            for block in self.single_blocks:
                x = x + block(x)
            return x

    expected = forward(seeded(DoubleStream), torch.device("cpu"))
    model = seeded(DoubleStream)
    enable_offload(model, model.transformer_blocks, 1)
    enable_offload(model, model.single_blocks, 2)
    for _ in range(3):
        assert torch.equal(forward(model, device), expected)
    single = (WIDTH * WIDTH + WIDTH) * 4
    stats = stats_of(model)
    assert stats.device_peak_bytes <= 2 * single + (1 * BLOCK_BYTES + 2 * single) + 3 * BLOCK_BYTES
    assert stats.onload_bytes >= 3 * BLOCK_BYTES + 4 * single


# There, these were a segmentation fault.
@pytest.mark.parametrize("sharing", ["tied", "views"])
def test_weights_shared_between_blocks_are_exact(device: torch.device, sharing: str):
    def shared() -> nn.Module:
        model = Dit()
        blocks = model.transformer_blocks
        if sharing == "tied":
            blocks[6].up.weight = blocks[3].up.weight
        else:
            both = torch.randn(2, WIDTH, WIDTH) * 0.1
            blocks[3].up.weight, blocks[3].down.weight = nn.Parameter(both[0]), nn.Parameter(both[1])
        return model

    expected = forward(seeded(shared), torch.device("cpu"))
    model = seeded(shared)
    enable_offload(model, model.transformer_blocks)
    for _ in range(3):
        assert torch.equal(forward(model, device), expected)


# There, a block that was skipped was an error when it came back, as with step caches.
def test_blocks_may_be_skipped_and_come_back(device: torch.device):
    model, plain = seeded(Dit), seeded(Dit)
    enable_offload(model, model.transformer_blocks, 1)
    for skip in (set(), {3}, {2, 3, 7}, set(range(8)), {0}, set()):
        model.skip = plain.skip = frozenset(skip)
        assert torch.equal(forward(model, device), forward(plain, torch.device("cpu")))


# There, weights that were merged after enabling were lost.
def test_merged_weights_are_seen(device: torch.device):
    model, plain = seeded(Dit), seeded(Dit)
    enable_offload(model, model.transformer_blocks, 1)
    forward(model, device)
    for each in (model, plain):
        for block in each.transformer_blocks:
            block.up.weight.data += 0.25
            block.down.weight.data = block.down.weight.data * 2
    for _ in range(2):
        assert torch.equal(forward(model, device), forward(plain, torch.device("cpu")))


# There, offloading could not be undone.
def test_offloading_can_be_disabled_and_enabled_again(device: torch.device):
    model = seeded(Dit)
    before = copy.deepcopy(model.state_dict())
    expected = forward(seeded(Dit), torch.device("cpu"))
    for reserved in (0, 3):
        enable_offload(model, model.transformer_blocks, reserved)
        assert torch.equal(forward(model, device), expected)
        disable_offload(model)
        assert type(model) is Dit
        assert torch.equal(forward(model, torch.device("cpu")), expected)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for ask in (disable_offload, handle_of):
        with pytest.raises(ValueError, match="this Dit is not offloaded"):
            ask(model)


def test_enabling_again_changes_the_count(device: torch.device):
    model = seeded(Dit)
    enable_offload(model, model.transformer_blocks, 3)
    with_three = stats_of(model).device_budget_bytes
    enable_offload(model, model.transformer_blocks, 1)
    assert stats_of(model).device_budget_bytes == with_three - 4 * BLOCK_BYTES
    assert torch.equal(forward(model, device), forward(seeded(Dit), torch.device("cpu")))


@pytest.mark.parametrize("width", [30, 75, 100])
def test_one_block_of_any_size_has_room(device: torch.device, width: int):
    """Tensors lie at multiples of 256 bytes where they are not small, which counts for as much as it takes."""

    model, x = Stack(nn.Linear(width, width) for _ in range(4)), torch.ones(2, width)
    expected = copy.deepcopy(model).to(device)(x.to(device))
    enable_offload(model, model.layers, 0)
    assert torch.equal(model(x.to(device)), expected)
    disable_offload(model)


# There, the only remedy for contention was to run at another time.
def test_the_link_is_left_to_others_between_denoising_steps(device: torch.device):
    expected = forward(seeded(Dit), torch.device("cpu"))
    model = seeded(Dit)
    enable_offload(model, model.transformer_blocks, 2)
    handle = handle_of(model)
    forward(model, device)
    for slow in (None, "20MB"):
        handle.limit_copies(slow, window_seconds=0.01)
        for _ in range(2):
            assert torch.equal(forward(model, device), expected)
            with handle.copies_paused():
                before = handle.stats().onload_bytes
                handle.synchronize()
                assert handle.stats().onload_bytes == before
    assert "device" in str(handle.report())
    handle.remove()
    assert torch.equal(forward(model, torch.device("cpu")), expected)
