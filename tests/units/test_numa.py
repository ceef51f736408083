"""Does host memory come from all NUMA nodes that the process uses, and from its own where it uses one?"""

import os
from pathlib import Path

import pytest
import torch

from millrace.memory import pages
from millrace.memory.arena import Arena
from millrace.memory.ledger import Ledger
from millrace.runtime import numa

NBYTES = 64 * 4096


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two nodes of four cores with two threads each, and a node of memory alone."""
    for node, cores in {"node0": "0-3,8-11\n", "node1": "4-7,12-15\n", "node2": "\n"}.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores)
    (tmp_path / "node3").mkdir()  # went offline while we looked
    return tmp_path


@pytest.mark.parametrize(
    ("cores", "nodes"), [(range(16), (0, 1)), ({3}, (0,)), ({12, 15}, (1,)), ({7, 8}, (0, 1)), ({99}, ()), ((), ())]
)
def test_nodes_are_those_of_the_cores(machine: Path, cores: set[int], nodes: tuple[int, ...]) -> None:
    assert numa.nodes_in_use(cores, machine) == nodes


def test_without_nodes_there_are_none(tmp_path: Path) -> None:
    assert numa.nodes_in_use(range(4), tmp_path / "nothing") == ()


def policy_of(address: int) -> str:
    """What the kernel says of the mapping in which the address lies."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return max(
        (line for line in lines if int(line.split()[0], 16) <= address), key=lambda line: int(line.split()[0], 16)
    )


needs_libnuma = pytest.mark.skipif(
    numa._libnuma() is None or not os.access("/proc/self/numa_maps", os.R_OK), reason="no libnuma, or a kernel without"
)


@needs_libnuma
def test_an_arena_is_interleaved_where_several_nodes_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name on this machine's only node: the policy is what can be seen anywhere."""
    asked: list[tuple[int, ...]] = []

    def on_node_0(address: int, nbytes: int, nodes: tuple[int, ...]) -> bool:
        asked.append(nodes)
        return numa.interleave(address, nbytes, (0,))

    monkeypatch.setattr(pages, "nodes_of_process", lambda: (0, 1))
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
    monkeypatch.setattr(pages, "nodes_of_process", lambda: (0,))
    memory = Arena(NBYTES, torch.device("cpu"), Ledger(), "weights").tensor(0, NBYTES)
    assert "interleave" not in policy_of(memory.data_ptr())


def test_without_libnuma_an_arena_is_memory_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_libnuma", lambda: None)
    monkeypatch.setattr(pages, "nodes_of_process", lambda: (0, 1))
    memory = Arena(NBYTES, torch.device("cpu"), Ledger(), "weights").tensor(0, NBYTES)
    assert memory.fill_(7).sum() == 7 * NBYTES
