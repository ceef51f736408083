"""How fast does a model larger than RAM run from disk, and in how much memory? Beside accelerate's disk offload.

    python benchmarks/disk_model.py [--directory .] [--size 4GiB] [--rounds 5] [--tokens 4]

A Llama of random weights in safetensors shards; each contestant runs in a process of its own, its page cache dropped
before each forward. `host_memory` and `device_memory` are a tenth of the weights each; the device is the CPU.

- disk: bytes that came from disk per second of forward, over what a plain loop of direct reads has (requests of 8 MiB,
  4 in flight), right after each forward; the median of these ratios. What rests in host memory is not counted.
- memory: the most resident memory of the process (VmHWM) over what it had with everything imported.

Beside headrace and accelerate stands the forward of the same model from RAM: what disk time could hide.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from disk_stream import drive

from headrace.cli.noise import without_noise
from headrace.config import format_bytes, parse_bytes

HIDDEN = 2048


def make_model(directory: Path, nbytes: int) -> None:
    """Layers of 134 MB, one in each shard, all with the same values: only their bytes count."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_attention_heads": 16, "vocab_size": 1024}
    layers = max(2, round(nbytes / (16 * HIDDEN**2 * 2)))
    config = LlamaConfig(**sizes, num_hidden_layers=layers, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(directory)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        layer = re.search(r"layers\.(\d+)\.", name)
        shards.setdefault(f"layer-{layer[1]}" if layer else "rest", {})[name] = parameter
    weight_map = {}
    for shard, parameters in shards.items():
        torch.manual_seed(0)
        tensors = {n: (torch.randn(p.shape) * 0.02 + (p.dim() == 1)).bfloat16() for n, p in parameters.items()}
        save_file(tensors, directory / f"{shard}.safetensors")
        weight_map.update(dict.fromkeys(tensors, f"{shard}.safetensors"))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def peak_bytes() -> int:
    """VmHWM: the most memory that was resident at once, mapped files too."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def begin_peak() -> None:
    """The peak starts anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def drop_cache(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def open_headrace(directory: Path, total: int) -> tuple[torch.nn.Module, Callable[[], int]]:
    import headrace

    budget = {"device_memory": total // 10, "host_memory": total // 10, "disk": directory / "spill"}
    model, handle = headrace.from_pretrained(directory, trainable=False, device="cpu", **budget)

    def fetched_bytes() -> int:
        nbytes = handle.stats().fetch_bytes
        handle.reset_stats()
        return nbytes

    return model, fetched_bytes


def open_accelerate(directory: Path, total: int) -> tuple[torch.nn.Module, Callable[[], int]]:
    from transformers import AutoModelForCausalLM

    folder = directory / "offload"
    model = AutoModelForCausalLM.from_pretrained(
        directory, device_map={"": "disk"}, offload_folder=folder, dtype="auto"
    )
    return model, lambda: total


def open_in_ram(directory: Path, total: int) -> tuple[torch.nn.Module, Callable[[], int]]:
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    weights: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= {name: tensor.clone() for name, tensor in load_file(file).items()}
    config = LlamaConfig.from_pretrained(directory)
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype="auto"), lambda: total


CONTESTANTS = {"headrace": open_headrace, "accelerate": open_accelerate, "in RAM": open_in_ram}


def contest(name: str, directory: Path, rounds: int, tokens: int) -> None:
    """Runs in a child: prints one line of JSON."""
    import transformers
    from transformers import AutoModelForCausalLM  # noqa: F401
    from transformers.utils.logging import disable_progress_bar

    import headrace  # noqa: F401

    disable_progress_bar()
    transformers.LlamaForCausalLM  # noqa: B018  # imports what it needs
    files = sorted(directory.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    biggest = max(files, key=lambda file: file.stat().st_size)
    before = peak_bytes()
    begin = time.perf_counter()
    model, fetched_bytes = CONTESTANTS[name](directory, total)
    loading = time.perf_counter() - begin
    ids = torch.arange(tokens).view(1, tokens)
    times, ratios = [], []
    logits, peak = None, peak_bytes()
    for number in range(rounds + 2):  # the first records, the second still learns
        drop_cache(directory)
        fetched_bytes()
        begin_peak()
        begin = time.perf_counter()
        with torch.no_grad():
            logits = model(ids).logits
        seconds = time.perf_counter() - begin
        nbytes, peak = fetched_bytes(), max(peak, peak_bytes())  # not of the plain loop, which follows
        time.sleep(0.5)  # what was read ahead arrives, beside which nothing is measured
        begin = time.perf_counter()
        drive(biggest, times=8)
        drive_speed = 8 * (biggest.stat().st_size >> 23 << 23) / (time.perf_counter() - begin)
        if number >= 2:
            times.append(seconds)
            ratios.append(nbytes / seconds / drive_speed)
    assert logits is not None
    print(
        json.dumps(
            {
                "loading": loading,
                "seconds": statistics.median(times),
                "ratio": statistics.median(ratios),
                "memory": peak - before,
                "logits": logits.float().sum().item(),
            }
        ),
        flush=True,
    )
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--size", type=parse_bytes, default="4GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--contestant", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        contest(arguments.contestant, arguments.directory, arguments.rounds, arguments.tokens)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=arguments.directory) as name:
        directory = Path(name)
        make_model(directory, arguments.size)
        os.sync()
        total = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        print(
            f"{format_bytes(total)} of weights, {arguments.tokens} tokens; budgets of {format_bytes(total // 10)} each"
        )
        for contestant in CONTESTANTS:
            command = [sys.executable, __file__, "--contestant", contestant, "--directory", name]
            command += ["--rounds", str(arguments.rounds), "--tokens", str(arguments.tokens)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
            if done.returncode:
                print(f"{contestant:>10}: failed: {done.stderr.strip().splitlines()[-1:]}")
                continue
            found = json.loads(done.stdout.strip().splitlines()[-1])
            print(
                f"{contestant:>10}: loaded in {found['loading']:.1f} s, forward {found['seconds']:.2f} s,"
                + (f" disk at {found['ratio']:.2f} of the drive's speed," if contestant != "in RAM" else "")
                + f" memory {format_bytes(found['memory'])}, logits sum to {found['logits']}"
            )
            for folder in ("spill", "offload"):
                shutil.rmtree(directory / folder, ignore_errors=True)


if __name__ == "__main__":
    with without_noise():
        main()
