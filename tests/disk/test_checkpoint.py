"""Are safetensors files read as their own library reads them, in place, and is everything else refused?"""

import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file

from headrace.errors import BudgetError, CheckpointError, DiskError
from headrace.memory.arena import Arena
from headrace.memory.disk import Checkpoint, Part
from headrace.memory.disk.extent import PIECE_BYTES
from headrace.memory.disk.safetensors_header import DTYPES
from headrace.memory.ledger import Ledger, Tier
from tests.support.compare import same

WRITABLE = list(DTYPES.values())
READABLE = [dtype for dtype in WRITABLE if dtype not in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)]
# names that a map of names to places could trip over
NAMES = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda name: name != "__metadata__")


@contextmanager
def opened(path: Path, ledger: Ledger | None = None) -> Iterator[Checkpoint]:
    checkpoint = Checkpoint(path, ledger or Ledger())
    try:
        yield checkpoint
    finally:
        checkpoint.close()


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


def check_equal(path: Path, expected: dict[str, torch.Tensor]) -> None:
    with opened(path) as checkpoint:
        assert checkpoint.records.keys() == expected.keys()
        destinations = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        checkpoint.read(destinations)
        for name, tensor in expected.items():
            assert same(destinations[name], tensor), name
            assert same(checkpoint.tensor(name), tensor), name


@settings(max_examples=60)
@given(
    tensors=st.dictionaries(
        NAMES,
        st.tuples(st.sampled_from(READABLE), st.lists(st.integers(0, 40), max_size=3), st.integers(0, 2**31)),
        max_size=6,
    ),
    # With an empty map and no tensors the library writes a header that it cannot read.
    metadata=st.none()
    | st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")), min_size=1),
)
def test_it_reads_what_the_library_wrote(
    tensors: dict[str, Any], metadata: dict[str, str] | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    expected = {name: random_tensor(dtype, tuple(shape), seed) for name, (dtype, shape, seed) in tensors.items()}
    save_file(expected, path, metadata)
    check_equal(path, load_file(path))


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2])
def test_dtypes_that_the_library_writes_but_does_not_read(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": random_tensor(dtype, (3, 10), 0), "b": random_tensor(torch.float32, (7,), 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    check_equal(tmp_path, tensors)


def test_large_tensors_and_many_small_ones(tmp_path: Path) -> None:
    """Tensors over several pieces, neighbours that are read together, and a gap that is not read."""
    tensors = {
        "big": random_tensor(torch.bfloat16, (PIECE_BYTES + 3333,), 0),
        **{f"norm.{n}": random_tensor(torch.float16, (n + 1,), n) for n in range(300)},
        "z": random_tensor(torch.uint8, (PIECE_BYTES + 1,), 1),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    check_equal(tmp_path, tensors)
    with opened(tmp_path) as checkpoint:
        two = {name: torch.empty_like(tensors[name]) for name in ("norm.7", "z")}
        checkpoint.read(two)
        assert all(same(two[name], tensors[name]) for name in two)


def test_the_bytes_of_one_place_go_to_any_memory(tmp_path: Path) -> None:
    """Into a slice of a staging slot, of another dtype, at an odd address."""
    tensors = {"a": random_tensor(torch.float32, (33, 5), 0)}
    save_file(tensors, tmp_path / "model.safetensors")
    slot = torch.zeros(1000, dtype=torch.uint8)
    with opened(tmp_path) as checkpoint:
        checkpoint.read({"a": slot[7 : 7 + 660]})
        assert torch.equal(slot[7:667], tensors["a"].flatten().view(torch.uint8))
        assert slot[:7].eq(0).all()
        assert slot[667:].eq(0).all()
        with pytest.raises(ValueError, match="'a' has 660 bytes; its destination has 1000"):
            checkpoint.read({"a": slot})
        with pytest.raises(TypeError, match="'a' is read into contiguous memory"):
            checkpoint.read({"a": torch.empty(5, 33).t()})
        with pytest.raises(CheckpointError, match="no tensor 'b' among its 1"):
            checkpoint.tensor("b")


def test_memory_of_a_tensor_is_private(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(5000)}, path)
    before = path.read_bytes()
    with opened(path) as checkpoint:
        tensor = checkpoint.tensor("a")
        tensor.fill_(1)
        assert checkpoint.tensor("a").sum() == 5000  # the same memory
    assert tensor.sum() == 5000  # which outlives the checkpoint
    assert path.read_bytes() == before


def test_what_threads_read_into_is_booked(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3 * PIECE_BYTES, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    ledger = Ledger()
    destination = {"a": torch.empty(3 * PIECE_BYTES, dtype=torch.uint8)}
    with opened(tmp_path, ledger) as checkpoint:
        checkpoint.read(destination)
        assert ledger.peak_bytes(Tier.HOST, "staging") == 4 * PIECE_BYTES
        assert ledger.by_purpose() == {}
        with checkpoint.reading(1 << 20, ledger):
            assert ledger.by_purpose() == {(Tier.HOST, "staging"): 1 << 20}
            checkpoint.read(destination)
    assert ledger.by_purpose() == {}
    refused = pytest.raises(BudgetError, match="staging need 32 MiB of host memory")
    with opened(tmp_path, Ledger(host_budget_bytes=PIECE_BYTES)) as checkpoint, refused:
        checkpoint.read(destination)


def test_bytes_of_a_file_as_they_lie(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": random_tensor(torch.uint8, (PIECE_BYTES + 12345,), 0)}, path)
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    memory = Arena(len(content), torch.device("cpu"), Ledger(), "test").tensor(0, len(content))
    with opened(path) as checkpoint:
        for offset in (0, 4096, 4097, PIECE_BYTES):
            part = Part(memory, offset, len(content) - offset)
            checkpoint.read_range(str(path), offset, [part], what="a").synchronize()
            assert torch.equal(memory[offset:], content[offset:])
            memory.zero_()
        with pytest.raises(ValueError, match=r"'model.safetensors': \d+ bytes at offset 8192 are not within"):
            checkpoint.read_range(str(path), 8192, [Part(memory, 0, len(content))], what="a")


def shards(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of two shards with an index."""
    tensors = {name: random_tensor(torch.float32, (100, n + 1), n) for n, name in enumerate("abcd")}
    weight_map = {}
    for number, names in enumerate(("ab", "cd"), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, path / file)
        weight_map.update(dict.fromkeys(names, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    tensors = shards(tmp_path)
    check_equal(tmp_path, tensors)
    check_equal(tmp_path / "model.safetensors.index.json", tensors)
    check_equal(tmp_path / "model-00001-of-00002.safetensors", {name: tensors[name] for name in "ab"})
    (tmp_path / "model.safetensors.index.json").unlink()
    check_equal(tmp_path, tensors)


def test_the_hub_cache_links_to_its_blobs(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    tensors = {"a": torch.arange(5)}
    save_file(tensors, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    check_equal(snapshot, tensors)


@pytest.mark.parametrize("how", ["name", "absolute", "link"])
def test_names_that_lead_elsewhere_are_refused(how: str, tmp_path: Path) -> None:
    elsewhere, directory = tmp_path / "secret.safetensors", tmp_path / "model"
    directory.mkdir()
    save_file({"a": torch.zeros(1)}, elsewhere)
    name = {"name": "../secret.safetensors", "absolute": str(elsewhere), "link": "model.safetensors"}[how]
    if how == "link":
        (directory / name).symlink_to(elsewhere)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"leads out of it, to .*secret.safetensors; it is not read"):
        Checkpoint(directory, Ledger())


def test_incomplete_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist; give a safetensors file"):
        Checkpoint(tmp_path / "nowhere", Ledger())
    with pytest.raises(CheckpointError, match="has no safetensors file"):
        Checkpoint(tmp_path, Ledger())
    shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    entries = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**entries, "e": entries["a"]}}))
    with pytest.raises(CheckpointError, match=r"lacks 'e' \(of 1 missing ones\)"):
        Checkpoint(tmp_path, Ledger())
    index.write_text(json.dumps({"weight_map": {**entries, "e": "model-3.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"lacks 'model-3.safetensors', a part of its checkpoint"):
        Checkpoint(tmp_path, Ledger())
    for text, problem in (
        ("{", "no sound JSON"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": 1}}', "no weight_map"),
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=problem):
            Checkpoint(tmp_path, Ledger())
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has 2 indices"):
        Checkpoint(tmp_path, Ledger())
    for extra in tmp_path.glob("*.json"):
        extra.unlink()
    save_file({"a": torch.zeros(1)}, tmp_path / "variant.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is in .*model-00001.* and in .*variant"):
        Checkpoint(tmp_path, Ledger())


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


UNSOUND: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "header too small"),
    "short": (b"\0" * 7, "header too small"),
    "header beyond the end": (struct.pack("<Q", 1000) + b"{}", "invalid header length"),
    "header length absurd": (struct.pack("<Q", 2**63) + b"{}", "header too large"),
    "header over the limit": (struct.pack("<Q", 100_000_001) + b"{}", "header too large"),
    "no JSON": (file_of(b"{nope"), "invalid JSON"),
    "no UTF-8": (file_of(b'{"\xff\xfe": 1}'), "invalid UTF-8"),
    "deep": (file_of(b"[" * 100_000), "invalid JSON"),
    "no object": (file_of([1]), "invalid type: sequence"),
    "name twice": (file_of(b'{"a": 1, "a": 2}'), "invalid type: integer"),
    "metadata": (file_of({"__metadata__": {"a": 1}}), "expected a string"),
    "entry": (file_of({"a": 1}), "invalid type: integer"),
    "entry lacks": (file_of({"a": {"dtype": "F32"}}), "missing field `shape`"),
    "dtype": (file_of({"a": entry("F33")}, b"0000"), "unknown variant `F33`"),
    "dtype of no tensors": (
        file_of({"a": entry("F6_E2M3", (4,), (0, 3))}, b"000"),
        "'a' is of F6_E2M3, and PyTorch has",
    ),
    "dtype no text": (file_of({"a": entry(["F32"])}, b"0000"), "expected string"),
    "negative": (file_of({"a": entry(shape=(-1,))}, b"0000"), "expected usize"),
    "shape true": (file_of({"a": entry(shape=(True,))}, b"0000"), "expected usize"),
    "shape float": (file_of({"a": entry(shape=(1.0,))}, b"0000"), "expected usize"),
    "offsets reversed": (file_of({"a": entry(offsets=(4, 0))}, b"0000"), "invalid offset for tensor `a`"),
    "offsets three": (file_of({"a": entry(offsets=(0, 4, 8))}, b"0000"), "expected 2 elements"),
    "bytes": (file_of({"a": entry(shape=(2,))}, b"0000"), "invalid shape, data type, or offset"),
    "shape overflows": (file_of({"a": entry(shape=(2**62, 8))}, b"0000"), "overflow"),
    "overlap": (file_of({"a": entry(), "b": entry(offsets=(2, 6))}, b"0" * 6), "invalid offset for tensor `b`"),
    "twice the same": (file_of({"a": entry(), "b": entry()}, b"0" * 4), "invalid offset for tensor"),
    "hole": (file_of({"a": entry(), "b": entry(offsets=(8, 12))}, b"0" * 12), "invalid offset for tensor `b`"),
    "hole at the begin": (file_of({"a": entry(offsets=(4, 8))}, b"0" * 8), "invalid offset for tensor `a`"),
    "out of range": (file_of({"a": entry()}, b"000"), "file not fully covered"),
    "too long": (file_of({"a": entry()}, b"00000"), "file not fully covered"),
    "half a byte": (file_of({"a": entry("F4", (3,), (0, 1))}, b"0"), "byte boundary"),
    "half a byte in a row": (file_of({"a": entry("F4", (2, 3), (0, 3))}, b"000"), "rows of an odd number of values"),
}
ONLY_HERE = ("dtype of no tensors", "half a byte in a row")  # what PyTorch has no tensors for


@pytest.mark.parametrize("case", UNSOUND)
def test_unsound_files_are_refused(case: str, tmp_path: Path) -> None:
    content, problem = UNSOUND[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=problem) as refused:
        Checkpoint(path, Ledger())
    assert str(path) in str(refused.value)
    if case not in ONLY_HERE:
        with pytest.raises((SafetensorError, KeyError)):  # its own library refuses it too
            load(content)


def test_a_header_may_say_more_of_a_tensor(tmp_path: Path) -> None:
    content = file_of({"a": {**entry(), "name": "of mine", "file": 1}}, b"\0\0\0\x40")
    assert load(content)["a"] == 2
    (tmp_path / "model.safetensors").write_bytes(content)
    with opened(tmp_path / "model.safetensors") as checkpoint:
        assert checkpoint.tensor("a") == 2


@settings(max_examples=150)
@given(position=st.integers(0, 200), byte=st.integers(0, 255), cut=st.none() | st.integers(0, 250))
def test_a_changed_byte_is_refused_or_read_as_the_library_does(
    position: int, byte: int, cut: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(save({"weight": torch.arange(6.0).view(2, 3), "bias": torch.arange(3, dtype=torch.int16)}))
    content[position % len(content)] = byte
    content = content[:cut]
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    path.write_bytes(content)
    try:
        expected = load(bytes(content))
    except Exception:  # the library raises several kinds, KeyError among them
        expected = None
    try:
        with opened(path) as checkpoint:
            found = {name: checkpoint.tensor(name).clone() for name in checkpoint.records}
    except CheckpointError:
        found = None
    if expected is None:
        # A dtype that the library's reader for PyTorch lacks, although its format has it.
        assert found is None or any(tensor.dtype not in READABLE for tensor in found.values())
    elif found is not None:
        assert found.keys() == expected.keys()
        assert all(same(found[name], expected[name]) for name in found)


def test_a_shard_that_changes_while_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(50_000), "b": torch.ones(50_000)}, path)
    destination = {"b": torch.empty(50_000)}
    with opened(path) as checkpoint:
        checkpoint.read(destination)
        os.truncate(path, 250_000)
        with pytest.raises(DiskError, match=r"'b': .*model.safetensors was written to since .* load the model again"):
            checkpoint.read(destination)


@pytest.mark.filterwarnings("ignore:the filesystem of")
def test_on_other_filesystems(mount: Callable[[str, int], Path]) -> None:
    for kind in ("ext4", "tmpfs"):
        path = mount(kind, 32 << 20)
        tensors = shards(path)
        check_equal(path, tensors)
