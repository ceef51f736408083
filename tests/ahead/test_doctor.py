"""Is each thing that can be wrong with a machine found, with its fix, and nothing on a sound one?"""

import resource
from pathlib import Path

import psutil
import pytest
import torch

from millrace.cli.main import main
from millrace.runtime import checks
from millrace.runtime.checks import Machine, findings
from millrace.runtime.symptoms import SYMPTOMS

CPU = torch.device("cpu")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a sound machine with one card, under a root of their own."""
    monkeypatch.setattr(checks, "available_host_bytes", lambda: int(psutil.virtual_memory().total))
    monkeypatch.setattr(checks.os, "statvfs", lambda path: _Space(200 * 2**30))
    root = tmp_path / "root"
    write(root, "proc/version", "Linux version 6.1")
    write(root, "proc/mounts", "/dev/nvme0n1 / ext4 rw 0 0")
    write(root, "proc/self/status", "Mems_allowed_list:\t0-1")
    write(root, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    card = "sys/bus/pci/devices/0000:01:00.0"
    for name, text in {
        "class": "0x030000",
        "vendor": "0x10de",
        "numa_node": "0",
        "current_link_width": "16",
        "max_link_width": "16",
        "current_link_speed": "32.0 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
    }.items():
        write(root, f"{card}/{name}", text)
    write(root, "sys/devices/system/node/node0/distance", "10 21")
    return root


class _Space:
    def __init__(self, free: int) -> None:
        self.f_bavail, self.f_frsize = free, 1


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n")


def problems(root: Path, tmp_path: Path, **environment: str) -> list[str]:
    found = findings(Machine(device=CPU, disk=tmp_path, root=root, environment=environment))
    assert all(finding.fix for finding in found)
    # The card of the made-up machine is not driven by this torch, which is said every time.
    return [finding.problem for finding in found if "drives none" not in finding.problem]


def test_a_sound_machine_has_no_findings(files: Path, tmp_path: Path) -> None:
    assert problems(files, tmp_path) == []


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("proc/version", "Linux 5.15-microsoft-standard-WSL2", "this is WSL"),
        ("proc/mounts", "tmpfs / tmpfs rw 0 0", "which is host memory"),
        ("proc/mounts", "server:/x / nfs4 rw 0 0", "on the network (nfs4)"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]", "huge pages are off"),
        ("sys/bus/pci/devices/0000:01:00.0/current_link_width", "4", "uses 4 of 16 PCIe lanes"),
        ("sys/bus/pci/devices/0000:01:00.0/current_link_speed", "8.0 GT/s PCIe", "runs at 8 of 32 GT/s"),
        ("sys/devices/system/node/node1/distance", "21 10", "2 NUMA nodes (distances 10 21)"),
    ],
)
def test_what_is_wrong_is_found(files: Path, tmp_path: Path, path: str, text: str, problem: str) -> None:
    write(files, path, text)
    found = problems(files, tmp_path)
    assert len(found) == 1
    assert problem in found[0]


def test_starved_threads(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.os, "sched_getaffinity", lambda pid: range(16))
    monkeypatch.setattr(checks.psutil, "cpu_count", lambda: 16)
    assert problems(files, tmp_path, OMP_NUM_THREADS="8", LOCAL_WORLD_SIZE="2") == []
    (found,) = problems(files, tmp_path, OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE="2")
    assert "1 of 8 threads" in found
    monkeypatch.setattr(checks.psutil, "cpu_count", lambda: 64)
    (found,) = problems(files, tmp_path)
    assert "16 of 64 cores" in found


def test_limits(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available_host_bytes", lambda: 10**8)
    (found,) = problems(files, tmp_path)
    assert "host memory can be taken" in found
    monkeypatch.setattr(checks, "available_host_bytes", lambda: int(psutil.virtual_memory().total))
    monkeypatch.setattr(checks.os, "statvfs", lambda path: _Space(10**9))
    (found,) = problems(files, tmp_path)
    assert "1.0 GB left" in found


def test_limits_of_an_accelerator(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_accelerator", lambda device: True)
    monkeypatch.setattr(checks.resource, "getrlimit", lambda which: (2**16, resource.RLIM_INFINITY))

    class Module:
        @staticmethod
        def get_device_properties(device: torch.device) -> object:
            return type("Properties", (), {"is_integrated": 1})

    monkeypatch.setattr(checks.torch, "get_device_module", lambda device: Module)
    found = problems(files, tmp_path)
    assert any("may be page-locked" in problem for problem in found)
    assert any("is integrated" in problem for problem in found)


def test_old_torch_and_refused_direct_access(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.torch, "__version__", "2.4.1")
    opened = checks.os.open

    def refuse(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & checks.os.O_CREAT:
            return opened(path, flags, mode)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(checks.os, "open", refuse)
    found = problems(files, tmp_path)
    assert any("torch is 2.4.1; millrace needs 2.11" in problem for problem in found)
    assert any("refuses direct access (Invalid argument)" in problem for problem in found)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_machine_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither /proc nor /sys, as in some sandboxes: nothing is claimed of what cannot be seen."""
    monkeypatch.setattr(checks, "available_host_bytes", lambda: int(psutil.virtual_memory().total))
    monkeypatch.setattr(checks.os, "statvfs", lambda path: _Space(200 * 2**30))
    (found,) = findings(Machine(device=CPU, disk=tmp_path, root=tmp_path / "none", environment={}))
    assert "there is no accelerator" in found.problem


@pytest.mark.parametrize("ranks", ["0", "", "two", "-3"])
def test_variables_that_are_no_numbers(files: Path, tmp_path: Path, ranks: str, monkeypatch) -> None:
    monkeypatch.setattr(checks.os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setattr(checks.psutil, "cpu_count", lambda: 8)
    assert problems(files, tmp_path, OMP_NUM_THREADS="8,4", LOCAL_WORLD_SIZE=ranks) == []
    (found,) = problems(files, tmp_path, OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE=ranks)
    assert "1 of 8 threads" in found


def test_files_of_unknown_hardware(files: Path, tmp_path: Path) -> None:
    """Bytes that are no text, links of unknown width and speed, cards of other makers."""
    card = files / "sys/bus/pci/devices/0000:01:00.0"
    (card / "current_link_width").write_bytes(b"\xff\xfe")
    (card / "current_link_speed").write_text("Unknown\n")
    write(files, "sys/bus/pci/devices/0000:02:00.0/class", "0x030000")
    write(files, "sys/bus/pci/devices/0000:02:00.0/vendor", "0x8086")
    assert problems(files, tmp_path) == []


def test_a_directory_that_cannot_be_written_to(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(checks.Path, "touch", refuse)
    (found,) = problems(files, tmp_path)
    assert "nothing can be written to" in found
    assert "Read-only file system" in found


def test_a_directory_whose_name_has_a_space(files: Path, tmp_path: Path) -> None:
    named = tmp_path / "my drive"
    named.mkdir()
    mounts = str(named).replace(" ", r"\040")
    write(files, "proc/mounts", f"/dev/nvme0n1 / ext4 rw 0 0\ntmpfs {mounts} tmpfs rw 0 0")
    found = findings(Machine(device=CPU, disk=named, root=files, environment={}))
    assert any("is tmpfs, which is host memory" in finding.problem for finding in found)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--disk", str(tmp_path)]) in (0, 1)
    printed = capsys.readouterr().out
    assert printed.count("fix: ") == printed.count("note: ") + printed.count("SEVERE: ")
    assert main(["doctor", "--disk", str(tmp_path / "none")]) == 2
    assert "is no directory" in capsys.readouterr().err
    assert main(["doctor", "--symptoms"]) == 0
    printed = capsys.readouterr().out
    assert all(row.fix in printed and row.confirm in printed for row in SYMPTOMS)
