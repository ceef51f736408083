"""Is the link free while copies are paused, does a limit hold in any window, and do results stay the same?"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import headrace
from headrace.runtime import pace
from headrace.runtime.lanes import Lane, StreamLanes, Transfer
from tests.support.compare import Outcome, assert_same
from tests.support.held import weight_bytes
from tests.support.loops import loss_of, steps
from tests.support.models import Decoder, seeded, some_tokens

WIDTH = 64


def decoder() -> Decoder:
    return seeded(Decoder, layers=6, width=WIDTH)


def offloaded(model: Decoder, device: torch.device, **settings: Any) -> headrace.Offloaded:
    budget = weight_bytes(model) - 3 * weight_bytes(model.layers[0])
    return headrace.offload(model, device=device, **{"device_memory": budget, "blocks": ["layers.*"], **settings})


def train(model: Decoder, count: int, around: Callable[[], Any] = contextlib.nullcontext) -> Outcome:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = steps(model, optimizer, [some_tokens()] * count, loss_of, around_step=around, keep_gradients=True)
    return Outcome(losses).read(model)


def onloaded(handle: headrace.Offloaded) -> int:
    return handle.stats().onload_bytes


def test_between_passes_nothing_is_copied(compute_device: torch.device):
    expected = train(decoder(), 6)
    model = decoder()
    handle = offloaded(model, compute_device)
    ahead = []

    @contextlib.contextmanager
    def paused() -> Iterator[None]:
        """Around the optimizer's step, after which loads would go ahead."""
        with handle.copies_paused(), handle.copies_paused():
            before = onloaded(handle)
            yield
            assert onloaded(handle) == before
        ahead.append(onloaded(handle) - before)

    assert_same(train(model, 6, paused), expected)
    assert ahead[-1] > 0  # what was put off goes when the pause is over
    handle.remove()


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_within_a_pass_what_it_needs_is_copied_and_nothing_ahead(compute_device: torch.device, mode: str):
    tokens = torch.arange(16).reshape(2, 8) % 32
    model, plain = decoder(), decoder()
    handle = offloaded(model, compute_device)
    seen: list[tuple[int, int]] = []
    with torch.set_grad_enabled(mode == "training"):
        for _ in range(3):
            model(tokens)
        with handle.copies_paused():
            handle.reset_stats()
            handle.refresh()
            hooks = [
                layer.register_forward_pre_hook(lambda *_: seen.append((len(seen), handle.stats().onloads)))
                for layer in model.layers
            ]
            output = model(tokens)
            for hook in hooks:
                hook.remove()
            assert onloaded(handle) >= weight_bytes(model.layers)  # all are old, and each is needed once
    assert torch.equal(output.cpu(), plain(tokens))
    onloads = [count for _, count in seen]
    assert [after - before for before, after in itertools.pairwise(onloads)] == [1] * 5
    assert torch.equal(model(tokens).cpu(), output.cpu())
    handle.remove()


def test_a_pause_that_begins_and_ends_within_a_pass(compute_device: torch.device):
    expected = train(decoder(), 5)
    model = decoder()
    handle = offloaded(model, compute_device)
    pauses: list[Any] = []

    def begin(*_: Any) -> None:
        pauses.append(handle.copies_paused())
        pauses[-1].__enter__()

    def end(*_: Any) -> None:
        pauses.pop().__exit__(None, None, None)

    model.layers[1].register_forward_pre_hook(begin)
    model.layers[3].register_forward_hook(end)
    assert_same(train(model, 5), expected)
    assert not pauses
    assert handle.stats().demand_onloads < handle.stats().onloads
    handle.remove()


def most_in_a_window(moves: list[tuple[float, float, int]], seconds: float) -> float:
    """The most bytes that a window carried: of a copy that it cuts, the part inside."""
    moments = np.array([moment for begin, end, _ in sorted(moves) for moment in (begin, end)])
    carried = np.cumsum([part for _, _, nbytes in sorted(moves) for part in (0, nbytes)])
    begins = np.concatenate([moments, moments - seconds])
    return float((np.interp(begins + seconds, moments, carried) - np.interp(begins, moments, carried)).max())


@pytest.mark.emu("random:0")
@pytest.mark.parametrize(("bytes_per_second", "window"), [(2e7, 1e-2), (2e8, 1e-3)])
def test_no_window_carries_more_than_the_limit(
    emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch, bytes_per_second: float, window: float
):
    """In virtual time, on a link of 25 GB/s."""
    virtual = SimpleNamespace(
        perf_counter=emu_device.virtual_seconds, sleep=lambda seconds: emu_device.host_works(seconds, "pace")
    )
    monkeypatch.setattr(pace, "time", virtual)
    expected = train(decoder(), 3)
    model = decoder()
    handle = offloaded(model, torch.device("emu", 1))
    transfers: list[Transfer] = []
    submit = StreamLanes.copy

    def recorded(lanes: StreamLanes, lane: Lane, *args: Any) -> Transfer:
        transfer = submit(lanes, lane, *args)
        if lane is Lane.ONLOAD and transfer.nbytes:
            transfers.append(Transfer(lane, (), transfer.nbytes, transfer.begun, transfer.done))
        return transfer

    monkeypatch.setattr(StreamLanes, "copy", recorded)
    handle.limit_copies(int(bytes_per_second), window_seconds=window)
    assert_same(train(model, 3), expected)
    handle.synchronize()
    moves = [
        (emu_device.event_seconds(each.begun), emu_device.event_seconds(each.done), each.nbytes) for each in transfers
    ]
    moved = sum(nbytes for _, _, nbytes in moves)
    assert moved == onloaded(handle)
    assert moved > 3 * weight_bytes(model.layers)
    assert most_in_a_window(moves, window) <= bytes_per_second * window * (1 + 1e-6)
    seconds = max(end for _, end, _ in moves) - min(start for start, _, _ in moves)
    assert moved / seconds > 0.5 * bytes_per_second or bytes_per_second > 1e8  # and it is made use of
    handle.limit_copies(None)
    del transfers[:]
    train(model, 1)
    handle.synchronize()
    assert max(each.nbytes for each in transfers) > bytes_per_second * window / 16
    handle.remove()


def test_training_under_a_limit_is_exact(compute_device: torch.device):
    expected = train(decoder(), 4)
    model = decoder()
    with offloaded(model, compute_device) as handle:
        handle.limit_copies("50MB", window_seconds=0.01)
        assert_same(train(model, 4), expected)


def test_blocks_from_disk_are_limited_too(compute_device: torch.device, tmp_path: Path):
    expected = train(decoder(), 3)
    model = decoder()
    weights = weight_bytes(model)
    settings = {"host_memory": 2 * weights, "disk": tmp_path}
    with offloaded(model, compute_device, **settings) as handle:
        handle.limit_copies("50MB", window_seconds=0.01)
        assert_same(train(model, 3), expected)


@pytest.mark.parametrize(
    "arguments",
    [
        {"bytes_per_second": 0},
        *({"bytes_per_second": "1GB", "window_seconds": seconds} for seconds in (0, -1.0, 1e-9, float("inf"), 1e300)),
    ],
)
def test_what_is_no_limit_is_refused(arguments: dict[str, Any]):
    with offloaded(decoder(), torch.device("cpu")) as handle:
        with pytest.raises(ValueError, match="give both so that it is 4096 at least"):
            handle.limit_copies(**arguments)
        with pytest.raises(TypeError, match="window_seconds='1' is a str"):
            handle.limit_copies("1GB", window_seconds="1")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="bytes_per_second"):
            handle.limit_copies(1.5)  # type: ignore[arg-type]


def test_after_the_end_there_is_nothing_to_hold_back():
    model = decoder()
    handle = offloaded(model, torch.device("cpu"))

    @contextlib.contextmanager
    def paused() -> Iterator[None]:
        """Loads are put off, and nobody is there for them in the end."""
        with handle.copies_paused():
            yield
            if handle.stats().steps == 4:
                handle.remove()

    train(model, 4, paused)
    with pytest.raises(headrace.StateError, match="came after remove"):
        handle.copies_paused().__enter__()
    with pytest.raises(headrace.StateError, match="came after remove"):
        handle.limit_copies("1GB")
