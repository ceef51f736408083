"""Do single tensors keep values and limits under any sequence of calls, with few slots, with a failing drive?"""

import errno
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.compat.tutorial import OffloadTier
from headrace.compat.tutorial.blocks import DiskSettings
from headrace.compat.tutorial.tensors import TieredTensors
from headrace.errors import BudgetError, DiskError, StateError
from headrace.memory.disk.file import DirectFile
from headrace.memory.ledger import Tier

KIB = 1024
Make = Callable[..., TieredTensors]


@pytest.fixture
def make(compute_device: torch.device, tmp_path: Path) -> Iterator[Make]:
    made = []

    def tiered(slots: int = 8, packs: bool = False, **settings: Any) -> TieredTensors:
        disk = DiskSettings(str(tmp_path), block_bytes=4 * KIB, slots=slots, packs=packs)
        made.append(TieredTensors(compute_device, disk=disk, **settings))
        return made[-1]

    yield tiered
    for tensors in made:
        tensors.close()


def value(seed: int, nbytes: int = 8 * KIB) -> torch.Tensor:
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_calls(make: Make, compute_device: torch.device, slots: int, packs: bool, seed: int) -> None:
    """Against a dict: values after each call, and never more bytes than the limits."""
    choose = random.Random(f"{seed} {slots} {packs}")
    sizes = {f"t{index}": choose.choice([0, 1, 100, 5 * KIB, 8 * KIB, 9 * KIB]) for index in range(9)}
    expected = {name: value(index, sizes[name]) for index, name in enumerate(sizes)}
    device_bytes, host_bytes = 22 * KIB, 24 * KIB
    tensors = make(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        visiting_bytes=18 * KIB,
        slots=slots,
        packs=packs,
    )
    tensors.add({name: tensor.clone() for name, tensor in expected.items()}, choose.choice(list(Tier)))
    for step in range(60):
        name = choose.choice(list(expected))
        match choose.choice(["get", "get", "write", "put", "put_own", "prefetch", "let_go", "take_out"]):
            case "get":
                assert torch.equal(tensors.get(name, ahead=choose.randrange(3)).cpu(), expected[name])
            case "write":
                tensors.get(name).add_(1)
                expected[name] = expected[name] + 1
            case "put":
                expected[name] = value(1000 + step, sizes[name])
                tensors.put(name, expected[name].to(choose.choice(["cpu", compute_device])))
            case "put_own":
                own = tensors.get(name)
                own.mul_(3)
                expected[name] = expected[name] * 3
                tensors.put(name, own)
                del own
            case "prefetch":
                tensors.prefetch(choose.sample(list(expected), 3))
            case "let_go":
                tensors.let_go(name)
            case "take_out":
                assert torch.equal(tensors.take_out(name), expected[name])
        assert tensors.held_bytes(Tier.DEVICE) <= device_bytes
    assert tensors.ledger.peak_bytes(Tier.DEVICE) <= device_bytes
    assert tensors.ledger.peak_bytes(Tier.HOST) <= host_bytes
    tensors.synchronize()
    for name, tensor in expected.items():
        assert torch.equal(tensors.take_out(name), tensor)


def test_a_tensor_that_is_loaded_ahead_stays_until_it_was_used(make: Make) -> None:
    tensors = make(device_bytes=24 * KIB)
    tensors.add({name: value(0) for name in "abcd"}, Tier.HOST)
    tensors.get("a")
    assert tensors.prefetch("bc") == []
    assert tensors.prefetch("d") == ["d"]  # `a` was asked for last, nobody has used the others
    tensors.get("b")
    assert tensors.prefetch("d") == []
    assert tensors.on_device == ["b", "c", "d"]


def test_an_own_reference_keeps_memory_and_is_counted(make: Make) -> None:
    tensors = make(device_bytes=16 * KIB)
    tensors.add({name: value(0) for name in "abc"}, Tier.HOST)
    kept = tensors.get("a")
    tensors.put("a", kept)
    assert tensors.held_bytes(Tier.DEVICE) == 8 * KIB
    tensors.get("b")
    tensors.get("c")  # in the place of `b`
    view = tensors.get("c")
    with pytest.raises(BudgetError, match=r"In use: c, and 1 copies that were let go of but are still referred to"):
        tensors.get("b")
    del kept
    assert tensors.get("b").nbytes == view.nbytes


@pytest.mark.emu("random:0", guard_pinned=False)  # the misuse that it is about
def test_two_new_values_at_once_are_refused(make: Make) -> None:
    """Written where it rests and on the device: neither is thrown away without a word."""
    tensors = make()
    tensors.add({"a": value(0)}, Tier.HOST)
    owner = torch.empty(0, dtype=torch.uint8)
    tensors.show("a", owner)
    tensors.get("a").add_(1)
    owner.add_(1)
    with pytest.raises(StateError, match="put\\(\\) the value that holds"):
        tensors.get("a")


def test_copies_to_the_device_never_make_the_host_wait(emu_device: Any) -> None:
    tensors = TieredTensors(torch.device("emu:1"))
    tensors.add({name: value(index) for index, name in enumerate("abcd")}, Tier.HOST)
    emu_device.reset_stats()
    tensors.prefetch("ab")
    for name in "abcd":
        tensors.put(name, tensors.get(name, ahead=1) + 1)
    assert emu_device.stats()["host_syncs"] == 0
    assert torch.equal(tensors.take_out("c"), value(2) + 1)
    tensors.close()


def test_a_write_that_failed_is_no_value(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for it is told, others are served, and the next value that lands mends it."""
    tensors = make(slots=2, device_bytes=16 * KIB)
    tensors.add({"a": value(0), "b": value(1)}, Tier.DISK)
    tensors.synchronize()
    whole = DirectFile.write

    def fails(self: DirectFile, address: int, nbytes: int, offset: int, what: str) -> None:
        raise DiskError(errno.EIO, f"{what} could not be written")

    monkeypatch.setattr(DirectFile, "write", fails)
    tensors.put("a", value(2))
    with pytest.raises(DiskError, match="could not be written"):
        tensors.synchronize()
    monkeypatch.setattr(DirectFile, "write", whole)
    with pytest.raises(DiskError, match="could not be written"):
        tensors.get("a")
    tensors.prefetch("a")
    assert torch.equal(tensors.get("b").cpu(), value(1))
    tensors.put("a", value(3))
    assert torch.equal(tensors.get("a").cpu(), value(3))
    tensors.synchronize()


def test_bytes_that_changed_on_disk_are_found(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make()
    tensors.add({"a": value(0)}, Tier.DISK)
    tensors.synchronize()
    read = DirectFile.read

    def flips(self: DirectFile, address: int, nbytes: int, offset: int, what: str) -> None:
        import ctypes

        read(self, address, nbytes, offset, what)
        (ctypes.c_ubyte * nbytes).from_address(address)[nbytes // 2] ^= 1

    monkeypatch.setattr(DirectFile, "read", flips)
    tensors.prefetch("a")
    with pytest.raises(DiskError, match="are not those that were written"):
        tensors.get("a")
    monkeypatch.setattr(DirectFile, "read", read)
    assert torch.equal(tensors.get("a").cpu(), value(0))


def test_tiers_fill_in_order(make: Make) -> None:
    tensors = make(device_bytes=12 * KIB, visiting_bytes=4 * KIB, host_bytes=12 * KIB)
    tensors.add({name: value(0, size * KIB) for name, size in {"a": 5, "b": 5, "c": 3, "d": 8, "e": 1}.items()})
    cpu, gpu, nvme = OffloadTier.CPU, OffloadTier.GPU, OffloadTier.NVME
    assert [tensors.location(name).tier for name in "abcde"] == [gpu, cpu, gpu, nvme, cpu]
    with pytest.raises(BudgetError, match=r"'f' needs 13 KiB on .* when it is used; the limit there is 12 KiB"):
        tensors.add({"f": value(0, 13 * KIB)}, Tier.HOST)
    everything = make(device_bytes=12 * KIB, visiting_bytes=4 * KIB)
    everything.add({name: value(0, 6 * KIB) for name in "ab"})
    assert {everything.location(name).tier for name in "ab"} == {gpu}
