"""Where the CPU is the device: do weights come from disk to where they belong, and to nowhere else?"""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import headrace
from headrace.memory.arena import Arena
from headrace.memory.disk import DISK_ALIGNMENT_BYTES
from headrace.memory.ledger import Ledger
from headrace.runtime.lanes import Copy
from headrace.weights.rest.reads import DiskRead
from headrace.weights.rest.rests import _scattered
from tests.support.compare import assert_same
from tests.support.models import Stack

pytestmark = pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O

PAGE = DISK_ALIGNMENT_BYTES


def memory_of(nbytes: int) -> torch.Tensor:
    return Arena(nbytes, torch.device("cpu"), Ledger(), "test").tensor(0, nbytes)


@pytest.mark.parametrize("seed", range(20))
def test_a_read_fills_its_parts_and_no_other_byte(seed: int) -> None:
    """Wherever tensors begin in the file and in the buffer; what neighbours in the buffer hold stays."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    parts, at, places = [], number(0, PAGE), []
    for _ in range(number(1, 6)):
        nbytes = number(1, 60) * 8 if number(0, 3) == 0 else number(64 << 10, 400 << 10)
        parts.append((at, nbytes))
        places.append(nbytes)
        at += nbytes + number(0, 3 * PAGE)
    total = -(-at // PAGE) * PAGE - number(0, 2) * number(0, 500)  # a file ends anywhere
    total = max(total, parts[-1][0] + parts[-1][1])
    to, where = number(0, 9) * 8, {}
    for index in torch.randperm(len(parts), generator=draw).tolist():
        where[index] = to
        to += parts[index][1] + number(0, 3) * 8
    file = torch.randint(0, 256, (total,), generator=draw, dtype=torch.uint8)
    chunk, buffer = memory_of(total), memory_of(to + 64)
    buffer.fill_(77)
    expected = buffer.clone()
    for index, (begin, nbytes) in enumerate(parts):
        expected[where[index] : where[index] + nbytes] = file[begin : begin + nbytes]
    laid_out = [(begin, nbytes, where[index]) for index, (begin, nbytes) in enumerate(parts)]
    memory, finish = _scattered(laid_out, total, chunk, buffer)
    if finish is None:
        assert all(nbytes < (64 << 10) + 2 * PAGE for nbytes in places)
        return
    read = 0
    for one in memory:
        if one.memory is buffer:
            assert (buffer.data_ptr() + one.begin) % PAGE == one.nbytes % PAGE == read % PAGE == 0
            assert any(place <= one.begin and one.begin + one.nbytes <= place + nbytes for _, nbytes, place in laid_out)
        one.memory[one.begin : one.begin + one.nbytes] = file[read : read + one.nbytes]
        read += one.nbytes
    assert read == total
    finish()
    assert torch.equal(buffer, expected)


def layers() -> Stack:
    return Stack((nn.Linear(600, 600, bias=number % 2 == 0) for number in range(12)), between=torch.tanh)


def test_weights_of_a_checkpoint_and_of_the_disk_tier_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the edges of tensors; both ways after the first passes, which learn what comes next."""
    torch.manual_seed(0)
    plain = layers()
    save_file(plain.state_dict(), tmp_path / "model.safetensors", {"padding": "x" * 5})
    with torch.device("meta"):
        model = layers()
    copied: Counter[str] = Counter()
    copies = DiskRead.copies

    def note(self: DiskRead, chunk: torch.Tensor, buffer: torch.Tensor) -> list[Copy]:
        copied["bytes"] += self.nbytes
        return copies(self, chunk, buffer)

    monkeypatch.setattr(DiskRead, "copies", note)
    batch = torch.randn(4, 600)
    layer_bytes = 600 * 600 * 4 + 600 * 4
    settings: dict[str, Any] = {"host_memory": "8MiB", "device_memory": 4 * layer_bytes, "disk": tmp_path / "spill"}
    with headrace.offload(
        model, device="cpu", checkpoint=tmp_path / "model.safetensors", blocks=list(model.layers), **settings
    ) as handle:
        ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, foreach=False) for one in (model, plain))
        for turn in range(2):  # as the checkpoint has them, and as the optimizer wrote them
            for number in range(4):
                if number == 2:
                    handle.reset_stats()
                    copied.clear()
                with torch.no_grad():
                    assert torch.equal(model(batch), plain(batch))
            stats = handle.stats()
            assert stats.fetch_bytes > 2 * 4 * layer_bytes
            assert copied["bytes"] <= stats.fetch_bytes // 100
            assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes
            assert stats.host_peak_bytes <= 8 << 20
            if turn == 0:
                for one, optimizer in ((model, ours), (plain, theirs)):
                    one(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
    assert_same(model.parameters(), plain.parameters())


def test_a_limited_link_copies(tmp_path: Path) -> None:
    """What goes at a given pace does so from memory."""
    torch.manual_seed(0)
    plain = layers()
    model = copy.deepcopy(plain).requires_grad_(False)
    batch = torch.randn(4, 600)
    with headrace.offload(
        model, device="cpu", host_memory="8MiB", device_memory="6MiB", disk=tmp_path, blocks=list(model.layers)
    ) as handle:
        handle.limit_copies("1GB", window_seconds=0.01)
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(model(batch), plain(batch))
        assert handle.stats().fetch_bytes > 0
