"""How fast is this machine? `probe()` measures links, disk, host memory, updates and matrix products."""

import dataclasses
import errno
import os
import platform
import tempfile
from pathlib import Path
from typing import TypeVar

import torch

from headrace.ahead import cache_path
from headrace.checkpoint.directory import replace_whole
from headrace.config import check_flag, directory_of
from headrace.planning.cost import Hardware
from headrace.runtime.device import free_and_total_bytes, is_accelerator, resolve_device
from headrace.runtime.host import available_host_bytes
from headrace.runtime.probe import disk_rates, link_rates, matmul_rates, memory_rate, update_rate
from headrace.runtime.progress import progress

Measured = TypeVar("Measured")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """What `probe()` measured: the machine, for `plan()`; the speed of matrix products by dtype; what looks wrong."""

    hardware: Hardware
    matmul_flops_per_second: dict[str, float]
    pageable_bytes_per_second: float
    locked: bool = True  # host memory could be page-locked; without, the hardware's link is as fast as pageable memory
    notes: tuple[str, ...]

    def to_text(self) -> str:
        """The rates as a table."""
        hardware, products = self.hardware, self.matmul_flops_per_second
        host = "page-locked" if self.locked else "not locked"
        rows = [
            ("device memory", f"{hardware.device_memory_bytes / 1e9:.1f} GB"),
            (f"onload, {host}", f"{hardware.onload_bytes_per_second / 1e9:.2f} GB/s"),
            ("onload, pageable", f"{self.pageable_bytes_per_second / 1e9:.2f} GB/s"),
            (f"offload, {host}", f"{hardware.offload_bytes_per_second / 1e9:.2f} GB/s"),
            ("left when both run", f"{hardware.duplex_share:.0%} of each"),
            ("host memory", f"{hardware.host_memory_bytes / 1e9:.1f} GB"),
            ("host memory, copies", f"{hardware.dram_bytes_per_second / 1e9:.2f} GB/s read and written"),
            ("optimizer update", f"{hardware.update_rate / 1e9:.2f} GB/s, {hardware.update_rate / 28e9:.2f}G params/s"),
            ("disk read", f"{hardware.disk_read_bytes_per_second / 1e9:.2f} GB/s"),
            ("disk write", f"{hardware.disk_write_bytes_per_second / 1e9:.2f} GB/s"),
            *((f"products, {kind}", f"{rate / 1e12:.3g} TFLOP/s") for kind, rate in products.items()),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{hardware.name}", *(f"  {name:<{width}}  {value}" for name, value in rows)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)]) + "\n"


def probe(
    device: torch.device | str | int | None = None, *, disk: str | os.PathLike[str] | None = None, cache: bool = True
) -> Probe:
    """Measures this machine's links (page-locked or not, both ways at once), disk, host memory, update and matmuls.

    This takes less than a minute. `disk` is a directory on the disk to measure; the default is the directory for
    temporary files. With `cache` the result is kept in the user's cache directory, where `plan(hardware="measured")`
    finds it. Raises ValueError for a device that does not exist, OSError when nothing can be written to `disk`.
    """
    chosen = resolve_device(device)
    check_flag(cache, "cache")
    if cache:
        _make_cache()  # now: what takes a minute to measure should not be lost for want of a directory
    directory = directory_of(disk) or Path(tempfile.gettempdir())
    with progress("headrace: measuring", 5, unit="figure") as bar:

        def measured(rates: Measured) -> Measured:
            bar.update(1)
            return rates

        link, products = measured(link_rates(chosen)), measured(matmul_rates(chosen))
        disk_found, dram, update = measured(disk_rates(directory)), measured(memory_rate()), measured(update_rate())
    half = max(products["bfloat16"], products["float16"])
    device_memory = available_host_bytes()
    if is_accelerator(chosen):
        device_memory = free_and_total_bytes(chosen)[1]
    hardware = Hardware(
        name=f"{platform.node()} ({chosen})",
        devices=max(1, torch.accelerator.device_count() if is_accelerator(chosen) else 1),
        device_memory_bytes=device_memory,
        device_bytes_per_second=memory_rate(chosen) if is_accelerator(chosen) else dram,
        flops_per_second=half,
        onload_bytes_per_second=link.onload,
        offload_bytes_per_second=link.offload,
        duplex_share=link.both_share,
        host_memory_bytes=available_host_bytes(),
        dram_bytes_per_second=max(dram, update),
        update_bytes_per_second=update,
        disk_bytes=disk_found.free_bytes,
        disk_read_bytes_per_second=disk_found.read,
        disk_write_bytes_per_second=disk_found.write,
        unified=not is_accelerator(chosen),
        sources={"all": "measured by headrace probe"},
    )
    found = Probe(
        hardware=hardware,
        matmul_flops_per_second=products,
        pageable_bytes_per_second=link.pageable_onload,
        locked=link.locked,
        notes=(*link.notes, *disk_found.notes, *_implausible(hardware)),
    )
    if cache:
        replace_whole(cache_path(), hardware.to_json().encode())
    return found


def _implausible(hardware: Hardware) -> list[str]:
    """What contradicts itself."""
    notes = []
    if hardware.disk_read_bytes_per_second > hardware.dram_bytes_per_second / 2:
        notes.append(
            "the disk reads faster than half of what host memory copies: this is a file in memory (tmpfs) or a cache;"
            " name a directory on the drive"
        )
    if hardware.update_rate < hardware.dram_bytes_per_second / 4:
        notes.append(
            "the update reaches less than a quarter of what host memory copies: too few threads"
            " (OMP_NUM_THREADS, taskset)"
        )
    return notes


def _make_cache() -> None:
    """The directory in which a measurement is kept. Raises OSError when there can be none."""
    directory = cache_path().parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise OSError(
            error.errno,
            f"the measurement cannot be kept in {directory} ({error.strerror}); set XDG_CACHE_HOME, or keep none:"
            " --no-cache, cache=False",
        ) from error
