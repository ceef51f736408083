"""Is each thing that can be wrong with a machine found, with its fix, and nothing on a sound one?"""

import ast
import re
import resource
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch

from headrace.cli import checks
from headrace.cli.checks import Machine, findings
from headrace.cli.doctor import SYMPTOMS
from headrace.cli.main import build_parser, main
from headrace.runtime import page_locks

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a sound machine with one card, under a root of their own."""
    monkeypatch.setattr(checks, "available_host_bytes", lambda: int(psutil.virtual_memory().total))
    monkeypatch.setattr(checks.os, "statvfs", lambda path: _Space(200 * 2**30))
    mount(monkeypatch, "ext4")
    root = tmp_path / "root"
    write(root, "proc/version", "Linux version 6.1")
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


def mount(monkeypatch: pytest.MonkeyPatch, kind: str, place: Path = Path("/")) -> None:
    """All that is mounted is a filesystem of this kind, there."""
    part = SimpleNamespace(mountpoint=str(place), fstype=kind)
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [part])


class _Space:
    def __init__(self, free: int) -> None:
        self.f_bavail, self.f_blocks, self.f_frsize = free, free, 1


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
        ("proc/sys/kernel/osrelease", "6.18.33.2-microsoft-standard-WSL2", "this is WSL"),
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


@pytest.mark.parametrize(("kind", "problem"), [("tmpfs", "is tmpfs, which is host memory"), ("nfs4", "network (nfs4)")])
def test_where_spilled_bytes_would_lie(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, problem: str
) -> None:
    mount(monkeypatch, kind, tmp_path)
    (found,) = problems(files, tmp_path)
    assert problem in found


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


def test_wsl_says_half_of_its_ram(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(files, "proc/sys/kernel/osrelease", "6.18.33.2-microsoft-standard-WSL2")
    monkeypatch.setattr(page_locks, "total_host_bytes", lambda: 16_000_000 * 1024)
    found = findings(Machine(device=CPU, disk=tmp_path, root=files, environment={}))
    assert any("half of the RAM at most (8.2 GB here), and often far below" in finding.fix for finding in found)


V1_NO_LIMIT = 9223372036854771712


@pytest.mark.parametrize(
    ("group", "limit", "used", "found"),
    [
        ("0::/docker/job", "docker/job/memory.max", "docker/job/memory.current", True),
        ("0::/docker/job", "docker/memory.max", "docker/memory.current", True),  # of the group above
        ("0::/", "memory.max", "memory.current", True),
        ("4:memory:/job", "memory/job/memory.limit_in_bytes", "memory/job/memory.usage_in_bytes", True),
        ("4:memory:/host", "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", True),
        ("0::/docker/job", "other/memory.max", "other/memory.current", False),
    ],
)
def test_a_container_with_less_than_the_machine(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, limit: str, used: str, found: bool
) -> None:
    for name in ("available_host_bytes", "total_host_bytes"):
        monkeypatch.setattr(checks, name, lambda: 64_000_000 * 1024)
    write(files, "proc/self/cgroup", group)
    for text, expected in ((str(16 * 10**9), found), ("max", False), (str(V1_NO_LIMIT), False), (str(10**12), False)):
        write(files, f"sys/fs/cgroup/{limit}", text)
        write(files, f"sys/fs/cgroup/{used}", "1000")
        said = [problem for problem in problems(files, tmp_path) if "the container (cgroup) may take" in problem]
        assert len(said) == expected
        assert all("16.0 of 65.5 GB" in problem for problem in said)


def test_small_shared_memory(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "dev/shm").mkdir(parents=True)
    assert problems(files, tmp_path) == []
    small = files / "dev/shm"
    monkeypatch.setattr(checks.os, "statvfs", lambda path: _Space((64 if path == small else 200 * 2**10) * 2**20))
    (found,) = problems(files, tmp_path)
    assert "/dev/shm has 64 MiB" in found


@pytest.mark.parametrize(
    ("variable", "name"),
    [("COLAB_RELEASE_TAG", "Colab"), ("KAGGLE_KERNEL_RUN_TYPE", "Kaggle"), ("JPY_PARENT_PID", "Jupyter")],
)
def test_notebooks(files: Path, tmp_path: Path, variable: str, name: str) -> None:
    (found,) = problems(files, tmp_path, **{variable: "1"})
    assert f"this runs in a notebook ({name})" in found


@pytest.mark.emu("lazy")
def test_what_the_driver_refuses_to_lock_is_found(
    emu_device: ModuleType, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "available_host_bytes", lambda: 256 << 20)  # of which a quarter is tried
    machine = Machine(device=torch.device("emu", 1), disk=tmp_path, root=files, environment={})

    def said() -> list[str]:
        return [finding.problem for finding in findings(machine) if "page-locks" in finding.problem]

    held = emu_device.stats()["reserved_pinned_bytes"] + emu_device.stats()["registered_bytes"]
    assert said() == []
    emu_device.configure(pinned_memory=held + (18 << 20))
    (found,) = said()
    assert "the driver page-locks 16 MiB of host memory, of 64 MiB that were tried" in found
    assert emu_device.stats()["registered_bytes"] + emu_device.stats()["reserved_pinned_bytes"] == held


def test_locked_memory_is_told_of_where_a_driver_asks_for_it(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's locks pages by itself, whatever ulimit -l says."""

    def limits(machine: Machine) -> int:
        return sum("ulimit -l" in finding.problem for finding in findings(machine))

    monkeypatch.setattr(page_locks, "is_accelerator", lambda device: True)
    monkeypatch.setattr(checks, "is_accelerator", lambda device: False)  # what asks the driver itself
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2**16, resource.RLIM_INFINITY))
    monkeypatch.setattr(torch.version, "hip", None)
    for device, expected in (("cuda", 0), ("xpu", 1)):
        machine = Machine(device=torch.device(device, 0), disk=tmp_path, root=files, environment={})
        assert limits(machine) == expected
    monkeypatch.setattr(torch.version, "hip", "6.4")
    machine = Machine(device=torch.device("cuda", 0), disk=tmp_path, root=files, environment={})
    assert limits(machine) == 1


def test_limits_of_an_accelerator(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_accelerator", lambda device: True)
    monkeypatch.setattr(checks, "memlock_matters", lambda device: True)
    monkeypatch.setattr(checks, "lockable_bytes", lambda device, most, piece_bytes: most // 2)
    monkeypatch.setattr(checks, "limit_text", lambda device, release: "another machine")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2**16, resource.RLIM_INFINITY))

    class Module:
        @staticmethod
        def get_device_properties(device: torch.device) -> object:
            return type("Properties", (), {"is_integrated": 1})

    monkeypatch.setattr(checks.torch, "get_device_module", lambda device: Module)
    found = problems(files, tmp_path)
    assert any("may be page-locked" in problem for problem in found)
    assert any("that were tried" in problem for problem in found)
    assert any("is integrated" in problem for problem in found)


@pytest.mark.parametrize(
    ("device", "hip", "kind", "read"),
    [
        ("cuda", None, None, ""),
        ("cuda", "7.0", "rocm", "only read in its runtime's source: page-locking"),
        ("xpu", None, "xpu", "only read in its runtime's source: pinned memory"),
        ("hpu", None, "hpu", "not even read in its source"),
    ],
)
def test_an_accelerator_on_which_headrace_was_never_run(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, hip: str | None, kind: str, read: str
) -> None:
    monkeypatch.setattr(checks, "is_accelerator", lambda device: True)
    monkeypatch.setattr(checks, "memlock_matters", lambda device: False)
    monkeypatch.setattr(checks, "lockable_bytes", lambda device, most, piece_bytes: most)
    monkeypatch.setattr(checks, "limit_text", lambda device, release: "another machine")
    monkeypatch.setattr(checks.torch, "get_device_module", lambda device: SimpleNamespace())
    monkeypatch.setattr(torch.version, "hip", hip)
    machine = Machine(device=torch.device(device, 0), disk=tmp_path, root=files, environment={})
    found = [finding for finding in findings(machine) if "was never run" in finding.problem]
    if kind is None:
        assert found == []
        return
    (finding,) = found
    assert not finding.severe
    assert f"hardware of this kind ({kind})" in finding.problem
    assert read in finding.problem
    assert f"DEVICE={device} benchmarks/gpu/first_contact.sh" in finding.fix
    assert "pytest tests/gpu" in finding.fix
    for place in ("tests/gpu", "benchmarks/gpu/first_contact.sh", "docs/design/accelerators.md"):
        assert (ROOT / place).exists()


@pytest.mark.parametrize(
    ("slot", "kind", "vendor", "cards"),
    [
        ("0000:01:00.0", "0x038000", "0x1002", 1),  # an Instinct
        ("0000:03:00.0", "0x030000", "0x8086", 1),  # an Arc
        ("0000:00:02.0", "0x030000", "0x8086", 0),  # part of the processor
    ],
)
def test_cards_that_this_torch_does_not_drive(tmp_path: Path, slot: str, kind: str, vendor: str, cards: int) -> None:
    write(tmp_path, f"sys/bus/pci/devices/{slot}/class", kind)
    write(tmp_path, f"sys/bus/pci/devices/{slot}/vendor", vendor)
    found = findings(Machine(device=CPU, disk=tmp_path, root=tmp_path, environment={}))
    assert sum("drives none" in finding.problem for finding in found) == cards


@pytest.mark.parametrize("name", ["is_integrated", "is_integrated_gpu"])
def test_an_integrated_accelerator(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(checks, "is_accelerator", lambda device: True)
    monkeypatch.setattr(checks, "memlock_matters", lambda device: False)
    monkeypatch.setattr(checks, "limit_text", lambda device, release: "another machine")
    monkeypatch.setattr(checks, "lockable_bytes", lambda device, most, piece_bytes: most)
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(**{name: True}))
    monkeypatch.setattr(checks.torch, "get_device_module", lambda device: module)
    assert any("is integrated" in problem for problem in problems(files, tmp_path))


def test_old_torch_and_refused_direct_access(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.torch, "__version__", "2.4.1")
    opened = checks.os.open

    def refuse(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & checks.os.O_CREAT:
            return opened(path, flags, mode)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(checks.os, "open", refuse)
    found = problems(files, tmp_path)
    assert any("torch is 2.4.1; headrace needs 2.11" in problem for problem in found)
    assert any("refuses direct access (Invalid argument)" in problem for problem in found)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_machine_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither /proc nor /sys, as in some sandboxes: nothing is claimed of what cannot be seen."""
    monkeypatch.setattr(checks, "available_host_bytes", lambda: int(psutil.virtual_memory().total))
    monkeypatch.setattr(checks.os, "statvfs", lambda path: _Space(200 * 2**30))
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [])
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


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--disk", str(tmp_path)]) in (0, 1)
    printed = capsys.readouterr().out
    assert printed.count("fix: ") == printed.count("note: ") + printed.count("SEVERE: ")
    assert main(["doctor", "--disk", str(tmp_path / "none")]) == 2
    assert "is no directory" in capsys.readouterr().err
    assert main(["doctor", "--symptoms"]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for row in SYMPTOMS for text in row.values())


def test_symptoms_by_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--symptoms", "cuda", "GRAPHS"]) == 0
    (one,) = re.findall(r"^\S.*", capsys.readouterr().out, re.MULTILINE)
    assert one.startswith("CUDA graphs")
    assert main(["doctor", "--symptoms", "out of memory"]) == 0
    assert capsys.readouterr().out.count("device out of memory") == 3
    assert main(["doctor", "--symptoms", "cuda", "pipeline"]) == 2
    assert "no symptom has 'cuda' and 'pipeline'" in capsys.readouterr().err


def test_symptoms_are_named_as_headrace_names_them() -> None:
    """What a row quotes is in some message of the package."""
    written = "".join(text for path in (ROOT / "headrace").rglob("*.py") for text in _texts(path))
    for row in SYMPTOMS:
        assert row["says"] in written, row["says"]
        assert list(row) == ["symptom", "says", "cause", "confirm", "fix"]
        assert all(row.values())
    options = re.findall(r"--[a-z-]+", " ".join(text for row in SYMPTOMS for text in row.values()))
    known = {name for command in ("plan", "doctor") for name in _options(command)}
    assert options
    assert set(options) <= known


def _texts(path: Path) -> list[str]:
    """The strings of a file, those that are written in parts as one, and the names of its classes."""
    tree = ast.parse(path.read_text())
    found = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return found + [str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def _options(command: str) -> list[str]:
    return [name for action in build_parser().commands[command]._actions for name in action.option_strings]
