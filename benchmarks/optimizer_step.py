"""How fast is an optimizer step on the host? Ours, three passes with PyTorch, PyTorch's fused step, DeepSpeed's.

    python benchmarks/optimizer_step.py [--elements 67108864] [--rounds 15]

Everything alternates in one run, in an order that changes from round to round, because machines are noisy: only paired
ratios compare, and their medians are shown. Beside the times stands what limits them: the bandwidth of a copy in
memory, measured in the same rounds with as many threads.

- ours: bfloat16 gradient in, float32 AdamW, bfloat16 weight out, in split form: 26 bytes per parameter.
- ours, full: the same with a float32 master: 30 bytes.
- ours, 8 bit: as ours, with moments in 8 bits: 14 bytes, and more to compute.
- three passes: gradient cast to float32, torch's fused AdamW on the master, master cast to bfloat16.
- fused float32: torch.optim.AdamW(fused=True) on float32 gradients and weights: 28 bytes. torchao's CPUOffloadOptimizer
  updates with this, parameter by parameter.
- fused bfloat16: the same on bfloat16 gradients and weights, moments in bfloat16 too and no master: what torchao's
  optimizer does on the host for bfloat16 weights. 14 bytes, and updates below a weight's last place are lost.
- torchao's own class is not timed: it takes no device but CUDA and XPU (0.18.0), and its step on the host is the two
  rows above. Where it is installed the run prints what it says of this machine.
- DeepSpeed float32: DeepSpeedCPUAdam on the same, where deepspeed is installed (it compiles its kernel at first use).
- DeepSpeed bfloat16: the same on bfloat16 gradients and weights, with float32 moments and without a master, so that
  updates below a weight's last place are lost: 22 bytes.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from headrace.cli.noise import without_noise
from headrace.optim import AdamW, kernel, threads

SETTINGS = {"lr": 1e-4, "weight_decay": 0.01}
BYTES = {"ours": 26, "ours, full": 30, "ours, float32": 28, "three passes": 38, "fused float32": 28, "copy": 8}
BYTES |= {"ours, 8 bit": 2 * 5 + 4 * 132 / 128}
BYTES |= {"fused bfloat16": 14}
BYTES |= {"DeepSpeed float32": 28, "DeepSpeed bfloat16": 22}


def ours(elements: int, dtype: torch.dtype, master_form: str, **options: object) -> Callable[[], object]:
    weight = nn.Parameter(torch.randn(elements).to(dtype))
    weight.grad = torch.randn(elements).to(dtype)
    return AdamW([weight], master_form=master_form, **SETTINGS, **options).step


def three_passes(elements: int) -> Callable[[], object]:
    weight, gradient = torch.randn(elements).bfloat16(), torch.randn(elements).bfloat16()
    master = nn.Parameter(weight.float())
    master.grad = torch.empty(elements)
    optimizer = torch.optim.AdamW([master], fused=True, **SETTINGS)

    def step() -> None:
        master.grad.copy_(gradient)  # type: ignore[union-attr]
        optimizer.step()
        weight.copy_(master.detach())

    return step


def fused(elements: int, dtype: torch.dtype) -> Callable[[], object]:
    weight = nn.Parameter(torch.randn(elements).to(dtype))
    weight.grad = torch.randn(elements).to(dtype)
    return torch.optim.AdamW([weight], fused=True, **SETTINGS).step


def tell_of_torchao() -> None:
    """Why torchao's CPUOffloadOptimizer is not among the rows."""
    try:
        from torchao.optim import CPUOffloadOptimizer

        CPUOffloadOptimizer([nn.Parameter(torch.zeros(8192))])
        reason = "it takes parameters of an accelerator here; its step on the host is the fused rows"
    except (ImportError, AssertionError) as error:
        reason = str(error)
    print(f"without torchao's CPUOffloadOptimizer: {reason}")


def deepspeed(elements: int) -> dict[str, Callable[[], object]]:
    """Nothing, and a line that says so, where it is not installed or its kernel cannot be built."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError as error:
        print(f"without DeepSpeedCPUAdam: {error}")
        return {}
    steps = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = nn.Parameter(torch.randn(elements).to(dtype))
        weight.grad = torch.randn(elements).to(dtype)
        try:
            steps[f"DeepSpeed {str(dtype).removeprefix('torch.')}"] = DeepSpeedCPUAdam([weight], **SETTINGS).step
        except RuntimeError as error:  # no compiler
            print(f"without DeepSpeedCPUAdam: {error}")
            return {}
    return steps


def copy(elements: int) -> Callable[[], object]:
    source, destination = torch.ones(elements), torch.zeros(elements)
    return lambda: destination.copy_(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(threads.count())
    elements = arguments.elements
    tell_of_torchao()
    cases: dict[str, Callable[[], object]] = {
        "ours": ours(elements, torch.bfloat16, "split"),
        "ours, full": ours(elements, torch.bfloat16, "full"),
        "ours, float32": ours(elements, torch.float32, "split"),
        "ours, 8 bit": ours(elements, torch.bfloat16, "split", state_dtype="8bit"),
        "three passes": three_passes(elements),
        "fused float32": fused(elements, torch.float32),
        "fused bfloat16": fused(elements, torch.bfloat16),
        "copy": copy(elements),
        **deepspeed(elements),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(arguments.rounds + 2):
        for name in random.Random(number).sample(list(cases), len(cases)):
            begin = time.perf_counter()
            cases[name]()
            if number >= 2:  # the first rounds touch memory for the first time
                seconds[name].append(time.perf_counter() - begin)
    print(f"{elements / 1e6:.0f} M parameters, {threads.count()} threads, native kernel: {kernel.available()}\n")
    print(
        f"{'':18} {'ms':>7} {'G elements/s':>13} {'GB/s':>6} {'of copy':>8} {'time / fused float32':>21} {'best ms':>8}"
    )
    for name, times in seconds.items():
        median = statistics.median(times)
        of_copy = statistics.median(
            (BYTES[name] / mine) / (BYTES["copy"] / other) for mine, other in zip(times, seconds["copy"], strict=True)
        )
        ratio = statistics.median(mine / other for mine, other in zip(times, seconds["fused float32"], strict=True))
        speed = elements / median / 1e9
        print(
            f"{name:18} {median * 1e3:7.1f} {speed:13.2f} {speed * BYTES[name]:6.1f}"
            f" {of_copy:8.2f} {ratio:21.2f} {min(times) * 1e3:8.1f}"
        )
    faster = statistics.median(a / b for a, b in zip(seconds["three passes"], seconds["ours"], strict=True))
    print(f"\nours is {faster:.2f} times as fast as three passes (median of paired ratios; bar: 1.45)")


if __name__ == "__main__":
    with without_noise():
        main()
