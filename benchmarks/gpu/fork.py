"""What does fork() cost beside page-locked weights, as each worker of a DataLoader pays it?

    PYTHONPATH=. python -m benchmarks.gpu.fork [DEVICE [GIB]]

Prints a JSON line: seconds of fork(), and the bytes that the child has for itself, with GIB (4) of weights offloaded.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import headrace
from benchmarks.gpu.machine import open_device

LAYER_BYTES = 64 << 20


def own_bytes() -> int:
    """Bytes of pages that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty:"))


def main() -> None:
    device = open_device(sys.argv[1] if len(sys.argv) > 1 else "")
    gib = float(sys.argv[2]) if len(sys.argv) > 2 else 4
    layers = max(2, int(gib * 2**30) // LAYER_BYTES)
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, dtype=torch.float32) for _ in range(layers)))
    handle = headrace.offload(model, device=device, device_memory=4 * LAYER_BYTES)
    model(torch.zeros(1, 4096)).sum().backward()
    begin, end = os.pipe()
    begun = time.perf_counter()
    if not os.fork():
        os.write(end, b"%d" % own_bytes())
        os._exit(0)
    seconds = time.perf_counter() - begun
    os.wait()
    copied = int(os.read(begin, 99))
    locked = handle.stats().host_locked_bytes
    print(json.dumps({"way": "fork", "seconds": seconds, "host_locked_bytes": locked, "copied_bytes": copied}))


if __name__ == "__main__":
    main()
