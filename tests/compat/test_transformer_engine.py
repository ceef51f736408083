"""Does code written for TransformerEngine's CPU offloading give the same results, and does each setting do its work?"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import headrace
from headrace.activations.passes import Passes
from headrace.compat import CPUOffloadConfig, get_cpu_offload_context
from headrace.compat.megatron import apply
from headrace.runtime.autograd import top_hooks
from tests.activations.models import SAVED_BYTES, Stack, results, rows, step
from tests.support.compare import assert_same
from tests.support.instances import instances
from tests.support.interrupts import Strike

pytestmark = pytest.mark.core(device="emu")

WITHIN = ("/headrace/activations/", "/headrace/memory/pool", "/headrace/compat/")
LAYERS = 6


class Wrapped(Stack):
    """Layers called as TransformerEngine asks for it."""

    context: Any = None
    sync: Any = None
    recompute = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with self.context:
                x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)  # type: ignore[assignment]
            x = self.sync(x)
        return x


def wrapped(device: torch.device, **settings: Any) -> Wrapped:
    model = Wrapped(LAYERS).to(device)
    settings = {"enabled": True, "num_layers": LAYERS - 1, "model_layers": LAYERS} | settings
    settings = {"min_bytes": 0, "device_memory": 0} | settings
    model.context, model.sync = get_cpu_offload_context(**settings)
    return model


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_layers", [0, 1, LAYERS - 1])
def test_results_are_the_same(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, num_layers: int, recompute: bool
) -> None:
    made = instances(monkeypatch, Passes)
    expected = step(Stack(LAYERS).to(device), rows(device))
    model = wrapped(device, num_layers=num_layers)
    model.recompute = recompute
    for _ in range(4):
        assert_same(step(model, rows(device)), expected)
    if num_layers == 0:
        assert made == []
        return
    (passes,) = made
    assert passes.meter.offload_bytes >= 4 * (num_layers - 1) * SAVED_BYTES


@pytest.mark.parametrize("device", ["emu"], indirect=True)  # whose allocator counts
def test_the_first_layers_leave_and_device_memory_drops(device: torch.device) -> None:
    held = []
    for num_layers in (0, 2, 5):
        model = wrapped(device, num_layers=num_layers)
        for _ in range(3):
            step(model, rows(device))
        model.zero_grad()
        before = torch.accelerator.memory_allocated()
        loss = model(rows(device)).sum()
        held.append(torch.accelerator.memory_allocated() - before)
        loss.backward()
        del model, loss
    assert held[0] > held[1] > held[2]


def test_forwards_before_backwards_as_pipelines_have_them(device: torch.device) -> None:
    plain, model = Stack(LAYERS).to(device), wrapped(device)
    for _ in range(3):
        for each in (plain, model):
            each.zero_grad()
            losses = [each(rows(device, seed)).square().sum() for seed in range(3)]
            for loss in losses:
                loss.backward()
        assert_same(results(model), results(plain))


def test_a_forward_that_breaks_off_does_not_shift_the_layers(device: torch.device) -> None:
    expected = step(Stack(LAYERS).to(device), rows(device))
    model = wrapped(device, num_layers=2)
    for layers in (3, LAYERS):
        x = rows(device)
        for layer in model.layers[: layers - 1]:
            with model.context:
                x = layer(x)
        with pytest.raises(RuntimeError), model.context:
            model.layers[0](torch.ones(3, 5, device=device))
        del x
        assert_same(step(model, rows(device)), expected)
    x = rows(device)
    with model.context:  # and one that nobody goes on with
        x = model.layers[0](x)
    del x
    for _ in range(2):
        assert_same(step(model, rows(device)), expected)


def test_interrupts_do_not_shift_the_layers_or_stop_offloading(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = instances(monkeypatch, Passes)
    x = rows(device)
    expected = step(Stack(LAYERS).to(device), x)
    model = wrapped(device)
    for _ in range(3):
        step(model, x)
    counted = Strike(within=WITHIN)
    counted.during(functools.partial(step, model, x))
    (passes,), struck = made, 0
    for index in range(40):
        try:
            Strike(1 + index * counted.seen // 40, WITHIN).during(functools.partial(step, model, x))
        except KeyboardInterrupt:
            struck += 1
        before = passes.meter.offloads
        assert_same(step(model, x), expected)
        assert passes.meter.offloads - before >= LAYERS - 2
    assert struck > 20
    assert top_hooks(True) is None


def test_passes_without_gradients(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    made = instances(monkeypatch, Passes)
    model = wrapped(device)
    with torch.no_grad():
        output = model(rows(device))
    assert torch.equal(output, Stack(LAYERS).to(device)(rows(device)))
    assert made == []


@pytest.mark.parametrize("activations", [True, False])
def test_weights_visit_the_device(device: torch.device, activations: bool) -> None:
    expected = step(Stack(LAYERS).to(device), rows(device))
    model = Stack(LAYERS)
    context, sync = get_cpu_offload_context(
        enabled=True,
        num_layers=5,
        model_layers=LAYERS,
        offload_activations=activations,
        offload_weights=True,
        model=model,
        min_bytes=0,
        device_memory=0,
    )
    with context:
        for _ in range(4):
            assert_same(step(model, rows(device)), expected)
    assert sync(expected[0]) is expected[0]
    with pytest.raises(headrace.StateError, match="offloaded already"):
        headrace.offload(model)


def test_a_model_instead_of_contexts(device: torch.device) -> None:
    expected = step(Stack(LAYERS).to(device), rows(device))
    model = Stack(LAYERS).to(device)
    config = CPUOffloadConfig(num_layers=LAYERS, cpu_offloading=True, cpu_offloading_num_layers=3)
    apply(config, model, min_bytes=0, device_memory=0)
    for _ in range(3):
        assert_same(step(model, rows(device)), expected)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_layers": LAYERS}, "0 to 5"),
        ({"num_layers": -1}, "0 to 5"),
        ({"offload_activations": False}, "nothing is to be offloaded"),
        ({"offload_weights": True}, "pass model="),
        ({"manual_synchronization": True}, "manual_synchronization"),
        ({"offload_stream": object()}, "offload_stream"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        get_cpu_offload_context(**{"enabled": True, "num_layers": 2, "model_layers": LAYERS, **settings})
    get_cpu_offload_context(**{"num_layers": 2, "model_layers": LAYERS, **settings, "enabled": False})


def test_sync_belongs_behind_the_context(device: torch.device) -> None:
    model = wrapped(device)
    with model.context, pytest.raises(RuntimeError, match="behind the with block"):
        model.sync(rows(device))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"cpu_offloading_num_layers": 8}, "0 to 7"),
        ({"cpu_offloading_num_layers": -1}, "0 to 7"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl"),
        ({"cpu_offloading_activations": False}, "nothing to do"),
    ],
)
def test_configs_that_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CPUOffloadConfig(num_layers=8, cpu_offloading=True, **settings)
    CPUOffloadConfig(num_layers=8, **settings)  # off: nothing is checked


@pytest.mark.parametrize(("settings", "text"), [({}, "offload_modules="), ({"cpu_offloading": True}, "a second time")])
def test_what_leaves_by_module_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CPUOffloadConfig(num_layers=8, fine_grained_activation_offloading=True, **settings)


def test_configs_of_the_original_pages() -> None:
    for settings in (
        {"cpu_offloading_num_layers": 7, "recompute_granularity": "full", "pipeline_model_parallel_size": 4},
        {"cpu_offloading_double_buffering": True, "cpu_offloading_retain_pinned_cpu_buffers": True},
        {"cpu_offloading_num_layers": 0},
    ):
        config = CPUOffloadConfig(num_layers=8, cpu_offloading=True, **settings)  # type: ignore[arg-type]
        handle = apply(config, Stack(8))
        assert (handle is None) == (config.cpu_offloading_num_layers == 0)


@pytest.mark.parametrize("device", ["emu"], indirect=True)  # whose link is slow
@pytest.mark.parametrize("hooks_into_model", [False, True])
def test_layers_leave_however_slow_the_link_is(device: torch.device, hooks_into_model: bool) -> None:
    from emulator import emu

    emu.configure(d2h_bytes_per_second=1e7, h2d_bytes_per_second=1e7)
    if hooks_into_model:
        model: Any = Stack(LAYERS).to(device)
        config = CPUOffloadConfig(num_layers=LAYERS, cpu_offloading=True, cpu_offloading_num_layers=LAYERS - 1)
        apply(config, model, min_bytes=0)
    else:
        model = wrapped(device, device_memory=None)
    for _ in range(3):
        step(model, rows(device))
    before = torch.accelerator.memory_allocated()
    loss = model(rows(device)).sum()
    held_bytes = torch.accelerator.memory_allocated() - before
    loss.backward()
    assert held_bytes <= 4 * SAVED_BYTES  # the last two outputs and the input, of 7
