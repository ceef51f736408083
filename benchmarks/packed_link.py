"""What does it save that frozen weights cross the link packed? The same model, packed and plain, in one run.

    PYTHONPATH=. python benchmarks/packed_link.py [--layers 16] [--size 128MiB] [--room 5] [--rounds 7]
    python benchmarks/packed_link.py --device cuda

A stack of frozen bfloat16 matrices, of which so many have room on the device, in passes without gradients over so
many tokens that a layer's load takes 4, 1.5, 1 and 0.5 times its compute. Rows: milliseconds of a pass, plain and
packed, the bytes of both that crossed the link, and the ratio of the times.

On the emulated accelerator, in virtual time, no operator is run: the device has the rates that emulator/README.md
names (25 GB/s over the link, 1 TB/s of its own memory), and the kernel that unpacks is taken to be as quick as its
bytes allow there, without slowing down what computes beside it. On a real one, times are medians of rounds in which
both take turns, results are compared bit for bit, and the kernel's own speed is measured beside the link's.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

import headrace
from headrace.config import format_bytes, parse_bytes
from headrace.memory.packed import Packed, pack, unpack_on_device
from headrace.weights.movement import packed_loads

RATIOS = 4.0, 1.5, 1.0, 0.5
WARM_PASSES = 12, 4, 4  # until loads come again and again; until plans count on what was packed; and follow them


def model_of(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    with torch.no_grad():
        for layer in made:
            layer.weight.normal_(0, width**-0.5)
    return made.requires_grad_(False)


def one_pass(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(inputs)  # type: ignore[no-any-return]


def wait_for_packing(handle: headrace.Offloaded) -> None:
    """Until a thread takes no more host memory for that: in virtual time passes leave it none."""
    before = -1
    while before != (before := handle.stats().host_bytes):
        time.sleep(2)


def milliseconds(model: nn.Module, inputs: torch.Tensor, emu: Any) -> float:
    begin = time.perf_counter() if emu is None else emu.virtual_seconds()
    one_pass(model, inputs)
    torch.accelerator.synchronize()
    return ((time.perf_counter() if emu is None else emu.virtual_seconds()) - begin) * 1e3


def as_quick_as_its_bytes(emu: Any) -> Any:
    rate = emu.settings()["device_bytes_per_second"]

    def unpack(packed: Packed, into: torch.Tensor) -> None:
        emu.exchange_with_peers(into, (packed.memory.nbytes + into.nbytes) / rate)

    return unpack


def tokens_for(ratio: float, width: int, link: float, flops: float) -> int:
    return max(1, round(2 * width * width / link / ratio / (2 * width * width / flops)))


def measured_rates(device: torch.device, width: int) -> tuple[float, float]:
    """Bytes per second over the link, and floating-point operations per second of this product."""
    host = torch.empty(256 << 20, dtype=torch.uint8).pin_memory()
    there, factors = torch.empty_like(host, device=device), torch.randn(4096, width, device=device).bfloat16()
    weight = torch.randn(width, width, device=device).bfloat16()

    def seconds(job: Any) -> float:
        took = []
        for _ in range(5):
            torch.accelerator.synchronize()
            begin = time.perf_counter()
            job()
            torch.accelerator.synchronize()
            took.append(time.perf_counter() - begin)
        return statistics.median(took)

    link = host.nbytes / seconds(lambda: there.copy_(host, non_blocking=True))
    flops = 2 * 4096 * width * width / seconds(lambda: factors @ weight)
    words = torch.randn(16 << 20).bfloat16().view(torch.int16)
    memory = pack(words)
    assert memory is not None
    at_home = Packed.in_memory(memory)
    packed, out = Packed(memory.to(device), at_home.words, at_home.escapes), torch.empty_like(words, device=device)
    unpack_on_device(packed, out)
    assert torch.equal(out.cpu(), words)
    speed = words.nbytes / seconds(lambda: unpack_on_device(packed, out))
    print(
        f"link {link / 1e9:.1f} GB/s, products {flops / 1e12:.0f} TFLOP/s, unpacking {speed / 1e9:.0f} GB/s of weights"
    )
    return link, flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="emu")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--size", type=parse_bytes, default="128MiB")
    parser.add_argument("--room", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    width = int((chosen.size / 2) ** 0.5) // 128 * 128
    emu: Any = None
    if chosen.device == "emu":
        from emulator import emu

        emu.reset(dry_run=True, scheduler="lazy", device_memory=64 << 30, pinned_memory=64 << 30)
        packed_loads.unpacks_by_kernel = lambda device: device.type == "emu"
        packed_loads.unpack_on_device = as_quick_as_its_bytes(emu)
        packed_loads._unpacks_right = lambda *_: True
        link, flops = emu.settings()["h2d_bytes_per_second"], emu.settings()["flops_per_second"]
    device = torch.device(chosen.device, 0)
    if emu is None:
        link, flops = measured_rates(device, width)
    layer_bytes = 2 * width * width
    print(f"{chosen.layers} layers of {format_bytes(layer_bytes)}, room for {chosen.room}; torch {torch.__version__}")
    print(f"{'load/compute':>12} {'tokens':>7} {'plain ms':>9} {'packed ms':>9} {'plain':>10} {'packed':>10}  ratio")
    for ratio in RATIOS:
        tokens = tokens_for(ratio, width, link, flops)
        inputs = torch.randn(tokens, width, dtype=torch.bfloat16, device=device)
        models, handles, results = [], [], []
        for packed in (False, True):
            model = model_of(chosen.layers, width)
            room_bytes = chosen.room * layer_bytes + (64 << 20)
            handle = headrace.offload(model, device=device, device_memory=room_bytes, packed=packed)
            for passes in WARM_PASSES:
                for _ in range(passes):
                    results.append(one_pass(model, inputs))
                    handle.synchronize()
                wait_for_packing(handle)
            handle.reset_stats()
            models.append(model)
            handles.append(handle)
        took: list[list[float]] = [[], []]
        for at in range(chosen.rounds):
            for which in (0, 1) if at % 2 else (1, 0):
                took[which].append(milliseconds(models[which], inputs, emu))
        crossed = [handle.stats().onload_bytes // chosen.rounds for handle in handles]
        assert emu is not None or torch.equal(results[0], results[-1])
        plain, packed_ms = map(statistics.median, took)
        shown = f"{ratio:12.2f} {tokens:7d} {plain:9.2f} {packed_ms:9.2f} {format_bytes(crossed[0]):>10}"
        print(f"{shown} {format_bytes(crossed[1]):>10}  {packed_ms / plain:.3f}", flush=True)
        for handle in handles:
            handle.remove()


if __name__ == "__main__":
    main()
