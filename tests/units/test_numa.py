"""Does host memory come from all NUMA nodes that the process uses, and from its own where it uses one?"""

import ctypes
import mmap
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import headrace
from headrace.memory import pages
from headrace.memory.arena import Arena
from headrace.memory.ledger import Ledger
from headrace.runtime import numa

NBYTES = 64 * 4096


def policy_of(address: int) -> str:
    """What the kernel says of the mapping in which the address lies."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return max(
        (line for line in lines if int(line.split()[0], 16) <= address), key=lambda line: int(line.split()[0], 16)
    )


needs_libnuma = pytest.mark.skipif(
    numa.libnuma() is None or not os.access("/proc/self/numa_maps", os.R_OK), reason="no libnuma, or a kernel without"
)


@needs_libnuma
def test_an_arena_is_interleaved_where_several_nodes_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name on this machine's only node: the policy is what can be seen anywhere."""
    asked: list[tuple[int, ...]] = []

    def on_node_0(address: int, nbytes: int, nodes: tuple[int, ...]) -> bool:
        asked.append(nodes)
        return numa.interleave(address, nbytes, (0,))

    monkeypatch.setattr(numa, "nodes_of_process", lambda: (0, 1))
    monkeypatch.setattr(pages, "interleave", on_node_0)
    ledger = Ledger()
    memory = Arena(NBYTES, torch.device("cpu"), ledger, "weights").tensor(0, NBYTES)
    assert asked == [(0, 1)]
    line = policy_of(memory.data_ptr())
    assert "interleave:0" in line
    assert f"dirty={NBYTES // 4096}" in line  # every page is there
    assert memory.sum() == 0


@needs_libnuma
def test_an_arena_of_one_node_has_the_kernels_own_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "nodes_of_process", lambda: (0,))
    memory = Arena(NBYTES, torch.device("cpu"), Ledger(), "weights").tensor(0, NBYTES)
    assert "interleave" not in policy_of(memory.data_ptr())


def test_without_libnuma_an_arena_is_memory_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "libnuma", lambda: None)
    monkeypatch.setattr(numa, "nodes_of_process", lambda: (0, 1))
    memory = Arena(NBYTES, torch.device("cpu"), Ledger(), "weights").tensor(0, NBYTES)
    assert memory.fill_(7).sum() == 7 * NBYTES


class Library:
    """What libnuma was asked for: (address, bytes, nodes)."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, object]] = []
        self._mask: list[int] = []
        numa._has_memory.cache_clear()

    def numa_get_mems_allowed(self) -> list[int]:
        self._mask = [0, 1]
        return self._mask

    def numa_bitmask_isbitset(self, mask: list[int], node: int) -> bool:
        return node in mask

    def numa_allocate_nodemask(self) -> list[int]:
        self._mask = []
        return self._mask

    def numa_bitmask_setbit(self, mask: list[int], node: int) -> None:
        mask.append(node)

    def numa_bitmask_free(self, mask: list[int]) -> None:
        assert mask is self._mask

    def numa_interleave_memory(self, address: int, nbytes: int, mask: list[int]) -> None:
        self.asked.append((address, nbytes, tuple(mask)))

    def numa_node_of_cpu(self, core: int) -> int:
        """Two nodes of four cores with two threads each."""
        return core // 4 % 2 if core < 16 else -1

    def numa_tonode_memory(self, address: int, nbytes: int, node: int) -> None:
        self.asked.append((address, nbytes, node))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(numa, "libnuma", lambda: found)
    return found


CORES = [({*range(16)}, (0, 1)), ({3}, (0,)), ({12, 15}, (1,)), ({7, 8}, (0, 1)), ({99}, ()), (set(), ())]


@pytest.mark.parametrize(("cores", "nodes"), CORES)
def test_nodes_are_those_of_the_cores(
    library: Library, monkeypatch: pytest.MonkeyPatch, cores: set[int], nodes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores)
    assert numa.nodes_of_process.__wrapped__() == nodes


PAGE = mmap.PAGESIZE


@pytest.mark.parametrize(
    ("spread", "by_ranks", "asked"),
    [
        (numa.Spread((0, 1), (1, 0)), True, [(0, 10, (0, 1)), (0, 5, 1), (5, 5, 0)]),
        (numa.Spread((0, 1), (1, 0)), False, [(0, 10, (0, 1))]),
        (numa.Spread((0, 1)), True, [(0, 10, (0, 1))]),
        (numa.Spread((0, 1), (1, None, 0, 0)), True, [(0, 10, (0, 1)), (0, 3, 1), (5, 3, 0), (8, 2, 0)]),
        (numa.Spread((0,), (0, 1)), True, [(0, 5, 0), (5, 5, 1)]),
        (numa.Spread((0,), (0, 0)), True, []),
        (numa.Spread((0,)), True, []),
        (numa.Spread(), True, []),
    ],
)
def test_shared_memory_lies_at_the_devices(
    library: Library, spread: numa.Spread, by_ranks: bool, asked: list[tuple[int, int, object]]
) -> None:
    """Whole pages: what is left over goes to the rank that has most of the page."""
    spread.place(1 << 30, 10 * PAGE, by_ranks=by_ranks)
    assert library.asked == [((1 << 30) + first * PAGE, count * PAGE, nodes) for first, count, nodes in asked]


def test_the_node_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "pci_address", lambda device: f"0000:{device.index:02x}:00.0")
    for bus, node in enumerate(("1\n", "-1\n")):
        (tmp_path / f"0000:{bus:02x}:00.0").mkdir()
        (tmp_path / f"0000:{bus:02x}:00.0" / "numa_node").write_text(node)
    assert [numa.node_of(torch.device("cuda", index), tmp_path) for index in range(3)] == [1, None, None]
    for nodes, expected in (((1,), 1), ((0, 1), None)):
        monkeypatch.setattr(numa, "nodes_of_process", lambda nodes=nodes: nodes)
        assert numa.node_of(torch.device("cpu")) == expected


@needs_libnuma
def test_binding_is_the_kernels_policy() -> None:
    memory = mmap.mmap(-1, 4 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert numa.bind(address, 4 * PAGE, 0)
    memory.write(b"x")
    assert any(policy in policy_of(address) for policy in ("bind:0", "prefer:0"))


@needs_libnuma
def test_a_node_whose_memory_this_process_may_not_have_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """libnuma would print an error for each piece of memory."""
    memory = mmap.mmap(-1, 4 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert not numa.bind(address, 4 * PAGE, 1000)
    assert capfd.readouterr().err == ""


@pytest.mark.emu("lazy")
@pytest.mark.parametrize("trained", [False, True])
def test_frozen_weights_lie_at_the_device_and_trained_ones_at_all_cores(
    emu_device: ModuleType, library: Library, monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    monkeypatch.setattr(numa, "nodes_of_process", lambda: (0, 1))
    monkeypatch.setattr(numa, "node_of", lambda device: device.index)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(trained)
    with headrace.offload(model, device=torch.device("emu", 1), device_memory="20KiB"):
        assert {nodes for _, _, nodes in library.asked} == ({(0, 1)} if trained else {1})
        assert sum(nbytes for _, nbytes, _ in library.asked) >= sum(p.nbytes for p in model.parameters())


def test_unknown_nodes_of_devices_and_cpus_take_memory_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "node_of", lambda device: None)
    for nodes, expected in (((0, 1), (0, 1)), ((0,), ()), ((), ())):
        monkeypatch.setattr(numa, "nodes_of_process", lambda nodes=nodes: nodes)
        assert numa.nodes_for(torch.device("cuda", 1), computed=False) == expected
        assert numa.nodes_for(torch.device("cpu"), computed=False) == expected
