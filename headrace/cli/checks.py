"""What is wrong with this machine for offloading? Each finding says what was seen, what it costs, and the fix."""

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from headrace.memory.disk.directory import IN_RAM, filesystem_of
from headrace.optim import kernel
from headrace.runtime.device import is_accelerator
from headrace.runtime.host import available_host_bytes, container_limit_bytes, total_host_bytes
from headrace.runtime.page_locks import is_wsl, limit_text, lockable_bytes, memlock_bytes, memlock_matters
from headrace.runtime.system import available_cores, free_bytes

_OLDEST_TORCH = (2, 11)
_GIB = 2**30
_PAGE_BYTES = mmap.PAGESIZE
_LOCK_TRIED_BYTES = 4 * _GIB  # locking takes about two seconds
_NOTEBOOKS = {"COLAB_RELEASE_TAG": "Colab", "KAGGLE_KERNEL_RUN_TYPE": "Kaggle", "JPY_PARENT_PID": "Jupyter"}
_REMOTE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "lustre"}
_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D, other display, accelerators
_VENDORS = ("0x10de", "0x1002", "0x8086", "0x19e5")  # NVIDIA, AMD, Intel, Huawei
# What was read in the sources of runtimes on which headrace was never run: docs/design/accelerators.md.
_READ = {
    "rocm": "page-locking, streams, events, fork and CUDA graphs",
    "xpu": "pinned memory, streams, events, copies and memory statistics",
    "npu": "pinned memory, streams, events, copies and memory statistics",
}


@dataclass(frozen=True)
class Finding:
    """`problem`: what was seen and what it costs; `fix`: what to do. `severe`: offloading fails or is pointless."""

    problem: str
    fix: str
    severe: bool = False


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the checks look: the root of the files that describe the machine, the environment, and the device."""

    device: torch.device
    disk: Path
    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def text(self, path: str) -> str:
        """The file's text without white space at its ends; "" if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""


def findings(machine: Machine) -> list[Finding]:
    """All findings about the machine, severe ones first."""
    checks = (
        *(_installed, _device, _never_run, _page_locks, _host_memory),
        *(_notebook, _disk, _threads, _numa, _huge_pages, _link),
    )
    found = [finding for check in checks for finding in check(machine)]
    return sorted(found, key=lambda finding: not finding.severe)


def _installed(machine: Machine) -> Iterator[Finding]:
    if not kernel.available():
        yield Finding(kernel.SLOWER, kernel.INSTALL)
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        yield Finding(f"torch is {torch.__version__}; headrace needs {oldest}", f"pip install 'torch>={oldest}'", True)


def _device(machine: Machine) -> Iterator[Finding]:
    cards = list(_cards(machine))
    if machine.device.type == "cpu" and cards:
        yield Finding(
            f"{len(cards)} accelerator(s) in the machine, but this torch ({torch.__version__}) drives none",
            "install a torch built for them (https://pytorch.org/get-started/locally/) and their driver",
            severe=True,
        )
    elif machine.device.type == "cpu":
        yield Finding(
            "there is no accelerator: the CPU computes, and weights are copied within the same memory",
            "nothing, if you only try headrace out; offloading to disk still makes larger models fit",
        )
    if not is_accelerator(machine.device):
        return
    describe = getattr(torch.get_device_module(machine.device), "get_device_properties", None)
    properties = describe(machine.device) if describe is not None else None
    integrated = getattr(properties, "is_integrated", 0) or getattr(properties, "is_integrated_gpu", False)  # CUDA, XPU
    if integrated or machine.device.type == "mps":
        yield Finding(
            "the accelerator is integrated: its memory is the host's, so moving weights there frees nothing",
            "use a disk as the lower tier (disk=...), or do without headrace",
            severe=True,
        )


def _never_run(machine: Machine) -> Iterator[Finding]:
    """A finding for all accelerators but CUDA's."""
    kind = "rocm" if machine.device.type == "cuda" and torch.version.hip is not None else machine.device.type
    if not is_accelerator(machine.device) or kind == "cuda":
        return
    read = f"only read in its runtime's source: {_READ[kind]}" if kind in _READ else "not even read in its source"
    yield Finding(
        f"headrace was never run on hardware of this kind ({kind}): all its measurements are of NVIDIA's. Whether it is"
        f" exact and fast here is {read}",
        f"in a checkout of headrace: python -m pytest tests/gpu, then DEVICE={machine.device.type}"
        " benchmarks/gpu/first_contact.sh; and tell us what they say",
    )


def _page_locks(machine: Machine) -> Iterator[Finding]:
    release = machine.text("proc/sys/kernel/osrelease") or machine.text("proc/version")
    limit, fix = memlock_bytes(), limit_text(machine.device, release)
    if is_wsl(release):
        yield Finding(
            "this is WSL, or a container on it: host memory that Windows does not page-lock stays pageable, and compute"
            " waits for its copies",
            fix,
        )
    if is_accelerator(machine.device):  # its driver is asked to lock memory, to see what it refuses
        wanted = min(_LOCK_TRIED_BYTES, available_host_bytes() // 4)
        locked = lockable_bytes(machine.device, wanted, piece_bytes=max(1, wanted // 16 // _PAGE_BYTES) * _PAGE_BYTES)
        if locked < wanted * 15 // 16:
            yield Finding(
                f"the driver page-locks {locked / 2**20:,.0f} MiB of host memory, of {wanted / 2**20:,.0f} MiB that"
                " were tried: the rest stays pageable, and compute waits for its copies",
                fix,
            )
    if limit is not None and limit < _GIB and memlock_matters(machine.device):
        yield Finding(
            f"at most {limit / 2**20:.0f} MiB may be page-locked (ulimit -l) by a driver that asks the system for it,"
            " as that of this device may (CUDA's does not)",
            "ulimit -l unlimited; in a container: docker run --ulimit memlock=-1",
        )


def _host_memory(machine: Machine) -> Iterator[Finding]:
    limit, available, total = container_limit_bytes(machine.root), available_host_bytes(), total_host_bytes()
    if limit is not None and limit < total:
        yield Finding(
            f"the container (cgroup) may take {limit / 1e9:.1f} of {total / 1e9:.1f} GB of host memory: what goes over"
            " that is killed without a message, and page-locked memory counts",
            "docker run --memory, resources.limits.memory; headrace keeps host_memory below it unless you give more",
        )
    if available < total / 4:
        yield Finding(
            f"{available / 1e9:.1f} of {total / 1e9:.1f} GB of host memory can be taken: other processes or the"
            " cgroup's limit have the rest, and what goes over it is killed without a message",
            "raise the container's limit (docker run --memory, resources.limits.memory), or end what uses it",
        )
    place = machine.root / "dev/shm"
    if hasattr(os, "statvfs") and place.is_dir():
        stat = os.statvfs(place)
        size = stat.f_blocks * stat.f_frsize
        if size < _GIB:
            yield Finding(
                f"/dev/shm has {size / 2**20:.0f} MiB: workers of a DataLoader hand their batches over in it, and die"
                " with a bus error where it is full (headrace itself does not use it)",
                "docker run --shm-size=8g, or --ipc=host; or DataLoader(num_workers=0)",
            )


def _notebook(machine: Machine) -> Iterator[Finding]:
    found = [name for variable, name in _NOTEBOOKS.items() if machine.environment.get(variable)]
    if found:
        yield Finding(
            f"this runs in a notebook ({found[0]}): a model that a cell made before stays, with its page-locked memory,"
            " while Out, _ or the last error's traceback refer to it",
            "handle.remove() before a cell offloads again, or restart the kernel",
        )


def _disk(machine: Machine) -> Iterator[Finding]:
    kind = filesystem_of(machine.disk)
    if kind in _REMOTE_SYSTEMS:
        yield Finding(
            f"{machine.disk} is on the network ({kind}): weights and state would cross it at every step",
            "name a directory on a local NVMe drive: disk=... or --disk",
        )
    if kind in IN_RAM:
        yield Finding(
            f"{machine.disk} is {kind}, which is host memory: what is spilled there frees nothing",
            "name a directory on a drive: disk=... or --disk",
            severe=True,
        )
    elif machine.disk.is_dir():
        yield from _direct(machine)
    if machine.disk.is_dir() and (free := free_bytes(machine.disk)) < 20 * _GIB:
        yield Finding(
            f"{machine.disk} has {free / 1e9:.1f} GB left; the state of one billion parameters is 12 GB",
            "make room, or name another directory: disk=... or --disk",
        )


def _direct(machine: Machine) -> Iterator[Finding]:
    """Findings if a file on the disk cannot be written, or not with direct I/O."""
    flag, probe = getattr(os, "O_DIRECT", None), machine.disk / f".headrace-doctor-{os.getpid()}"
    if flag is None:
        return
    try:
        probe.touch()
    except OSError as error:
        yield Finding(
            f"nothing can be written to {machine.disk} ({error.strerror}): blocks and state cannot rest there",
            "name a directory that is yours, on a drive that is mounted for writing: disk=... or --disk",
            severe=True,
        )
        return
    try:
        os.close(os.open(probe, os.O_RDONLY | flag))
    except OSError as error:
        yield Finding(
            f"{machine.disk} refuses direct access ({error.strerror}): reads use the page cache, at half the rate",
            "use ext4 or xfs on the drive itself; overlay, encrypted and network file systems refuse it",
        )
    finally:
        probe.unlink(missing_ok=True)


def _threads(machine: Machine) -> Iterator[Finding]:
    cores = available_cores()
    told = machine.environment.get("LOCAL_WORLD_SIZE", "")
    ranks = max(1, int(told)) if told.isdigit() else 1
    threads = machine.environment.get("OMP_NUM_THREADS", "")
    fair = max(1, cores // ranks)
    if threads.isdigit() and int(threads) < fair and fair > 1:
        yield Finding(
            f"OMP_NUM_THREADS={threads} with {cores} cores for {ranks} process(es): the update on the host runs on"
            f" {threads} of {fair} threads (torchrun sets 1), up to {fair // max(1, int(threads))} times slower",
            f"OMP_NUM_THREADS={fair}",
        )
    installed = psutil.cpu_count() or cores
    if cores < installed / 2:
        yield Finding(
            f"this process may run on {cores} of {installed} cores (taskset, cpuset)",
            "give it more, if the others are free: the update on the host is limited by them",
        )


def _numa(machine: Machine) -> Iterator[Finding]:
    nodes = sorted((machine.root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return
    places = {machine.text(f"{card}/numa_node") for card in _cards(machine)} - {"", "-1"}
    bound = machine.text("proc/self/status")
    allowed = re.search(r"Mems_allowed_list:\s*(\S+)", bound)
    if places and allowed and allowed[1] not in places:
        distance = machine.text(f"sys/devices/system/node/node{min(places)}/distance")
        yield Finding(
            f"{len(nodes)} NUMA nodes (distances {distance}); accelerators hang on node {', '.join(sorted(places))} and"
            " memory may come from any: copies across nodes are slower",
            f"numactl --cpunodebind={min(places)} --membind={min(places)} for each process, by its device",
        )


def _huge_pages(machine: Machine) -> Iterator[Finding]:
    if "[never]" in machine.text("sys/kernel/mm/transparent_hugepage/enabled"):
        yield Finding(
            "transparent huge pages are off: making and page-locking host memory takes longer",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _link(machine: Machine) -> Iterator[Finding]:
    names = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
    for card in _cards(machine):
        width, widest, speed, fastest = (_number(machine.text(f"{card}/{name}")) for name in names)
        if 0 < width < widest:
            yield Finding(
                f"accelerator {Path(card).name} uses {width:g} of {widest:g} PCIe lanes: every copy takes"
                f" {widest / width:.0f} times as long",
                "move it to a slot that the CPU drives with all lanes; mind riser cables and slots shared with drives",
            )
        if 0 < speed < fastest:
            yield Finding(
                f"accelerator {Path(card).name}'s link runs at {speed:g} of {fastest:g} GT/s (idle cards save power:"
                " look again under load)",
                "set the slot's generation in the firmware; replace riser cables of an older generation",
            )


def _cards(machine: Machine) -> Iterator[str]:
    """Display controllers and accelerators on PCIe that are not part of the host's chips, as paths under the root.

    Intel's integrated ones are on the first bus.
    """
    for device in sorted((machine.root / "sys/bus/pci/devices").glob("*")):
        path = str(device.relative_to(machine.root))
        vendor = machine.text(f"{path}/vendor")
        if vendor == "0x8086" and device.name.startswith("0000:00:"):
            continue
        if machine.text(f"{path}/class").startswith(_DISPLAY_CLASSES) and vendor in _VENDORS:
            yield path


def _number(text: str) -> float:
    """The number with which the text begins, and 0 if there is none."""
    found = re.match(r"[\d.]+", text)
    return float(found[0]) if found else 0.0
