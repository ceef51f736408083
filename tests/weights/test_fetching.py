"""Are blocks on disk on their way before they are needed, whatever their size, and do guesses keep nobody waiting?"""

import copy
import itertools
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.memory.disk import DirectFile, StagingRing
from headrace.memory.ledger import Ledger, Tier
from headrace.runtime.threads import Job
from headrace.weights.movement.block import Block
from headrace.weights.rest.fetching import Fetch, Fetching
from tests.support.compare import assert_same_gradients
from tests.support.held import is_gone
from tests.support.instances import instances
from tests.support.loops import loss_of
from tests.support.models import Decoder, large_decoder

pytestmark = pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O

# A layer of 66 KiB, of which the device holds one; the ring holds 64 KiB, a quarter of the host budget.
BUDGETS: dict[str, Any] = {"device_memory": "80KiB", "host_memory": "256KiB"}
RING_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def rings(monkeypatch: pytest.MonkeyPatch) -> list[StagingRing]:
    return instances(monkeypatch, StagingRing)


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Fetch]]:
    """Blocks, each with what brings it from disk."""
    made: list[tuple[Any, Fetch]] = []
    fetch = Block.fetch

    def note(block: Block, *args: Any, **named: Any) -> Fetch:
        made.append((block, fetch(block, *args, **named)))
        return made[-1][1]

    monkeypatch.setattr(Block, "fetch", note)
    return made


def offload(model: Decoder, device: torch.device, disk: Path, rings: list[StagingRing]) -> headrace.Offloaded:
    model.embedding.scale_grad_by_freq = True  # so that the frozen table travels whole, too
    handle = headrace.offload(model, device=device, disk=disk, blocks=[model.layers], **BUDGETS)
    ring = rings[-1]
    assert ring.slot_bytes * ring.free_slots == RING_BYTES
    return handle


def layers_on_disk(handle: headrace.Offloaded) -> list[Any]:
    blocks = handle.settled_blocks("a look")
    found = [block for block in blocks if "layers" in block.name and block.is_fetched]
    assert len(found) > 2
    assert all(block.nbytes > RING_BYTES for block in found)
    return found


@pytest.mark.parametrize("trains", [False, True])
def test_blocks_larger_than_the_ring_are_read_ahead(
    compute_device: torch.device,
    tokens: torch.Tensor,
    tmp_path: Path,
    rings: list[StagingRing],
    trains: bool,
):
    """The device has no room for a second one, so the ring is full of the next one while one computes."""
    plain = large_decoder().requires_grad_(trains).to(compute_device)
    model = large_decoder().requires_grad_(trains)
    handle = offload(model, compute_device, tmp_path, rings)
    passes = 2
    for number in range(5):
        if number == 5 - passes:
            handle.reset_stats()
        expected, found = loss_of(plain, tokens.to(compute_device)), loss_of(model, tokens)
        assert torch.equal(expected, found)
        if trains:
            expected.backward()
            found.backward()
            assert_same_gradients(model, plain)
    handle.synchronize()
    stats, layers = handle.stats(), layers_on_disk(handle)
    assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes
    assert stats.host_peak_bytes <= 256 << 10
    fetched = sum(layer.nbytes for layer in layers)
    assert stats.fetch_bytes >= passes * fetched
    # Of each fetch as much as the ring holds, less what its predecessor had not left yet: the rest of that.
    rest_bytes = max(layer.nbytes for layer in layers) - RING_BYTES
    least = passes * len(layers) * (RING_BYTES - rest_bytes - rings[-1].slot_bytes)
    assert least <= handle._meter.ahead_bytes <= stats.fetch_bytes
    handle.remove()


def test_what_has_arrived_is_counted(
    tokens: torch.Tensor, tmp_path: Path, rings: list[StagingRing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has waited for a block finds its bytes in `stats()`."""
    model = large_decoder().requires_grad_(False)
    handle = offload(model, torch.device("cpu"), tmp_path, rings)
    handle.synchronize()
    handle.reset_stats()
    arrived, counted = [0], []
    opened = Job.set_result

    def note(self: Job[Any], result: Any) -> None:
        if threading.current_thread().name.startswith("headrace-send"):
            arrived[0] += result.nbytes
            counted.append((arrived[0], handle._meter.fetch_bytes))
        opened(self, result)

    monkeypatch.setattr(Job, "set_result", note)
    for _ in range(2):
        loss_of(model, tokens)
    handle.synchronize()
    assert len(counted) >= 2 * len(layers_on_disk(handle))
    assert all(nbytes <= fetched for nbytes, fetched in counted)
    handle.remove()


def test_the_next_block_is_read_while_one_computes(
    compute_device: torch.device,
    tokens: torch.Tensor,
    tmp_path: Path,
    rings: list[StagingRing],
    monkeypatch: pytest.MonkeyPatch,
):
    """Each layer ends only when the most of the next one on disk was read: without that, never."""
    model = large_decoder().requires_grad_(False)
    handle = offload(model, compute_device, tmp_path, rings)
    names = [layer.name for layer in layers_on_disk(handle)]
    read, more = Counter[str](), threading.Condition()
    read_file = DirectFile.read

    def note(self: DirectFile, address: int, nbytes: int, offset: int, what: str) -> None:
        read_file(self, address, nbytes, offset, what)
        with more:
            read[what.strip("'")] += nbytes
            more.notify_all()

    monkeypatch.setattr(DirectFile, "read", note)
    waited: list[str] = []

    def wait_for_the_next(name: str, times: int) -> None:
        with more:
            assert more.wait_for(lambda: read[name] >= times * RING_BYTES - (16 << 10), timeout=30), name
        waited.append(name)

    with torch.no_grad():
        for _ in range(2):  # a pass that is recorded, and one along its plan
            expected = model(tokens)
        for here, following in itertools.pairwise(names):
            model.get_submodule(here).register_forward_hook(lambda *_, name=following: wait_for_the_next(name, 1))
        handle.synchronize()
        read.clear()
        assert torch.equal(model(tokens), expected)
    assert waited == names[1:]
    handle.remove()


@pytest.mark.core(large=False, touch=["data", "remove", "error"])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("touch", ["data", "step", "remove", "drop", "other", "error"])
def test_blocks_that_were_fetched_ahead_keep_nobody_waiting(
    compute_device: torch.device,
    tokens: torch.Tensor,
    tmp_path: Path,
    rings: list[StagingRing],
    fetches: list[tuple[Any, Fetch]],
    monkeypatch: pytest.MonkeyPatch,
    touch: str,
    large: bool,
):
    """Guesses of the plan are under way when a pass ends; whoever needs homes then goes first."""
    plain = large_decoder() if large else Decoder(layers=60, width=32)
    model = copy.deepcopy(plain.requires_grad_(False))
    budgets = BUDGETS if large else {"device_memory": "48KiB", "host_memory": "640KiB"}
    ledgers = instances(monkeypatch, Ledger)
    handle = headrace.offload(model, device=compute_device, disk=tmp_path, blocks=[model.layers], **budgets)

    def check() -> None:
        plain.to(compute_device)
        with torch.no_grad():
            assert torch.equal(model(tokens).cpu(), plain(tokens.to(compute_device)).cpu())
        plain.to("cpu")

    for _ in range(4):
        check()
    guesses = {block.name: fetch for block, fetch in fetches if fetch.is_guess}
    names = list(guesses)
    assert names
    assert any(fetch.ahead < len(fetch.pieces) for fetch in guesses.values()) or not large
    del guesses
    fetches.clear()  # nothing here holds what the handle made
    rings.clear()
    if touch == "data":
        for name in reversed(names):
            for parameter in model.get_submodule(name).parameters():
                parameter.data.mul_(2)
            for parameter in plain.get_submodule(name).parameters():
                parameter.data.mul_(2)
        check()
    elif touch == "step":
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    elif touch == "other":  # a layer that the plan does not expect
        last = len(model.layers) - 1
        hidden = torch.ones(2, plain.head.in_features)
        with torch.no_grad():
            assert torch.equal(
                model.layers[last](hidden).cpu(), plain.to(compute_device).layers[last](hidden.to(compute_device)).cpu()
            )
        check()
    elif touch == "error":
        hook = model.layers[2].register_forward_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(tokens)
        hook.remove()
        check()
    elif touch == "remove":
        handle.remove()
    else:
        parameter, (ledger,) = weakref.ref(model.head.weight), ledgers
        del model, handle, check
        assert is_gone(parameter)
        for _ in range(500):  # a thread may still be in the middle of a read
            if not ledger.held_bytes(Tier.HOST) and not ledger.held_bytes(Tier.DISK):
                break
            time.sleep(0.01)
        assert ledger.held_bytes(Tier.HOST) == ledger.held_bytes(Tier.DISK) == 0
        assert list(tmp_path.iterdir()) == []


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_guesses_of_frozen_blocks_outlive_a_step(
    compute_device: torch.device,
    tokens: torch.Tensor,
    tmp_path: Path,
    rings: list[StagingRing],
):
    """An optimizer that writes other blocks waits for their reads; what it withdrew is fetched ahead again."""
    model = large_decoder()
    for layer in model.layers:
        layer.requires_grad_(False)
    handle = offload(model, compute_device, tmp_path, rings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss_of(model, tokens).backward()
        optimizer.step()
    assert handle._fetching._ahead  # type: ignore[union-attr]
    assert not any(fetch.withdrawn for fetch in handle._fetching._ahead.values())  # type: ignore[union-attr]
    handle.remove()
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def test_nothing_is_guessed_while_a_fetch_is_promised(
    compute_device: torch.device,
    tmp_path: Path,
    rings: list[StagingRing],
    fetches: list[tuple[Any, Fetch]],
    monkeypatch: pytest.MonkeyPatch,
):
    """It may need all chunks of the ring when another thread asks for it."""
    model = large_decoder().requires_grad_(False)
    made = instances(monkeypatch, Fetching)

    def guessed() -> list[Any]:
        return [block for block, fetch in fetches if fetch.is_guess and fetch is not promised]

    with offload(model, compute_device, tmp_path, rings) as handle:
        (fetching,), (one, other, *_), promised = made, layers_on_disk(handle), None
        fetching.ahead(other, 0)
        assert guessed() == [other]
        promised = fetching.promise(one)
        assert not guessed()
        assert not fetching.ahead(other, 0)
        assert not guessed()
        promised.ask(None)
        fetching.kept(promised)
        fetching.ahead(other, 0)
        assert guessed() == [other]


def comes_to(free_slots: int, ring: StagingRing) -> bool:
    """Waits until so many slots are free. False: that does not come."""
    deadline = time.monotonic() + 20
    while ring.free_slots != free_slots and time.monotonic() < deadline:
        time.sleep(0.01)
    return ring.free_slots == free_slots


def test_a_guess_that_ctrl_c_left_without_reads_keeps_nobody_waiting(
    compute_device: torch.device, tmp_path: Path, rings: list[StagingRing], monkeypatch: pytest.MonkeyPatch
):
    """A later guess has all chunks of the ring then. Both are withdrawn, and the chunks come back."""
    model = large_decoder().requires_grad_(False)
    made = instances(monkeypatch, Fetching)

    def strike(*_: Any) -> int:
        raise KeyboardInterrupt

    with offload(model, compute_device, tmp_path, rings) as handle:
        (fetching,), (one, other, *_), ring = made, layers_on_disk(handle), rings[-1]
        fetching.withdraw_all()
        chunks = RING_BYTES // ring.slot_bytes
        with monkeypatch.context() as patch:
            patch.setattr("headrace.weights.rest.fetching.min", strike, raising=False)
            with pytest.raises(KeyboardInterrupt):
                fetching.ahead(one, 0)
        fetching.ahead(other, 0)
        assert comes_to(0, ring)
        fetching.withdraw_all()
        came_back = comes_to(chunks, ring)
        if not came_back:
            ring.close()  # ends the wait of the thread that reads
        assert came_back


def test_records_of_reads_go_with_them(tokens: torch.Tensor, tmp_path: Path):
    """Where the CPU is the device, and has room for several blocks: what is asked for waits for no turn."""
    model = Decoder(layers=60, width=32).requires_grad_(False)
    budgets = {"device_memory": "256KiB", "host_memory": "640KiB"}
    with (
        headrace.offload(model, device="cpu", disk=tmp_path, blocks=[model.layers], **budgets) as handle,
        torch.no_grad(),
    ):
        kept = []
        for _ in range(4):
            handle.reset_stats()
            model(tokens)
            assert handle.stats().fetch_bytes > 0
            kept.append(len(handle._fetching._turns._under_way))  # type: ignore[union-attr]
    assert max(kept) < 60  # not even one for each block


@pytest.mark.parametrize("trains", [False, True])
def test_ctrl_c_at_any_line_of_a_fetch_leaves_nobody_waiting(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, rings: list[StagingRing], trains: bool
):
    """It is raised at one line after the other of `weights/rest/fetching.py`, in the thread that computes."""
    plain = large_decoder().requires_grad_(trains).to(compute_device)
    expected = loss_of(plain, tokens.to(compute_device)).detach()
    model = large_decoder().requires_grad_(trains)
    handle = offload(model, compute_device, tmp_path, rings)

    def a_pass() -> torch.Tensor:
        loss = loss_of(model, tokens)
        if trains:
            loss.backward()
        return loss.detach()

    for _ in range(3):
        a_pass()
    broken_off = 0
    for line in itertools.count(1, 29 if trains else 13):
        with InterruptAt(line, "/rest/fetching.py") as interrupt:
            try:
                a_pass()
            except KeyboardInterrupt:
                broken_off += 1
        if not interrupt.struck:
            break
        assert torch.equal(a_pass(), expected)
    assert broken_off > 8
    model.zero_grad()
    plain.zero_grad()
    assert torch.equal(a_pass(), expected)
    if trains:
        loss_of(plain, tokens.to(compute_device)).backward()
        assert_same_gradients(model, plain)
    assert handle.stats().fetch_bytes > 0
    handle.synchronize()
    handle.remove()


class InterruptAt:
    """Within, the n-th line of a file that this thread comes to raises KeyboardInterrupt."""

    def __init__(self, line: int, file: str) -> None:
        self._left, self._file = line, file
        self.struck = False

    def __enter__(self) -> "InterruptAt":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if not frame.f_code.co_filename.endswith(self._file):
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self.struck = True
                raise KeyboardInterrupt
        return self._trace
