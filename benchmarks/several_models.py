"""Do models that take turns keep one budget, and read only what has no room? Three on the CPU, and a drive.

    PYTHONPATH=. python benchmarks/several_models.py [--sizes 1GiB,2GiB,4GiB] [--device-memory 2GiB]
        [--host-memory 5GiB] [--rounds 20] [--directory .]

Models of linear layers in bfloat16 share `headrace.budget()`, and are called in turn. Printed are the most bytes that
they held, the process's own memory beyond what it had before there were models, and what was read from disk in a round,
beside what the budgets have no room for. Every output is compared with that of the model before it was offloaded.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

import headrace
from headrace.cli.noise import without_noise
from headrace.config import format_bytes, parse_bytes

WIDTH = 4096
LAYER_BYTES = 2 * WIDTH**2
PEAK, NOW = "VmHWM", "VmRSS"


def model_of(nbytes: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(nbytes // LAYER_BYTES)]
    return nn.Sequential(*layers).requires_grad_(False)


def resident_bytes(field: str) -> int:
    """What the kernel counts as this process's memory: `NOW`, or at most since `forget_the_peak`."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) << 10


def forget_the_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1GiB,2GiB,4GiB")
    parser.add_argument("--device-memory", default="2GiB")
    parser.add_argument("--host-memory", default="5GiB")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--directory", type=Path, default=Path())
    args = parser.parse_args()

    sizes = [parse_bytes(size) for size in args.sizes.split(",")]
    batch = torch.randn(8, WIDTH, dtype=torch.bfloat16)
    before = resident_bytes(NOW)
    models, expected, handles = [], [], []
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        with headrace.budget(device_memory=args.device_memory, host_memory=args.host_memory) as shared:
            for seed, size in enumerate(sizes):
                model = model_of(size, seed)
                expected.append(model(batch))
                models.append(model)
                handles.append(headrace.offload(model, device="cpu", disk=Path(directory) / str(seed)))
        forget_the_peak()
        read = []
        for _ in range(args.rounds):
            known = sum(handle.stats().fetch_bytes for handle in handles)
            for model, output in zip(models, expected, strict=True):
                if not torch.equal(model(batch), output):
                    raise SystemExit("an output differs from the plain model's")
            read.append(sum(handle.stats().fetch_bytes for handle in handles) - known)
        taken = resident_bytes(PEAK) - before
        for handle in handles:
            handle.remove()

    budgets = parse_bytes(args.device_memory) + parse_bytes(args.host_memory)
    no_room = max(0, sum(sizes) - parse_bytes(args.host_memory))
    print(f"models          {', '.join(map(format_bytes, sizes))}; {args.rounds} rounds, all outputs equal")
    print(f"device          {format_bytes(shared.device_peak_bytes)} at most, of {args.device_memory}")
    print(f"host            {format_bytes(shared.host_peak_bytes)} at most, of {args.host_memory}")
    print(f"process         {format_bytes(taken)} at most, of {format_bytes(budgets)}")
    print(
        f"read in a round {format_bytes(min(read))} to {format_bytes(max(read))}; without room: {format_bytes(no_room)}"
    )


if __name__ == "__main__":
    with without_noise():
        main()
