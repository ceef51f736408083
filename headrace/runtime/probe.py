"""How fast is this machine? Copies, products, the update and memory are each measured alone, by a median of rounds."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from headrace.runtime.device import is_accelerator
from headrace.runtime.page_locks import locked_tensor

__all__ = ["LinkRates", "dram_rate", "link_rates", "matmul_rates", "update_rate"]

_COPY_BYTES = 256 * 2**20
_ROUNDS = 5
# DRAM traffic per parameter: gradient, weight and two moments in float32 are read, and the last three are written.
_UPDATE_BYTES = 28
_UPDATE_PARAMETERS = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """Bytes per second between host and device; `pageable_onload` is from memory that is not page-locked.

    `locked`: whether memory could be page-locked; if not, all rates are those of pageable memory. `both_share`: the
    share of its rate that each direction keeps when both run at once. `notes`: what looks wrong.
    """

    onload: float
    offload: float
    pageable_onload: float
    both_share: float
    locked: bool
    notes: tuple[str, ...]


def link_rates(device: torch.device, *, copy_bytes: int = _COPY_BYTES) -> LinkRates:
    """The rates of copies of `copy_bytes`. On the CPU, which has no link, they are those of host memory."""
    made = [locked_tensor(device, copy_bytes) for _ in range(2)] if is_accelerator(device) else []
    held = [each for each in made if each is not None]
    try:
        locked = [tensor for tensor, _unlock in held] if len(held) == 2 else None
        return _rates(device, copy_bytes, locked)
    finally:
        for _tensor, unlock in held:
            unlock()


def _rates(device: torch.device, copy_bytes: int, locked: list[torch.Tensor] | None) -> LinkRates:
    pageable = [torch.zeros(copy_bytes, dtype=torch.uint8, device="cpu") for _ in range(2)]
    host = locked or pageable
    there = [torch.zeros(copy_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    watch = _Watch(device)
    onload = copy_bytes / watch.seconds(lambda: there[0].copy_(host[0], non_blocking=True))
    offload = copy_bytes / watch.seconds(lambda: host[1].copy_(there[1], non_blocking=True))
    slow = copy_bytes / watch.seconds(lambda: there[0].copy_(pageable[0], non_blocking=True))
    share, notes = 1.0, []
    if is_accelerator(device):
        both = watch.seconds_of_both(
            lambda: there[0].copy_(host[0], non_blocking=True), lambda: host[1].copy_(there[1], non_blocking=True)
        )
        share = min(1.0, max(copy_bytes / onload, copy_bytes / offload) / both)
        if locked is None:
            notes.append(
                "host memory could not be page-locked: the rates are those of pageable memory, and compute waits for"
                " its copies; headrace doctor looks for the cause"
            )
        elif slow > 1.1 * onload:
            notes.append(
                f"copies from pageable memory ({slow / 1e9:.1f} GB/s) are faster than from page-locked memory"
                f" ({onload / 1e9:.1f} GB/s): page-locking does not work here (a virtual machine, or WSL)"
            )
        if locked is not None and onload < 5e9:
            notes.append(
                f"the link carries {onload / 1e9:.1f} GB/s, less than a quarter of PCIe 4 with 16 lanes: look at the"
                " slot, riser and power state (lspci -vv, LnkSta)"
            )
    return LinkRates(
        onload=onload,
        offload=offload,
        pageable_onload=slow,
        both_share=share,
        locked=locked is not None or not is_accelerator(device),
        notes=tuple(notes),
    )


def dram_rate(*, copy_bytes: int = _COPY_BYTES) -> float:
    """Bytes read and written per second by a copy within host memory on all threads."""
    source, target = torch.zeros(copy_bytes // 4), torch.zeros(copy_bytes // 4)
    return 2 * copy_bytes / _Watch(torch.device("cpu")).seconds(lambda: target.copy_(source))


def update_rate(*, parameters: int = _UPDATE_PARAMETERS) -> float:
    """Bytes of DRAM traffic per second that AdamW in float32 reaches on all threads, at 28 bytes per parameter."""
    weight = torch.zeros(parameters)
    weight.grad = torch.zeros(parameters)
    step = torch.optim.AdamW([weight], fused=True).step
    return _UPDATE_BYTES * parameters / _Watch(torch.device("cpu")).seconds(step)


def matmul_rates(device: torch.device, *, size: int | None = None) -> dict[str, float]:
    """Operations per second of square matrix products, by dtype."""
    size = size or (4096 if is_accelerator(device) else 1024)
    rates = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        rates[str(dtype).removeprefix("torch.")] = 2 * size**3 / _Watch(device).seconds(partial(torch.mm, left, right))
    return rates


class _Watch:
    """Measures the seconds of work on a device: by the device's own events, or by the clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events = is_accelerator(device)

    def seconds(self, work: Callable[[], object]) -> float:
        """The median seconds over some rounds, after one that does not count."""
        work()
        return median(self._once(work) for _ in range(_ROUNDS))

    def seconds_of_both(self, one: Callable[[], object], other: Callable[[], object]) -> float:
        """The median seconds until both pieces of work are done, each on a stream of its own."""
        streams = [torch.Stream(device=self.device) for _ in range(2)]

        def both() -> None:
            for stream, work in zip(streams, (one, other), strict=True):
                with stream:
                    work()
            for stream in streams:
                torch.accelerator.current_stream(self.device).wait_stream(stream)

        both()
        torch.accelerator.synchronize(self.device)
        return median(self._once(both) for _ in range(_ROUNDS))

    def _once(self, work: Callable[[], object]) -> float:
        if not self.events:
            begun = time.perf_counter()
            work()
            return time.perf_counter() - begun
        torch.accelerator.synchronize(self.device)
        begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        stream = torch.accelerator.current_stream(self.device)
        stream.record_event(begin)
        work()
        stream.record_event(end)
        torch.accelerator.synchronize(self.device)
        return float(begin.elapsed_time(end)) / 1e3
