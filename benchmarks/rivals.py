"""What do others take for the same work, in the same run? accelerate, transformers, FSDP2, DeepSpeed, torchao. Ratios.

    make bench-rivals
    PYTHONPATH=. python benchmarks/rivals.py [--directory .] [--size 2GiB] [--rounds 7] [--write]

Contestants of a task are processes of their own that take turns, one unit of work a turn, so that whatever else the
machine does meets them alike; what is told are medians of paired ratios, from the least to the most. The device is the
CPU. `make bench-rivals` installs the others beside the project's own environment.

- disk: a forward over weights in safetensors files, of which a tenth may be in each tier of headrace; accelerate's disk
  offload, which is that of transformers (`device_map`). The page cache is dropped before each turn.
- load: the most resident memory while a model is opened and runs once, over the bytes of its weights. headrace's
  `host_memory` and `device_memory` are a tenth of them each.
- sharded: a training step of a model of eight layers: `fully_shard` with `CPUOffloadPolicy` in a group of one process,
  and `headrace.offload` with a quarter of the weights on the device; PyTorch's fused AdamW in both, and equal losses.
- update: what `optimizer_step.py` prints, with DeepSpeedCPUAdam where it runs.
- ZeRO-Infinity reads drives by libaio on machines that have it; where it cannot run the reason is printed.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from disk_model import drop_cache, make_model, open_accelerate, open_headrace, peak_bytes

from headrace.cli.noise import without_noise
from headrace.config import format_bytes, parse_bytes

RESULTS = Path(__file__).parent / "results"
WIDTH, LAYERS, TOKENS = 1024, 8, 256
WARM_UP = 2  # turns: headrace records the first, and plans the second
Turn = Callable[[], float]  # one unit of work; what it came to


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def forward_of(opened: Callable[[Path, int], tuple[nn.Module, Any]]) -> Callable[[Path, int], Turn]:
    """Of a model on disk."""

    def begin(directory: Path, total: int) -> Turn:
        model, _ = opened(directory, total)

        def turn() -> float:
            drop_cache(directory)
            with torch.no_grad():
                return float(model(torch.arange(4).view(1, 4)).logits.float().sum())

        return turn

    return begin


def steps_of(offload: Callable[[nn.Sequential], object]) -> Callable[[Path, int], Turn]:
    """Of a training run."""

    def begin(directory: Path, total: int) -> Turn:
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        kept = offload(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def turn(kept: object = kept) -> float:
            loss = model(torch.randn(TOKENS, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return turn

    return begin


def by_headrace(model: nn.Sequential) -> object:
    import headrace

    quarter = sum(parameter.nbytes for parameter in model.parameters()) // 4
    return headrace.offload(model, device="cpu", device_memory=quarter)


def by_fsdp(model: nn.Sequential) -> object:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return mesh


def loaded_by(opened: Callable[[Path, int], tuple[nn.Module, Any]]) -> Callable[[Path, int], Turn]:
    """The peak of opening it and of one forward, over what was there before, in weights; each turn tells the same."""

    def begin(directory: Path, total: int) -> Turn:
        before = peak_bytes()
        model, _ = opened(directory, total)
        with torch.no_grad():
            model(torch.arange(4).view(1, 4))
        share = (peak_bytes() - before) / total

        def turn(model: nn.Module = model) -> float:
            return share

        return turn

    return begin


def open_whole(directory: Path, total: int) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto"), None


TASKS: dict[str, dict[str, Callable[[Path, int], Turn]]] = {
    "disk": {"headrace": forward_of(open_headrace), "accelerate": forward_of(open_accelerate)},
    "sharded": {"headrace": steps_of(by_headrace), "FSDP2": steps_of(by_fsdp)},
    "load": {
        "headrace": loaded_by(open_headrace),
        "accelerate": loaded_by(open_accelerate),
        "transformers": loaded_by(open_whole),
    },
}


def contest(task: str, name: str, directory: Path) -> None:
    """Runs in a child: for each line that it gets it takes a turn, and prints seconds and what it came to."""
    import time

    import transformers
    from transformers.utils.logging import disable_progress_bar

    import headrace  # noqa: F401

    disable_progress_bar()
    transformers.LlamaForCausalLM  # noqa: B018  # imports what it needs, before memory is counted
    torch.set_num_threads(1 if task == "sharded" else torch.get_num_threads())
    total = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    turn = TASKS[task][name](directory, total)
    print("ready", flush=True)
    for number, _ in enumerate(sys.stdin):
        torch.manual_seed(number)
        begin = time.perf_counter()
        value = turn()
        print(json.dumps([time.perf_counter() - begin, value]), flush=True)
    os._exit(0)


def compete(task: str, directory: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds and values of each contestant, turn by turn."""
    processes = {}
    for name in TASKS[task]:
        own = directory / name  # each its own directory: the files are links, what it writes is its own
        own.mkdir(exist_ok=True)
        for file in directory.iterdir():
            if file.is_file() and not (own / file.name).exists():
                os.link(file, own / file.name)
        command = [sys.executable, __file__, "--contestant", task, name, "--directory", str(own)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"{name} did not begin; try {' '.join(command)}")
        processes[name] = process
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in processes}
    try:
        for number in range(rounds + WARM_UP):
            for name in sorted(processes, reverse=number % 2 == 1):
                process = processes[name]
                process.stdin.write("\n")
                process.stdin.flush()
                seconds, value = json.loads(process.stdout.readline())
                if number >= WARM_UP:
                    taken[name].append((seconds, value))
    finally:
        for process in processes.values():
            process.stdin.close()
            process.wait(timeout=60)
    return taken


def told(task: str, taken: dict[str, list[tuple[float, float]]]) -> list[str]:
    """A line for each rival."""
    ours = taken.pop("headrace")
    if task == "load":
        taken = {"headrace": ours, **taken}
        return [f"load: {name}: peak of {turns[0][1]:.2f} of the weights' bytes" for name, turns in taken.items()]
    lines = []
    for name, theirs in taken.items():
        assert [value for _, value in ours] == [value for _, value in theirs], f"{name} computes something else"
        ratios = sorted(mine[0] / other[0] for mine, other in zip(ours, theirs, strict=True))
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        lines.append(f"{task}: headrace over {name}: {statistics.median(ratios):.2f} ({spread}), equal results")
    return lines


def infinity() -> str:
    """Whether DeepSpeed's own reader of drives runs here."""
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        runs = AsyncIOBuilder().is_compatible(verbose=False)
    except Exception as error:  # whatever an installation of it lacks
        return f"without ZeRO-Infinity: {str(error).splitlines()[0]}"
    return f"ZeRO-Infinity: its reader of drives {'runs' if runs else 'does not run'} here; not timed without a GPU"


def versions() -> str:
    found = []
    for name in ("torch", "transformers", "accelerate", "deepspeed", "torchao"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--size", type=parse_bytes, default="2GiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--elements", type=int, default=1 << 25)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results, with today's date")
    parser.add_argument("--contestant", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        contest(*arguments.contestant, arguments.directory)
    load = os.getloadavg()[0]
    lines = [
        f"PYTHONPATH=. python benchmarks/rivals.py, {datetime.date.today()}: CPU and drive, wall-clock, paired ratios",
        f"{os.cpu_count()} cores ({platform.machine()}), Linux, a load of {load:.0f} by others, Python"
        f" {platform.python_version()}; {versions()}",
        "",
    ]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=arguments.directory) as name:
        directory = Path(name)
        make_model(directory, arguments.size)
        os.sync()
        total = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        lines.append(f"{format_bytes(total)} of weights on disk, {arguments.rounds} rounds")
        for task in TASKS:
            rounds = 1 if task == "load" else arguments.rounds
            lines += told(task, compete(task, directory, rounds))
            print(lines[-1], flush=True)
    lines.append(infinity())
    command = [sys.executable, str(Path(__file__).parent / "optimizer_step.py"), "--elements", str(arguments.elements)]
    done = subprocess.run([*command, "--rounds", "9"], capture_output=True, text=True, check=True)
    printed = [line for line in done.stdout.strip().splitlines() if not line.startswith("[")]  # DeepSpeed's log
    lines += ["", "update (benchmarks/optimizer_step.py):", *printed]
    content = "\n".join(lines) + "\n"
    print(content)
    if arguments.write:
        (RESULTS / f"rivals-{datetime.date.today()}.txt").write_text(content)


if __name__ == "__main__":
    with without_noise():
        main()
