"""Does a model that is larger than RAM run and train in the memory it was given? The kernel kills it if it cheats.

    python benchmarks/larger_than_ram.py [--size 12GiB] [--host-memory 2GiB] [--device-memory 512MiB] [--directory .]

Writes a bfloat16 Llama of that size to `--directory` (as much again is needed there for gradients and changed weights),
and starts a process that maps it, runs a forward pass, and trains two steps (SGD without momentum, on the CPU). Where
this user may make memory cgroups, the process lives in one whose limit is both budgets, what the interpreter with
PyTorch takes (measured), the gradients of two blocks (which the CPU holds as compute device) and an allowance for
activations; the kernel counts page cache there too. Elsewhere RLIMIT_DATA caps its private memory in the same way.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

import headrace
from headrace.cli.noise import without_noise
from headrace.config import format_bytes, parse_bytes

WIDTH = 4096
TOKENS = 16
LAYER_BYTES = 2 * (4 * WIDTH**2 + 3 * WIDTH * 11008 + 2 * WIDTH)
ALLOWANCE_BYTES = 256 << 20  # activations, and what matrix products take
_CGROUPS = Path("/sys/fs/cgroup/memory")


def config_of(nbytes: int) -> "transformers.LlamaConfig":
    """A Llama of about so many bytes in bfloat16."""
    return transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=WIDTH,
        intermediate_size=11008,
        num_hidden_layers=max(1, (nbytes - 4 * 8192 * WIDTH) // LAYER_BYTES),
        num_attention_heads=32,
        num_key_value_heads=32,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def write(config: "transformers.LlamaConfig", directory: Path) -> int:
    """Random weights in shards of one layer each. Bytes written."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in transformers.LlamaForCausalLM(config).state_dict().items()}
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        shards.setdefault(f"layer-{parts[2]}" if "layers" in parts else "rest", {})[name] = shape
    index, total = {}, 0
    noise = torch.randn(WIDTH * 11008).mul_(0.02).to(torch.bfloat16)
    for shard, tensors in shards.items():
        made = {}
        for number, (name, shape) in enumerate(tensors.items()):
            values = torch.ones(shape) if "norm" in name else noise.roll(7919 * (number + total))[: shape.numel()]
            made[name] = values.to(torch.bfloat16).view(shape)
        save_file(made, directory / f"{shard}.safetensors")
        index |= dict.fromkeys(made, f"{shard}.safetensors")
        total += sum(tensor.nbytes for tensor in made.values())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config.save_pretrained(directory)
    return total


def peak_bytes() -> int:
    """The most that this process held: VmHWM, which counts mapped files too."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def child(directory: Path, host_memory: str, device_memory: str, optimizer_of: str) -> None:
    """In the capped process: one forward pass, two training steps. Prints a line of JSON."""
    begin = time.perf_counter()
    model, handle = headrace.from_pretrained(
        directory, device="cpu", host_memory=host_memory, device_memory=device_memory, disk=directory / "spill"
    )
    seconds = {"load": time.perf_counter() - begin}
    tokens = torch.arange(TOKENS).view(1, -1)
    with handle:
        begin = time.perf_counter()
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)
        seconds["forward"] = time.perf_counter() - begin
        forward_peak = peak_bytes()
        begin = time.perf_counter()
        before = model.model.layers[0].self_attn.q_proj.weight[0].clone()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        seconds["backward"] = time.perf_counter() - begin
        if optimizer_of == "torch":
            optimizer = torch.optim.SGD(model.parameters(), lr=10.0, foreach=False)
        else:
            state = {"tier": "disk", "disk": directory / "state"}  # of bfloat16 weights: the bits that they lack
            optimizer = headrace.optim.SGD(model.parameters(), lr=10.0, **state)
        begin = time.perf_counter()
        optimizer.step()
        seconds["step"] = time.perf_counter() - begin
        changed = not torch.equal(before, model.model.layers[0].self_attn.q_proj.weight[0])
        begin = time.perf_counter()
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)
        seconds["forward after"] = time.perf_counter() - begin
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        seconds["second backward"] = time.perf_counter() - begin
        begin = time.perf_counter()
        optimizer.step()
        seconds["second step"] = time.perf_counter() - begin
        stats = handle.stats()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "forward_peak_bytes": forward_peak,
                "peak_bytes": peak_bytes(),
                "changed": changed,
                "host_peak_bytes": stats.host_peak_bytes,
                "device_peak_bytes": stats.device_peak_bytes,
                "fetch_bytes": stats.fetch_bytes,
                "spill_bytes": stats.spill_bytes,
            }
        )
    )


def interpreter_bytes() -> int:
    """What a process with PyTorch and transformers takes before it has a model."""
    code = "import headrace, torch, transformers.models.llama.modeling_llama; from benchmarks.larger_than_ram import *"
    return int(subprocess.check_output([sys.executable, "-c", f"{code}; print(peak_bytes())"], text=True))


def cap(limit_bytes: int) -> tuple[Path | None, Callable[[], None]]:
    """A cgroup with that limit, if this user may make one, and what a new process calls to live under the limit."""
    group = _CGROUPS / f"headrace-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError:
        return None, partial(resource.setrlimit, resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    return group, lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None


def run_capped(command: Sequence[str], limit_bytes: int, what: str) -> tuple[dict[str, Any], str]:
    """The line of JSON that a process under the limit prints last, and what the cgroup counted, if there is one."""
    group, enter = cap(limit_bytes)
    by = "RLIMIT_DATA" if group is None else "a memory cgroup"
    print(f"{what}; {format_bytes(limit_bytes)} of memory, capped by {by}")
    try:
        run = subprocess.run([sys.executable, *command], preexec_fn=enter, stdout=subprocess.PIPE, text=True)
        used = "" if group is None else (group / "memory.max_usage_in_bytes").read_text()
    finally:
        if group is not None:
            group.rmdir()
    if run.returncode != 0:
        sys.exit(f"the process ended with {run.returncode}" + (" (killed)" if run.returncode == -9 else ""))
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found, used


def main() -> None:
    """Parses, writes, runs, prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="12GiB")
    parser.add_argument("--host-memory", default="2GiB")
    parser.add_argument("--device-memory", default="512MiB")
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--optimizer", choices=["torch", "headrace"], default="torch", help="whose SGD")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child, arguments.host_memory, arguments.device_memory, arguments.optimizer)
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        size = write(config_of(parse_bytes(arguments.size)), directory)
        needed = 2 * size
        if shutil.disk_usage(directory).free < needed:
            sys.exit(f"{directory} has no room for {format_bytes(needed)} of gradients and changed weights")
        os.sync()
        baseline = interpreter_bytes()
        budgets = parse_bytes(arguments.host_memory) + parse_bytes(arguments.device_memory)
        limit = baseline + budgets + 2 * LAYER_BYTES + ALLOWANCE_BYTES
        command = [__file__, "--child", name, "--host-memory", arguments.host_memory]
        command += ["--device-memory", arguments.device_memory, "--optimizer", arguments.optimizer]
        found, used = run_capped(command, limit, f"{format_bytes(size)} of weights")
        for phase, seconds in found["seconds"].items():
            print(f"{phase:14} {seconds:7.1f} s")
        print(f"read {format_bytes(found['fetch_bytes'])}, written {format_bytes(found['spill_bytes'])}")
        print(f"weights changed by the step: {found['changed']}")
        forward_peak, budget = format_bytes(found["forward_peak_bytes"]), format_bytes(budgets + baseline)
        print(f"VmHWM after forward {forward_peak}; budgets and interpreter {budget}")
        print(f"VmHWM at the end    {format_bytes(found['peak_bytes'])} (with file pages that the optimizer mapped)")
        if used:
            print(f"most that the cgroup counted, with page cache: {format_bytes(int(used))}")


if __name__ == "__main__":
    with without_noise():
        main()
