"""Do encoded bytes come back equal, in fewer bytes of traffic, raw where nothing is gained, and by the rule?"""

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import BudgetError, DiskError
from millrace.memory.disk import DISK_ALIGNMENT_BYTES, DiskStore
from millrace.memory.disk import encoding as encoding_module
from millrace.memory.disk.codec import Speeds, decode, encode, pays
from millrace.memory.disk.extent import PIECE_BYTES
from millrace.memory.ledger import Ledger

PAGE = DISK_ALIGNMENT_BYTES


def weights(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of normally distributed weights."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(elements, generator=generator).mul_(0.02).to(dtype).view(torch.uint8)


@settings(max_examples=80, deadline=None)
@given(content=st.binary(max_size=2000), repeated=st.integers(1, 50), element_bytes=st.sampled_from([1, 2, 3, 4, 8]))
def test_what_is_encoded_is_decoded(content: bytes, repeated: int, element_bytes: int) -> None:
    memory = torch.frombuffer(bytearray(content * repeated or b"\0"), dtype=torch.uint8)
    encoded = encode(memory, element_bytes)
    if encoded is None:
        return
    assert len(encoded) < memory.nbytes
    found = torch.zeros_like(memory)
    decode(memoryview(encoded), found, element_bytes)
    assert torch.equal(found, memory)


@pytest.mark.parametrize(
    ("dtype", "least"),
    [(torch.bfloat16, 1.35), (torch.float16, 1.05), (torch.float32, 1.1), (torch.float8_e4m3fn, None)],
)
def test_planes_make_weights_smaller(dtype: torch.dtype, least: float | None) -> None:
    memory = weights(1 << 18, dtype)
    encoded = encode(memory, dtype.itemsize)
    ratio = 1.0 if encoded is None else memory.nbytes / len(encoded)
    assert ratio >= (least or 1.0)
    assert encode(torch.randint(0, 256, (1 << 18,), dtype=torch.uint8), 2) is None  # noise stays as it is


@pytest.mark.parametrize("nbytes", [2 * PAGE + 6, PIECE_BYTES + 3 * PAGE + 2])
def test_fewer_bytes_travel(nbytes: int, tmp_path: Path) -> None:
    source, seen = weights(nbytes // 2, torch.bfloat16), torch.empty(nbytes, dtype=torch.uint8)
    with DiskStore(tmp_path, Ledger(), codec="planes") as store:
        extent = store.allocate("layers.0", nbytes, "weights", element_bytes=2)
        neighbour = store.allocate("layers.1", nbytes, "weights", element_bytes=2)
        for one in (extent, neighbour):
            store.write(one, source)
        store.read(extent, seen)
        store.synchronize()
        assert torch.equal(seen, source)
        assert store.written_bytes <= 2 * (nbytes / 1.3 + PAGE)
        assert store.read_bytes == store.written_bytes / 2
        part = torch.empty(101, dtype=torch.uint8)
        store.read(extent, part, nbytes - 101).synchronize()
        assert torch.equal(part, source[-101:])
        store.write(extent, part.fill_(7), 5)  # of an encoded piece
        source[5:106] = 7
        store.read(extent, seen).synchronize()
        assert torch.equal(seen, source)


def test_noise_is_stored_as_it_is(tmp_path: Path) -> None:
    source = torch.randint(0, 256, (4 * PAGE,), dtype=torch.uint8)
    with DiskStore(tmp_path, Ledger(), codec="planes") as store:
        extent = store.allocate("layers.0", source.nbytes, "weights", element_bytes=2)
        store.write(extent, source).synchronize()
        assert store.written_bytes == source.nbytes


@pytest.mark.parametrize("place", [0, 5, 3 * PAGE])
def test_a_damaged_encoded_piece_is_an_error(place: int, tmp_path: Path) -> None:
    source = weights(1 << 15, torch.bfloat16)
    with DiskStore(tmp_path, Ledger(), codec="planes") as store:
        extent = store.allocate("layers.0", source.nbytes, "weights", element_bytes=2)
        store.write(extent, source).synchronize()
        paths = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        path = next(p for p in paths if os.path.lexists(p) and os.readlink(p).startswith(f"{tmp_path}/#"))
        with open(path, "r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 0x55]))
        with pytest.raises(DiskError, match=r"'layers.0': .* Start again from the last checkpoint"):
            store.read(extent, torch.empty_like(source)).synchronize()


@pytest.mark.parametrize(
    ("encode_speed", "decode_speed", "ratio", "expected"),
    [
        (2.1, 2.1, 1.05, True),  # slower than the serial rule asks for (above 42), faster than the drive: it pays
        (1.9, 9.0, 10.0, False),  # no ratio helps a codec that is slower than the drive
        (9.0, 1.9, 10.0, False),
        (9.0, 9.0, 1.04, False),
    ],
)
def test_the_rule(encode_speed: float, decode_speed: float, ratio: float, expected: bool) -> None:
    assert pays(Speeds(encode_speed, decode_speed, ratio), 2.0, 2.0) is expected
    raw, encoded = 1 / 2.0, max(1 / min(encode_speed, decode_speed), 1 / (ratio * 2.0))
    assert expected == (encoded < raw and ratio >= 1.05)  # the pipelined times themselves


@pytest.mark.parametrize(("drive", "smaller"), [(1.0, True), (math.inf, False)])
def test_auto_measures_and_decides(
    drive: float, smaller: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    original: Callable[..., tuple[float, float]] = encoding_module.Encoding._measure_drive

    def measure_drive(*arguments: object) -> tuple[float, float]:
        measured.append(original(*arguments))
        return drive, drive

    monkeypatch.setattr(encoding_module.Encoding, "_measure_drive", measure_drive)
    source, seen = weights(PIECE_BYTES, torch.bfloat16), torch.empty(2 * PIECE_BYTES, dtype=torch.uint8)
    with DiskStore(tmp_path, Ledger(), codec="auto") as store:
        for name in ("layers.0", "layers.1"):
            extent = store.allocate(name, source.nbytes, "weights", element_bytes=2)
            store.write(extent, source)
            store.read(extent, seen).synchronize()
            assert torch.equal(seen, source)
        assert (store.written_bytes < 2 * source.nbytes) is smaller
    assert len(measured) == 1


def test_the_memory_of_a_codec_is_booked(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="staging need 32 MiB of host memory"):
        DiskStore(tmp_path, Ledger(host_budget_bytes=1 << 20), codec="planes")
    DiskStore(tmp_path, Ledger(host_budget_bytes=1 << 20)).close()
