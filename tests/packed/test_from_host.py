"""Do frozen weights that come from host memory again and again cross the link packed, and are right bit for bit?"""

import gc
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.memory.arena import whole_pages
from headrace.memory.ledger import Tier
from headrace.runtime import lanes
from headrace.runtime.threads import OneThread
from headrace.weights.movement import packed_loads, planner
from headrace.weights.movement.packed_loads import PackedLoads
from tests.packed import models
from tests.packed.models import adapted_layer
from tests.support.compare import assert_same, assert_same_weights, on_cpu

pytestmark = pytest.mark.emu("random:0", "threads")

WIDTH = 2048
LAYERS = 6
LAYER_BYTES = 2 * WIDTH * WIDTH + 2 * WIDTH
BUDGET = 9 * LAYER_BYTES // 2
PASSES = 10

frozen, inputs = partial(models.frozen, WIDTH, LAYERS), partial(models.inputs, WIDTH)


@pytest.fixture(autouse=True)
def _always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of tests, whatever the speeds. The emulated device has no Triton, but PyTorch's operators."""
    monkeypatch.setattr(packed_loads, "unpacks_by_kernel", lambda device: device.type == "emu")
    monkeypatch.setattr(packed_loads, "PIECES_OF_BUDGET", 8)
    monkeypatch.setattr(packed_loads, "LEAST_PIECE_BYTES", 4 << 20)
    monkeypatch.setattr(packed_loads, "WORTH", float("inf"))
    monkeypatch.setattr(planner, "WAITS", -1)


@pytest.fixture
def device(emu_device: object) -> torch.device:
    emu_device.configure(device_memory=1 << 30)  # type: ignore[attr-defined]  # operators take some beside
    return torch.device("emu", 1)


def passes(model: nn.Module, handle: headrace.Offloaded, want: torch.Tensor, count: int = PASSES) -> headrace.Stats:
    """The stats of the last of so many forwards, all of which are right."""
    for _ in range(count):
        handle.reset_stats()
        with torch.no_grad():
            assert_same(on_cpu(model(inputs())), want)
        handle.synchronize()
        wait_for_packing(handle)
    return handle.stats()


def loads_of(handle: headrace.Offloaded) -> PackedLoads:
    return handle._residency.packed_loads  # type: ignore[attr-defined]


def wait_for_packing(handle: headrace.Offloaded) -> None:
    thread = loads_of(handle)._thread
    if thread is not None and not thread._shutdown:
        thread.submit(int).result()


def offload(model: nn.Module, device: torch.device, **settings: object) -> headrace.Offloaded:
    return headrace.offload(model, device=device, **({"device_memory": BUDGET, "packed": True} | settings))


def test_three_quarters_of_the_bytes_cross(device: torch.device) -> None:
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    for packed in ("disk", False, True):
        with offload(model, device, packed=packed) as handle:
            stats = passes(model, handle, want)
            assert stats.device_peak_bytes <= BUDGET
            assert stats.onload_bytes == stats.onload_packed_bytes + (
                0 if packed is True else stats.onloads * LAYER_BYTES
            )
            if packed is True:
                assert stats.onload_unpacked_bytes == stats.onloads * LAYER_BYTES > 0
                assert 0.75 < stats.onload_packed_bytes / stats.onload_unpacked_bytes < 0.752
                assert 3.7 * LAYER_BYTES < stats.host_bytes - LAYERS * LAYER_BYTES < 4.6 * LAYER_BYTES
                assert " of it packed" in handle.report().to_text()
        assert handle.stats().host_bytes == LAYERS * whole_pages(LAYER_BYTES)  # of the weights that the user has still
        assert_same_weights(model, frozen())


def test_where_the_cpu_computes_nothing_crosses() -> None:
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    with offload(model, torch.device("cpu")) as handle:
        assert passes(model, handle, want).onload_packed_bytes == 0


def scale(model: nn.Sequential, factor: float, write: str) -> None:
    if write == "load_state_dict":
        state = {key: value * (factor if "weight" in key else 1) for key, value in model.state_dict().items()}
        model.load_state_dict(state)
    kept = [layer.weight.data for layer in model] if write == "what was kept" else []
    model(inputs())
    torch.accelerator.synchronize()
    for weight in kept:
        weight.mul_(factor)
    for layer in model:
        if write == "in place":
            layer.weight.mul_(factor)
        elif write == "through data":
            layer.weight.data.mul_(factor)
        elif write == "another tensor":
            layer.weight.data = layer.weight.data * factor


@pytest.mark.extended
@pytest.mark.parametrize("write", ["in place", "through data", "another tensor", "what was kept", "load_state_dict"])
def test_what_is_written_is_used(device: torch.device, write: str) -> None:
    model = frozen()
    with offload(model, device) as handle:
        with torch.no_grad():
            want = frozen()(inputs())
        assert passes(model, handle, want).onload_packed_bytes > 0
        for factor in (2, 0.5):
            with torch.no_grad():
                scale(model, factor, write)
                if write == "what was kept":
                    handle.refresh()  # nothing else tells of it
                plain = frozen()
                plain.load_state_dict(model.state_dict())
                want = plain(inputs())
            assert passes(model, handle, want, 2).onload_packed_bytes == 0
        stats = passes(model, handle, want)
        assert (stats.onload_packed_bytes > 0) or write == "another tensor"
        assert stats.device_peak_bytes <= BUDGET


@pytest.mark.extended
def test_nothing_is_packed_while_its_memory_is_kept(device: torch.device) -> None:
    """Writes to it leave no trace."""
    model = frozen()
    with offload(model, device) as handle:
        kept = [layer.weight.data for layer in model]
        for step in range(PASSES):
            kept[1].mul_(0.5)
            handle.reset_stats()
            with torch.no_grad():
                plain = frozen()
                plain[1].weight.mul_(0.5 ** (step + 1))
                want = plain(inputs())
                handle.refresh()
                assert_same(on_cpu(model(inputs())), want)
            assert handle.stats().onload_packed_bytes == 0
        assert kept[0].numel()


@pytest.mark.extended
def test_homes_that_travel_in_another_dtype(device: torch.device) -> None:
    model = frozen(torch.float32)
    with torch.no_grad():
        want = frozen(torch.float32).to(torch.bfloat16)(inputs())
    with offload(model, device, param_dtype=torch.bfloat16) as handle:
        assert passes(model, handle, want).onload_packed_bytes > 0


def test_words_that_do_not_pack_cross_as_they_are(device: torch.device) -> None:
    model = frozen()
    with torch.no_grad():
        for layer in model:
            noise = torch.randint(-32768, 32767, (WIDTH // 2, WIDTH), dtype=torch.int16).view(torch.bfloat16)
            layer.weight[: WIDTH // 2] = noise
        want = model(inputs())
    with offload(model, device) as handle:
        stats = passes(model, handle, want)
        assert 0.86 < stats.onload_bytes / (stats.onloads * LAYER_BYTES) < 0.9


def adapted() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(adapted_layer(WIDTH) for _ in range(LAYERS)))


@pytest.mark.extended
def test_frozen_weights_with_trained_adapters_in_blocks_of_their_own(device: torch.device) -> None:
    plain, model = adapted(), adapted()
    ours = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    theirs = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    with offload(model, device, blocks=[layer.base for layer in model]) as handle:
        for _ in range(PASSES):
            handle.reset_stats()
            for one, optimizer in ((model, ours), (plain, theirs)):
                optimizer.zero_grad()
                one(inputs()).square().mean().backward()
                optimizer.step()
        stats = handle.stats()
        assert stats.onload_packed_bytes > 0
        assert stats.device_peak_bytes <= BUDGET
    assert_same_weights(model, plain)


@pytest.mark.extended
def test_no_more_host_memory_is_taken_than_half_of_what_is_left(device: torch.device) -> None:
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    host_bytes = LAYERS * LAYER_BYTES + 4 * LAYER_BYTES
    with offload(model, device, host_memory=host_bytes) as handle:
        stats = passes(model, handle, want)
        assert 0 < stats.onload_packed_bytes < stats.onload_bytes
        assert stats.host_bytes <= LAYERS * LAYER_BYTES + 2 * LAYER_BYTES + 4096 * LAYERS
        assert stats.host_peak_bytes <= host_bytes


@pytest.mark.extended
def test_packed_weights_give_way_to_what_needs_host_memory(device: torch.device) -> None:
    """Gradients do, which would have had room without them."""
    model, plain = frozen(), frozen()
    host_bytes = 2 * LAYERS * LAYER_BYTES + 10 * LAYER_BYTES
    with torch.no_grad():
        want = model(inputs())
    with offload(model, device, host_memory=host_bytes) as handle:
        held = passes(model, handle, want).host_bytes
        assert held > 9 * LAYER_BYTES
        handle._ledger.host_budget_bytes = held + LAYER_BYTES  # type: ignore[attr-defined]
        for one in (model, plain):
            one[2].requires_grad_(True)
            one[3].requires_grad_(True)
            one(inputs()[:1]).nan_to_num().square().mean().backward()
        assert_same(model[2].weight.grad, plain[2].weight.grad)
        assert_same(model[3].weight.grad, plain[3].weight.grad)
        stats = passes(model, handle, want, 3)
        assert stats.host_peak_bytes <= held + LAYER_BYTES


@pytest.mark.extended
def test_what_is_no_quicker_ends(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_loads, "WORTH", 0.0)
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    with offload(model, device) as handle:
        seen = []
        for _ in range(16):
            seen.append(passes(model, handle, want, 1).onload_packed_bytes)
        assert max(seen) > 0
        assert seen[-3:] == [0, 0, 0]
        stats = handle.stats()
        assert stats.host_bytes < (LAYERS + 0.1) * LAYER_BYTES
        assert stats.onloads <= 3  # in a budget of four and a half blocks of six


@pytest.mark.extended
@pytest.mark.parametrize("wrong", ["bits", "error"])
def test_a_kernel_that_does_not_work_is_not_used(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    right: Callable[..., None] = packed_loads.unpack_on_device

    def unpack(packed: object, into: torch.Tensor) -> None:
        if wrong == "error":
            raise RuntimeError("no C compiler")
        right(packed, into)
        into[-1:] ^= 1

    monkeypatch.setattr(packed_loads, "unpack_on_device", unpack)
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    with warnings.catch_warnings(record=True) as told, offload(model, device) as handle:
        warnings.simplefilter("always")
        assert passes(model, handle, want).onload_packed_bytes == 0
    assert [str(one.message) for one in told if "kernel that unpacks" in str(one.message)]


@pytest.mark.extended
def test_random_numbers_are_those_of_the_plain_run(device: torch.device) -> None:
    """The kernel is tried out on words that nobody else draws."""
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with offload(model, device) as handle:
        assert passes(model, handle, want).onload_packed_bytes > 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.extended
def test_what_comes_later_has_the_room_that_it_has_without_packing(device: torch.device) -> None:
    model = nn.ModuleList(frozen())
    model.forward = lambda x: [x := layer(x) for layer in list(model)[:LAYERS]][-1]  # type: ignore[method-assign]
    with torch.no_grad():
        want = model(inputs())
    with offload(model, device) as handle:
        assert passes(model, handle, want).onload_packed_bytes > 0
        rows = (BUDGET - LAYER_BYTES) // (2 * WIDTH) - 16
        model.append(nn.Linear(WIDTH, rows, bias=False, dtype=torch.bfloat16))
        stats = passes(model, handle, want, 3)
        assert stats.onload_packed_bytes == 0
        assert stats.device_peak_bytes <= BUDGET
        assert loads_of(handle).held_bytes == 0


class Calling(nn.Linear):
    """Its weight is in use while the next one computes."""

    next: "list[Calling]"
    calls = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for other in self.next if self.calls else []:
            x = other(x)
        return x


@pytest.mark.extended
def test_blocks_in_use_at_once_have_the_room_that_they_have_without_packing(device: torch.device) -> None:
    torch.manual_seed(0)
    layers = [Calling(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(8)]
    for index, layer in enumerate(layers):
        layer.next = layers[index + 1 : index + 2] if index % 4 < 3 else []
    model = nn.Sequential(*layers).requires_grad_(False)
    with torch.no_grad():
        want = model(inputs())
    with offload(model, device, blocks=layers) as handle:
        for calls in (False, True):
            for layer in layers:
                layer.calls = calls and layer in (layers[0], layers[1], layers[2])
            with torch.no_grad():
                want = inputs()
                for index in (0, 1, 2, 3, 1, 2, 3, 2, 3, *range(3, 8)) if calls else range(8):
                    want = nn.functional.linear(want, layers[index].weight, layers[index].bias)
            stats = passes(model, handle, want)
            assert (stats.onload_packed_bytes > 0) is not calls
            assert stats.device_peak_bytes <= BUDGET


def test_what_is_being_packed_gives_way_as_well(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    right = packed_loads.pack_into
    found: list[bool] = []
    with offload(model, device) as handle:
        ledger = handle._ledger  # type: ignore[attr-defined]
        passes(model, handle, want, 1)
        host_bytes = handle.stats().host_bytes + 64 * LAYER_BYTES
        ledger.host_budget_bytes = host_bytes

        def pack_into(source: torch.Tensor, memory: torch.Tensor) -> int:
            if ledger.held_bytes(Tier.HOST) > host_bytes - 62 * LAYER_BYTES and not found and not asking.is_alive():
                asking.start()
                while asking.is_alive() and room().nbytes > room().taken_bytes:
                    time.sleep(0)
            return right(source, memory)

        def room() -> Any:
            return loads_of(handle)._room

        asking = threading.Thread(target=lambda: found.append(ledger.has_room(64 * LAYER_BYTES)))
        monkeypatch.setattr(packed_loads, "pack_into", pack_into)
        passes(model, handle, want)
        asking.join()
        assert found == [True]
        assert handle.stats().host_bytes == host_bytes - 64 * LAYER_BYTES


def test_nobody_takes_host_memory_that_is_being_made(device: torch.device) -> None:
    with offload(frozen(), device) as handle:
        ledger = handle._ledger  # type: ignore[attr-defined]
        ledger.host_budget_bytes = ledger.held_bytes(Tier.HOST) + 4 * LAYER_BYTES
        assert ledger.take_spare("weights", LAYER_BYTES)
        ledger.add(Tier.HOST, "weights", -LAYER_BYTES)
        with ledger.making(3 * LAYER_BYTES):
            assert not ledger.take_spare("weights", LAYER_BYTES)


@pytest.mark.extended
@pytest.mark.parametrize("at", [1, 2, 3])
def test_after_an_interrupt_amid_a_load(device: torch.device, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Where a kernel was submitted, and nobody had noted its end."""
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    with offload(model, device) as handle:
        passes(model, handle, want)
        lanes = handle._lanes
        right, calls = lanes.beside, [0]

        def unpack(*given: Any) -> Any:
            end = right(*given)
            calls[0] += 1
            if calls[0] == at:
                raise KeyboardInterrupt
            return end

        monkeypatch.setattr(lanes, "beside", unpack)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(inputs().expand(2, 3, WIDTH))
        held = torch.ones(BUDGET // 4, device=device)  # in memory that came free
        stats = passes(model, handle, want, 3)
        assert held.eq(1).all()
        assert stats.onload_packed_bytes > 0
        assert stats.device_peak_bytes <= BUDGET


@pytest.mark.extended
@pytest.mark.parametrize("where", ["shutdown", "_drop"])
def test_after_an_interrupt_amid_the_end(device: torch.device, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    with offload(model, device) as handle:
        assert passes(model, handle, want).onload_packed_bytes > 0
        owner: Any = OneThread if where == "shutdown" else PackedLoads
        with monkeypatch.context() as patch:
            patch.setattr(PackedLoads, "is_worth_it", lambda _: False)

            def interrupted(*_: Any, **__: Any) -> None:
                raise KeyboardInterrupt

            patch.setattr(owner, where, interrupted)
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                model(inputs())
        stats = passes(model, handle, want, 3)
        assert stats.onload_packed_bytes == 0
        assert loads_of(handle).held_bytes == 0
        assert not loads_of(handle)._halves
        residency = handle._residency  # type: ignore[attr-defined]
        assert residency.held_bytes == sum(block.nbytes for block in residency.with_buffers())
        assert stats.device_peak_bytes <= BUDGET


@pytest.mark.extended
def test_trained_weights_cost_no_device_memory_and_thawed_ones_no_host_memory(device: torch.device) -> None:
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    with offload(model, device) as handle:
        blocks = handle._blocks()
        assert loads_of(handle).wanted_bytes(blocks, BUDGET, LAYER_BYTES) > 0
        model.requires_grad_(True)
        assert loads_of(handle).wanted_bytes(blocks, BUDGET, LAYER_BYTES) == 0
        model.requires_grad_(False)
        stats = passes(model, handle, want)
        assert stats.onload_packed_bytes > 0
        model.requires_grad_(True)
        thawed = passes(model, handle, want)
        assert thawed.onload_packed_bytes == 0
        assert thawed.host_bytes < stats.host_bytes - 3 * LAYER_BYTES


@pytest.mark.extended
@pytest.mark.parametrize("count", [6, 9])
def test_a_model_that_goes_without_remove(device: torch.device, count: int) -> None:
    """Nothing is unpacked any more where others have memory."""
    model = frozen()
    handle = offload(model, device)
    with torch.no_grad():
        for _ in range(count):
            model(inputs())
            wait_for_packing(handle)
    assert loads_of(handle).held_bytes > 0
    del model, handle
    gc.collect()
    other = torch.full((BUDGET,), 7, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize()
    assert other.eq(7).all()


@pytest.mark.extended
@pytest.mark.emu("lazy", "random:0")
@pytest.mark.parametrize("missing", ["what crossed is there", "the buffer is free", "what crossed before is unpacked"])
def test_edge_11_pieces_take_turns(
    device: torch.device, emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Each wait is taken out (docs/design/ordering.md), and the race detector names what it then finds."""
    unpack, copy = lanes.StreamLanes.beside, lanes.StreamLanes.copy
    never_recorded = torch.Event("emu")

    def unpack_early(self: Any, job: Callable[[], None], after: Sequence[Any]) -> Any:
        if len(after) == 2:
            after = after[1:] if missing == "what crossed is there" else after[:1]
        return unpack(self, job, after)

    def copy_early(self: Any, lane: Any, copies: Any, after: Any) -> Any:
        packed = len(copies) == 1 and copies[0][0].nbytes == copies[0][1].nbytes < LAYER_BYTES // 2
        return copy(self, lane, copies, never_recorded if packed else after)

    model = frozen()
    with offload(model, device) as handle, torch.no_grad():
        assert passes(model, handle, frozen()(inputs())).onload_packed_bytes > 0
        assert emu_device.take_reports() == []
        if missing == "what crossed before is unpacked":
            monkeypatch.setattr(lanes.StreamLanes, "copy", copy_early)
        else:
            monkeypatch.setattr(lanes.StreamLanes, "beside", unpack_early)
        for _ in range(3):
            model(inputs())
        handle.synchronize()
        assert emu_device.take_reports()
