"""Does the memory that is available mind the limits of every cgroup above this process?"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.runtime import host

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712


class Machine:
    """A fake machine with 64 GiB available, /proc/self/cgroup and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.cgroups = root / "sys/fs/cgroup"
        self.cgroups.mkdir(parents=True)
        self.own = root / "proc/self/cgroup"
        self.own.parent.mkdir(parents=True)

    def belongs_to(self, *lines: str) -> None:
        self.own.write_text("".join(f"{line}\n" for line in lines))

    def group(self, path: str, **files: object) -> None:
        directory = self.cgroups / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setattr(host, "_ROOT", tmp_path)
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    return machine


def test_without_cgroups_it_is_what_the_machine_has(machine: Machine) -> None:
    assert host.available_host_bytes() == 64 * GIB


def test_version_2_limit_of_the_own_group(machine: Machine) -> None:
    machine.belongs_to("0::/slice/job")
    machine.group("slice/job", memory__max=10 * GIB, memory__current=3 * GIB)
    assert host.available_host_bytes() == 7 * GIB


def test_version_2_limit_of_a_parent_counts_too(machine: Machine) -> None:
    machine.belongs_to("0::/slice/job")
    machine.group("slice/job", memory__max="max", memory__current=3 * GIB)
    machine.group("slice", memory__max=8 * GIB, memory__current=6 * GIB)
    assert host.available_host_bytes() == 2 * GIB


def test_in_a_container_the_own_group_is_the_root(machine: Machine) -> None:
    machine.belongs_to("0::/")
    machine.group("", memory__max=4 * GIB, memory__current=1 * GIB)
    assert host.available_host_bytes() == 3 * GIB


def test_a_path_that_the_container_does_not_show_falls_back_to_its_root(machine: Machine) -> None:
    machine.belongs_to("0::/docker/abc")
    machine.group("", memory__max=4 * GIB, memory__current=1 * GIB)
    assert host.available_host_bytes() == 3 * GIB


def test_a_group_beyond_its_limit_leaves_nothing(machine: Machine) -> None:
    machine.belongs_to("0::/job")
    machine.group("job", memory__max=1 * GIB, memory__current=2 * GIB)
    assert host.available_host_bytes() == 0


def test_cached_files_that_can_go_do_not_count_as_used(machine: Machine) -> None:
    """Reading a checkpoint fills the page cache, which counts as the group's memory until somebody needs it."""
    machine.belongs_to("0::/job")
    stat = f"anon {GIB}\ninactive_file {5 * GIB}\nactive_file {GIB}"
    machine.group("job", memory__max=10 * GIB, memory__current=7 * GIB, memory__stat=stat)
    assert host.available_host_bytes() == 8 * GIB


def test_version_1_limit_at_the_root_that_a_container_sees(machine: Machine) -> None:
    machine.belongs_to("7:memory:/docker/abc", "3:cpu,cpuacct:/docker/abc")
    machine.group("memory", memory__limit_in_bytes=6 * GIB, memory__usage_in_bytes=2 * GIB)
    assert host.available_host_bytes() == 4 * GIB


def test_version_1_limit_of_the_own_group_and_its_parents(machine: Machine) -> None:
    machine.belongs_to("7:memory:/slice/job", "0::/unified")
    machine.group("memory", memory__limit_in_bytes=NO_LIMIT_V1, memory__usage_in_bytes=2 * GIB)
    machine.group("memory/slice", memory__limit_in_bytes=20 * GIB, memory__usage_in_bytes=15 * GIB)
    stat = f"inactive_file 0\ntotal_inactive_file {GIB}"
    machine.group("memory/slice/job", memory__limit_in_bytes=5 * GIB, memory__usage_in_bytes=4 * GIB, memory__stat=stat)
    assert host.available_host_bytes() == 2 * GIB


def test_version_1_without_a_limit(machine: Machine) -> None:
    machine.belongs_to("7:memory:/")
    machine.group("memory", memory__limit_in_bytes=NO_LIMIT_V1, memory__usage_in_bytes=2 * GIB)
    assert host.available_host_bytes() == 64 * GIB


def test_the_machine_may_have_less_than_the_group_allows(machine: Machine) -> None:
    machine.belongs_to("0::/job")
    machine.group("job", memory__max=100 * GIB, memory__current=0)
    assert host.available_host_bytes() == 64 * GIB


def test_this_machine_has_some() -> None:
    assert 0 < host.available_host_bytes() < 1 << 50
