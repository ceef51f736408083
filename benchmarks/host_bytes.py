"""How many bytes of host memory does training take for each parameter? The process's peak, from load to checkpoint.

    python benchmarks/host_bytes.py [--layers 32] [--width 2048] [--overlap forward] [--state-dtype 8bit]

A bfloat16 model of linear layers is loaded from a file, offloaded (the CPU is the device), trained for three steps with
AdamW, and saved with its optimizer. The peak is VmHWM of /proc/self/status, over what the process held before; what
stands for device memory (buffers of weights and gradients) is taken off, as an accelerator has its own. Split form
needs 14: weight 2, the rest of the master 2, moments 8, gradient 2. The bar: 14.5. Moments in 8 bits take 2.06, so 8.06
in all.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import headrace
from headrace.optim import AdamW


def memory_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def build(layers: int, width: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)))


def write(layers: int, width: int, path: Path) -> None:
    torch.save({f"{n}.weight": torch.randn(width, width).bfloat16() / width**0.5 for n in range(layers)}, path)


def run(layers: int, width: int, directory: Path, **settings: object) -> tuple[float, float]:
    """Peak bytes for each parameter on the host, and what is held at the end."""
    weights = directory / "weights.pt"
    # By another process: what this one freed would count as held, because the C library keeps it.
    subprocess.run([sys.executable, __file__, "--write", weights, f"--layers={layers}", f"--width={width}"], check=True)
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    model = build(layers, width)
    model.load_state_dict(torch.load(weights), assign=True)
    handle = headrace.offload(model, device="cpu", device_memory=3 * 2 * width * width, blocks=list(model))
    optimizer = AdamW(model.parameters(), **settings)  # type: ignore[arg-type]
    for _ in range(3):
        model(torch.randn(8, width).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, directory / "checkpoint.pt")
    stats = handle.stats()
    on_device = stats.device_peak_bytes + stats.device_gradient_peak_bytes
    parameters = layers * width * width
    peak = memory_bytes("VmHWM") - before - on_device
    return peak / parameters, (memory_bytes("VmRSS") - before) / parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--overlap", choices=("none", "forward"), default="none")
    parser.add_argument("--state-dtype", choices=("float32", "bfloat16", "8bit"), default="float32")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write is not None:
        write(arguments.layers, arguments.width, arguments.write)
        return
    with tempfile.TemporaryDirectory() as warm:
        run(2, 64, Path(warm))  # threads and libraries
    with tempfile.TemporaryDirectory() as directory:
        dtype = arguments.state_dtype
        settings = {"overlap": arguments.overlap, "state_dtype": getattr(torch, dtype, dtype)}
        peak, held = run(arguments.layers, arguments.width, Path(directory), **settings)
    parameters = arguments.layers * arguments.width**2
    needed = 6 + {"float32": 8.0, "bfloat16": 4.0, "8bit": 2 * 132 / 128}[dtype]
    print(
        f"{parameters / 1e6:.0f} M parameters, overlap={arguments.overlap!r}, moments in {dtype}: peak {peak:.2f} bytes"
        f" of host memory for each (by arithmetic {needed:.2f}, bar {needed + 0.5:.2f}; without the buffers that stand"
        f" for the device), held at the end {held:.2f} with them"
    )


if __name__ == "__main__":
    main()
