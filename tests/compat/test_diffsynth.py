"""Does code written for OffloadTrainingManager run, exactly, and without the defects of the original?

A comment that begins with "There" says what DiffSynth-Studio's own manager did in the case that is tested.
"""

import copy
import gc
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.compat import OffloadTrainingManager
from headrace.compat.diffsynth import launch_data_process_task
from tests.compat.models import run_steps
from tests.support.compare import assert_same
from tests.support.models import Adapted, Toy, seeded

pytestmark = pytest.mark.core(device="emu")

# From the documentation of the original, with another import, device and size.
EXAMPLE = """
import torch
from tqdm import tqdm
from headrace.compat import OffloadTrainingManager

class ToyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4096, 4096) for _ in range(10))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(torch.nn.functional.layer_norm(x, (4096,)))
        return x

model = ToyModel().to("cpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
offload_manager = OffloadTrainingManager(model, target_device="cuda", enable_optimizer_cpu_offload=True)
pbar = tqdm(range(100))
for i in pbar:
    x = torch.randn((512, 4096), device="cuda")
    y = x + 1
    y_pred = model(x)
    loss = torch.nn.functional.mse_loss(y_pred, y)
    loss.backward()
    offload_manager.after_backward()
    optimizer.step()
    optimizer.zero_grad()
    pbar.set_postfix(loss=f"{loss.item():.4f}")
"""

LAYER_BYTES = (64 * 64 + 64) * 4  # of a Toy
INPUTS = torch.randn(6, 16, 64, generator=torch.Generator().manual_seed(0))  # (steps, batch, width)


def compare(
    make: Callable[[], nn.Module],
    device: torch.device,
    inputs: torch.Tensor = INPUTS,
    *,
    micro_batches: int = 1,
    enable_optimizer_cpu_offload: bool = True,
    **options: Any,
) -> OffloadTrainingManager:
    """Trains the same model plainly and by the manager; everything must be equal, within the budget. The manager.

    The plain run's optimizer computes where the manager's does.
    """
    where = torch.device("cpu") if enable_optimizer_cpu_offload else device
    reference = seeded(make).to(where)
    plain = run_steps(reference, list(inputs.to(where)), micro_batches=micro_batches)
    model = seeded(make)
    manager = OffloadTrainingManager(model, device, enable_optimizer_cpu_offload, **options)
    on_device = list(inputs.to(device))
    offloaded = run_steps(model, on_device, manager.after_backward, micro_batches=micro_batches)
    assert_same(offloaded, plain)
    assert all(parameter.device.type == where.type for parameter in model.parameters() if parameter.requires_grad)
    stats = manager.handle.stats()
    travels = enable_optimizer_cpu_offload or not all(parameter.requires_grad for parameter in model.parameters())
    assert (stats.onload_bytes > 0) == travels
    assert travels * 1 <= stats.device_peak_bytes <= stats.device_budget_bytes
    return manager


def test_the_example_of_the_original_runs(device: torch.device, capsys: pytest.CaptureFixture[str]):
    source = EXAMPLE.replace("cuda", device.type).replace("4096", "64").replace("range(100)", "range(3)")
    example: dict[str, Any] = {}
    exec(source, example)
    stats = example["offload_manager"].handle.stats()
    assert stats.steps == 3
    assert stats.device_peak_bytes <= 3 * LAYER_BYTES
    assert stats.onload_bytes > 2 * 10 * LAYER_BYTES
    assert "loss=" in capsys.readouterr().err


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("optimizer_offload", [False, True])
def test_full_training_is_exact(device: torch.device, recompute: bool, optimizer_offload: bool):
    manager = compare(lambda: Toy(recompute=recompute), device, enable_optimizer_cpu_offload=optimizer_offload)
    stats = manager.handle.stats()
    assert stats.device_budget_bytes == (3 * LAYER_BYTES if optimizer_offload else 0)
    assert stats.device_gradient_peak_bytes <= 2 * LAYER_BYTES


def adapted(*, recompute: bool = False) -> nn.Module:
    """A frozen Toy with a trainable adapter beside each layer."""

    toy = Toy(recompute=recompute)
    toy.layers = nn.ModuleList(Adapted(layer, 64, 4) for layer in toy.layers)
    return toy


ADAPTER_BYTES = 10 * 2 * 64 * 4 * 4  # of an adapted Toy


@pytest.mark.core(device="emu", recompute=True)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("optimizer_offload", [False, True])
def test_adapters_on_a_frozen_model_train_exactly_and_frozen_weights_have_no_gradients(
    device: torch.device, optimizer_offload: bool, recompute: bool
):
    manager = compare(lambda: adapted(recompute=recompute), device, enable_optimizer_cpu_offload=optimizer_offload)
    stats = manager.handle.stats()
    assert stats.device_budget_bytes == 3 * LAYER_BYTES
    assert stats.offload_bytes <= optimizer_offload * len(INPUTS) * ADAPTER_BYTES  # gradients, and nothing else


def test_without_optimizer_offload_what_is_trained_stays_on_the_device_with_gradients_and_state(emulator: ModuleType):
    gc.collect()  # models of earlier tests
    torch.accelerator.synchronize()
    before = emulator.stats()["allocated_bytes"]
    model = seeded(adapted)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    manager = OffloadTrainingManager(model, "emu")
    assert [parameter for parameter in model.parameters() if parameter.requires_grad] == trained
    emulator.reset_stats()
    for x in INPUTS.to("emu"):
        nn.functional.mse_loss(model(x), x + 1).backward()
        manager.after_backward()
        assert {parameter.grad.device.type for parameter in trained} == {"emu"}
        optimizer.step()
        optimizer.zero_grad()
    kept = [tensor for state in optimizer.state.values() for name, tensor in state.items() if name != "step"]
    assert {tensor.device.type for tensor in [*trained, *kept]} == {"emu"}
    assert {p.device.type for p in model.parameters() if not p.requires_grad} == {"cpu"}
    assert manager.handle.stats().offload_bytes == 0
    activations = 50 * 16 * 64 * 4  # what ten layers save, and inputs
    peak_bytes = emulator.stats()["peak_allocated_bytes"] - before
    assert peak_bytes <= manager.handle.stats().device_budget_bytes + 5 * ADAPTER_BYTES + activations
    manager.remove()
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert model(INPUTS[0]).device.type == "cpu"


def test_a_run_whose_adapters_stay_on_the_device_is_saved_and_goes_on(device: torch.device, tmp_path: Path):
    def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = seeded(adapted)
        OffloadTrainingManager(model, device)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        nn.functional.mse_loss(model(x.to(device)), x.to(device) + 1).backward()
        optimizer.step()
        optimizer.zero_grad()

    undisturbed, optimizer = begin()
    for x in INPUTS[:3]:
        step(undisturbed, optimizer, x)
    headrace.save(tmp_path / "run", undisturbed, optimizer)
    resumed, other = begin()
    headrace.load(tmp_path / "run", resumed, other)
    assert {p.device.type for p in resumed.parameters() if p.requires_grad} == {device.type}
    for x in INPUTS[3:]:
        step(undisturbed, optimizer, x)
        step(resumed, other, x)
    for (name, tensor), expected in zip(resumed.state_dict().items(), undisturbed.state_dict().values(), strict=True):
        assert torch.equal(tensor, expected), name


def test_what_stayed_on_the_device_travels_for_another_manager_that_says_so(device: torch.device):
    model = seeded(adapted)
    OffloadTrainingManager(model, device).handle.remove()
    manager = OffloadTrainingManager(model, device, enable_optimizer_cpu_offload=True)
    model(INPUTS[0].to(device)).sum().backward()
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"cpu"}
    manager.remove()


def test_the_dtype_of_what_stays_on_the_device_changes_with_the_model(device: torch.device):
    model = seeded(adapted)
    OffloadTrainingManager(model, device)
    model.to(torch.bfloat16)
    model(INPUTS[0].to(device, torch.bfloat16)).sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.device.type == (device.type if parameter.requires_grad else "cpu")
        assert (parameter.grad is not None) == parameter.requires_grad


def test_a_model_that_is_offloaded_already_is_left_as_it_is(device: torch.device):
    model = seeded(adapted)
    handle = headrace.offload(model, device=device)
    with pytest.raises(headrace.StateError, match="is offloaded already"):
        OffloadTrainingManager(model, device)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    handle.remove()


# There, weights stayed alive after forward, because autograd had saved views of them
# There, forward passes without after_backward left every weight on the device
# There, one module was left on the device when its input needs no gradient
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_are_within_the_budget_at_every_moment(emulator: ModuleType, recompute: bool):
    activations = 30 * 16 * 64 * 4  # what ten layers save, generously
    gc.collect()  # models of earlier tests
    before = emulator.stats()["allocated_bytes"]

    def held_bytes() -> int:
        torch.accelerator.synchronize()
        return emulator.stats()["allocated_bytes"] - before

    def comes_down_to(limit: int) -> bool:
        """Autograd's device thread lets go of the graph in its own time."""
        return any(held_bytes() <= limit or time.sleep(0.01) for _ in range(100))

    model = seeded(lambda: Toy(recompute=recompute))
    manager = OffloadTrainingManager(model, "emu", enable_optimizer_cpu_offload=True)
    budget = manager.handle.stats().device_budget_bytes
    x = INPUTS[0].to("emu")
    for _ in range(3):
        loss = model(x).square().mean()
        assert held_bytes() <= budget + activations
        loss.backward()
        del loss
        assert comes_down_to(budget + 4 * x.nbytes)
    with torch.no_grad():
        for _ in range(3):
            model(x)
            assert held_bytes() <= budget + 4 * x.nbytes


# There, no copy overlapped with compute
# There, weights were copied back after every use, although only the optimizer changes them
# There, two loads for each step, three with recomputation
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_arrive_before_they_are_needed_and_only_gradients_go_back(device: torch.device, recompute: bool):
    model = seeded(lambda: Toy(recompute=recompute))
    manager = OffloadTrainingManager(model, device, enable_optimizer_cpu_offload=True)
    run_steps(model, list(INPUTS[:3].to(device)), manager.after_backward)
    manager.handle.reset_stats()
    run_steps(model, list(INPUTS[3:].to(device)), manager.after_backward)
    stats = manager.handle.stats()
    assert stats.steps == 3
    assert stats.offload_bytes <= 3 * 10 * LAYER_BYTES
    assert stats.onload_bytes < 3 * 2 * 10 * LAYER_BYTES
    # Every weight is new after an update, so the first blocks of the next step cannot be there before it begins.
    assert stats.demand_onloads <= 2 * stats.steps < stats.onloads / 6


# There, gradients stayed on the device until after_backward
def test_gradients_are_on_the_host_when_backward_returns(device: torch.device):
    model = seeded(Toy)
    OffloadTrainingManager(model, device, enable_optimizer_cpu_offload=True)
    model(INPUTS[0].to(device)).sum().backward()
    assert {parameter.grad.device.type for parameter in model.parameters()} == {"cpu"}


# There, a module called twice in one forward stayed on the device
def test_a_module_called_twice_is_exact(device: torch.device):
    class Twice(Toy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x))

    compare(Twice, device)


# There, the statistics of BatchNorm were lost
def test_buffers_are_kept(device: torch.device):
    def normalised() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.BatchNorm1d(64))

    manager = compare(normalised, device)
    manager.remove()


# There, the threshold compared elements with bytes, and children of a unit were never onloaded
@pytest.mark.parametrize("frozen", [False, True])
def test_the_threshold_is_in_megabytes_of_bytes(device: torch.device, frozen: bool):
    def nested() -> nn.Module:
        stages = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)]
        for stage in stages[: 3 if frozen else 0]:
            stage.requires_grad_(False)
        return nn.Sequential(*stages)

    by_leaf = compare(nested, device)
    just_below = compare(nested, device, cpu_offload_split_threshold=(2 * LAYER_BYTES - 1) / 1e6)
    by_stage = compare(nested, device, cpu_offload_split_threshold=2 * LAYER_BYTES / 1e6)
    budgets = [manager.handle.stats().device_budget_bytes for manager in (by_leaf, just_below, by_stage)]
    assert budgets == [3 * LAYER_BYTES, 3 * LAYER_BYTES, 6 * LAYER_BYTES]


def test_a_threshold_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="cpu_offload_split_threshold is 0 MB"):
        OffloadTrainingManager(Toy(), "cpu", cpu_offload_split_threshold=0)


# There, tied frozen weights failed
@pytest.mark.parametrize("frozen", [False, True])
def test_tied_weights_are_exact(device: torch.device, frozen: bool):
    def tied() -> nn.Module:
        toy = Toy()
        toy.layers[7].weight = toy.layers[2].weight
        toy.layers[2].requires_grad_(not frozen)
        return toy

    compare(tied, device)


# There, a parent that uses the weight of a child without calling it failed
def test_weights_used_by_a_parent_are_exact(device: torch.device):
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
            self.inner = nn.ModuleDict({"projection": nn.Linear(64, 64)})
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            attended, _ = self.attention(x[None], x[None], x[None])
            projection = self.inner["projection"]
            return nn.functional.linear(attended[0], projection.weight, projection.bias) * self.scale

    compare(Direct, device)


# There, state_dict() gave empty tensors, and load_state_dict() raised
def test_state_can_be_read_and_loaded_at_any_time(device: torch.device):
    model, other = seeded(Toy), Toy()
    before = copy.deepcopy(model.state_dict())
    manager = OffloadTrainingManager(model, device, enable_optimizer_cpu_offload=True)
    x = INPUTS[0].to(device)
    model(x)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(x).cpu(), other(INPUTS[0]))
    manager.remove()
    assert torch.equal(model(INPUTS[0]), other(INPUTS[0]))


# There, at least 1 GiB of host memory was pinned, whatever the size of the model
def test_host_memory_follows_the_size_of_the_model(device: torch.device):
    manager = compare(Toy, device)
    assert manager.handle.stats().host_peak_bytes <= 3 * 10 * LAYER_BYTES


# There, memory format and edits of frozen weights were lost; an exception broke the hooks; no gradient accumulation
def test_the_memory_format_of_weights_is_kept(device: torch.device):
    convolution = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
    strides = [parameter.stride() for parameter in convolution.parameters()]
    OffloadTrainingManager(convolution, device, enable_optimizer_cpu_offload=True)
    convolution(torch.randn(2, 8, 9, 9, device=device)).sum().backward()
    assert [parameter.stride() for parameter in convolution.parameters()] == strides


def test_edits_of_frozen_weights_are_seen(device: torch.device):
    model, edited = seeded(Toy).requires_grad_(False), seeded(Toy)
    OffloadTrainingManager(model, device)
    x = INPUTS[0].to(device)
    model(x)
    for toy in (model, edited):
        for parameter in toy.parameters():
            parameter.data.mul_(0.5)
        with torch.no_grad():
            toy.layers[3].weight.add_(1)
    assert torch.equal(model(x).cpu(), edited(INPUTS[0]))


def test_after_an_exception_training_goes_on_exactly(device: torch.device):
    class Failing(Toy):
        fail = False

        def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
            if self.fail and index == 5:
                raise ArithmeticError("on purpose")
            return super().layer(index, x)

    plain = run_steps(seeded(Failing), list(INPUTS))
    model = seeded(Failing)
    manager = OffloadTrainingManager(model, device, enable_optimizer_cpu_offload=True)
    model.fail = True
    with pytest.raises(ArithmeticError, match="on purpose"):
        model(INPUTS[0].to(device))
    model.fail = False
    assert_same(run_steps(model, list(INPUTS.to(device)), manager.after_backward), plain)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_gradients_accumulate_over_micro_batches(device: torch.device):
    compare(Toy, device, micro_batches=3)


class Encoder(nn.Module):
    """Makes an embedding of a sample's caption, as DiffSynth's modules do in the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = Toy()

    def forward(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"name": sample["name"], "embedding": self.toy(sample["caption"])}


@pytest.mark.parametrize("offloaded", [False, True])
def test_the_first_of_two_stages_saves_what_the_model_makes_of_each_sample(
    device: torch.device, offloaded: bool, tmp_path: Path
):
    args = SimpleNamespace(enable_model_cpu_offload=offloaded, enable_optimizer_cpu_offload=offloaded)

    def on_device(loader: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**sample, "caption": sample["caption"].to(device)} for sample in loader]

    accelerator = SimpleNamespace(device=device, process_index=0, prepare=on_device)
    model, plain = seeded(Encoder), seeded(Encoder).to(device)
    samples = [{"caption": x, "name": str(index)} for index, x in enumerate(INPUTS)]
    launch_data_process_task(accelerator, samples, model, SimpleNamespace(output_path=tmp_path), 0, args)
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == [f"{index}.pth" for index in range(6)]
    for index, sample in enumerate(on_device(samples)):
        made = torch.load(tmp_path / "0" / f"{index}.pth")
        assert made["name"] == str(index)
        assert made["embedding"].device.type == "cpu"
        with torch.no_grad():
            assert torch.equal(made["embedding"], plain(sample)["embedding"].cpu())
    where = "cpu" if offloaded else device.type
    assert {parameter.device.type for parameter in model.parameters()} == {where}
