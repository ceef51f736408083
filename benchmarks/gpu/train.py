"""How fast does a Llama train in a given amount of accelerator memory: plain, with millrace, and layer by layer?

    PYTHONPATH=. python benchmarks/gpu/train.py --size 8b --device-memory 8GiB --sequence-length 2048 --batch-size 4

One model (transformers' LlamaForCausalLM, bfloat16, random weights) makes the same steps in three ways:

- plain: weights and gradients on the device; left out where they do not fit;
- millrace: `millrace.offload(model, device_memory=...)`;
- synchronous: each layer is copied in before its forward and its backward and let go after it, on the compute stream,
  and its gradients are copied out at once (`benchmarks/overlap_rivals.py`); embedding, norm and head stay.

A step is a forward and a backward. The optimizer is left out, because it would be another one on the host; the homes
count as changed after each step (`handle.refresh()`), so millrace loads all weights again, as it must after an
optimizer's. Shown: tokens per second, the allocator's peak, and where the time went; `--output FILE` writes all of it
as JSON.

Without an accelerator it says so and does nothing. `--device emu` runs it on the emulated one, to check the program:
its seconds mean nothing.
"""

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import millrace
from benchmarks.overlap_rivals import synchronous
from millrace.config import format_bytes, parse_bytes
from millrace.runtime.device import is_accelerator, resolve_device

Row = dict[str, Any]
# layers, width, inner width, heads, heads of keys and values, vocabulary
SIZES = {
    "tiny": (4, 64, 176, 4, 2, 256),
    "1b": (16, 2048, 8192, 32, 8, 128256),
    "8b": (32, 4096, 14336, 32, 8, 128256),
    "70b": (80, 8192, 28672, 64, 8, 128256),
}
LINK_BYTES = 256 << 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--layers", type=int, help="instead of the size's own")
    parser.add_argument("--width", type=int, help="instead of the size's own; the rest of a layer follows")
    parser.add_argument("--device-memory", help="for millrace; default: a quarter of the weights")
    parser.add_argument("--sequence-length", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--batch-size", type=int, default=1, metavar="ROWS")
    parser.add_argument("--checkpointing", choices=["none", "reentrant", "non-reentrant"], default="none")
    parser.add_argument("--warmup", type=int, default=6, metavar="STEPS", help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=5, help="steps on the clock")
    parser.add_argument("--device", help='default: the current accelerator; "emu" is the emulated one')
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON, such as benchmarks/results/train_8b.json")
    return parser.parse_args()


def build(settings: argparse.Namespace) -> LlamaForCausalLM:
    layers, width, inner, heads, key_heads, vocabulary = SIZES[settings.size]
    if settings.width is not None:
        inner, heads = inner * settings.width // width, max(1, heads * settings.width // width)
        width, key_heads = settings.width, max(1, key_heads * settings.width // width)
    config = LlamaConfig(
        num_hidden_layers=settings.layers or layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=min(key_heads, heads),
        vocab_size=vocabulary,
        max_position_embeddings=settings.sequence_length,
        use_cache=False,
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train()
    if settings.checkpointing != "none":
        reentrant = settings.checkpointing == "reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model


# the three ways -----------------------------------------------------------------------------------------------------
def plain(model: LlamaForCausalLM, bench: "Bench") -> Row:
    """Everything on the device; the model is on the CPU again afterwards."""
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    _, total_bytes = torch.accelerator.get_memory_info(bench.device)
    if 2 * weight_bytes > total_bytes:
        return {"skipped": f"weights and gradients are {format_bytes(2 * weight_bytes)}"}
    try:
        model.to(bench.device)
        return bench.measure(model)
    except torch.OutOfMemoryError:
        return {"skipped": "out of memory"}
    finally:
        model.zero_grad(set_to_none=True)
        model.to("cpu")


def with_millrace(model: LlamaForCausalLM, bench: "Bench", budget_bytes: int) -> Row:
    """The device budget holds its weights; the plan is learned in the steps before the clock starts."""
    with millrace.offload(model, device=bench.device, device_memory=budget_bytes) as handle:
        row = bench.measure(model, after_step=handle.refresh, before_clock=handle.reset_stats)
        stats = handle.stats()
        row |= {
            "device_weights_peak_bytes": stats.device_peak_bytes,
            "compute_seconds_per_step": stats.compute_seconds / bench.steps,
            "stall_seconds_per_step": stats.stall_seconds / bench.steps,
            "onload_bytes_per_step": stats.onload_bytes / bench.steps,
            "offload_bytes_per_step": stats.offload_bytes / bench.steps,
            "demand_onloads": stats.demand_onloads,
            "host_peak_bytes": stats.host_peak_bytes,
        }
        model.zero_grad(set_to_none=True)
        return row


def layer_by_layer(model: LlamaForCausalLM, bench: "Bench") -> Row:
    """The model cannot be used otherwise afterwards."""
    layers = model.model.layers
    synchronous(layers, bench.device, 0, training=True)
    model.to(bench.device)  # what is not in a layer
    for parameter in layers.parameters():
        host = torch.empty(parameter.shape, dtype=parameter.dtype).pin_memory()
        parameter.register_post_accumulate_grad_hook(lambda parameter, host=host: take_gradient(parameter, host))
    return bench.measure(model)


def take_gradient(parameter: torch.Tensor, host: torch.Tensor) -> None:
    host.copy_(parameter.grad)
    parameter.grad = None


class Bench:
    """The steps, and their measurement, on one device."""

    def __init__(self, settings: argparse.Namespace, device: torch.device, vocabulary: int) -> None:
        self.device = device
        self.steps = settings.steps
        self._warmup = settings.warmup
        generator = torch.Generator().manual_seed(0)
        shape = settings.batch_size, settings.sequence_length
        self.tokens = torch.randint(0, vocabulary, shape, generator=generator).to(device)

    def measure(
        self,
        model: nn.Module,
        after_step: Callable[[], None] = lambda: None,
        before_clock: Callable[[], None] = lambda: None,
    ) -> Row:
        """Seconds of a step in the mean, tokens per second, the allocator's peak, and the loss before any step."""
        first_loss = None
        for step in range(self._warmup + self.steps):
            if step == self._warmup:
                before_clock()
                torch.accelerator.reset_peak_memory_stats(self.device)
                torch.accelerator.synchronize(self.device)
                begin = time.perf_counter()
            loss = model(input_ids=self.tokens, labels=self.tokens).loss
            loss.backward()
            first_loss = loss.detach() if first_loss is None else first_loss
            del loss
            model.zero_grad(set_to_none=True)
            after_step()
        torch.accelerator.synchronize(self.device)
        seconds = (time.perf_counter() - begin) / self.steps
        return {
            "seconds_per_step": seconds,
            "tokens_per_second": self.tokens.numel() / seconds,
            "device_peak_bytes": torch.accelerator.max_memory_allocated(self.device),
            "loss": first_loss.item(),
        }


# surroundings -------------------------------------------------------------------------------------------------------
def link_bytes_per_second(device: torch.device) -> float:
    """What one copy from page-locked memory reaches."""
    here = torch.empty(LINK_BYTES, dtype=torch.uint8).pin_memory()
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    for event in (begin, end):  # the first copy warms up
        there.copy_(here, non_blocking=True)
        event.record()
    torch.accelerator.synchronize(device)
    return LINK_BYTES / (begin.elapsed_time(end) / 1e3)


def surroundings(device: torch.device) -> Row:
    """Hardware and versions."""
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    _, total_bytes = torch.accelerator.get_memory_info(device)
    return {
        "device": name,
        "device_total": format_bytes(total_bytes),
        "link_gb_per_second": round(link_bytes_per_second(device) / 1e9, 1),
        "processor": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "host_memory": format_bytes(psutil.virtual_memory().total),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "millrace": millrace.__version__,
    }


def choose_device(name: str | None) -> torch.device | None:
    if name is not None and name.split(":")[0] == "emu":
        from emulator import emu

        emu.reset(device_memory=4 << 30)
    if not torch.accelerator.is_available():
        return None
    return resolve_device(name)


def show(name: str, row: Row) -> None:
    if "skipped" in row:
        print(f"{name:12} does not fit: {row['skipped']}")
        return
    text = (
        f"{row['tokens_per_second']:12,.0f} {row['seconds_per_step']:9.3f} {format_bytes(row['device_peak_bytes']):>10}"
    )
    if "stall_seconds_per_step" in row:
        text += f"   compute {row['compute_seconds_per_step']:.3f} s, stall {row['stall_seconds_per_step']:.3f} s,"
        text += f" in {format_bytes(row['onload_bytes_per_step'])}, out {format_bytes(row['offload_bytes_per_step'])}"
        text += f" a step; {row['demand_onloads']} loads on demand"
    print(f"{name:12}{text}", flush=True)


def main() -> None:
    settings = arguments()
    device = choose_device(settings.device)
    if device is None or not is_accelerator(device):
        print("nothing was measured: there is no accelerator here (--device emu checks the program without one)")
        return
    about = surroundings(device)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    model = build(settings)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    budget_bytes = parse_bytes(settings.device_memory or weight_bytes // 4, name="--device-memory")
    bench = Bench(settings, device, model.config.vocab_size)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, weights {format_bytes(weight_bytes)}; budget of"
        f" millrace {format_bytes(budget_bytes)}; {settings.batch_size} x {settings.sequence_length} tokens;"
        f" checkpointing: {settings.checkpointing}"
    )
    print(f"{'':12}{'tokens/s':>12} {'s a step':>9} {'peak':>10}")
    rows: dict[str, Row] = {}
    ways: dict[str, Callable[[], Row]] = {
        "plain": lambda: plain(model, bench),
        "millrace": lambda: with_millrace(model, bench, budget_bytes),
        "synchronous": lambda: layer_by_layer(model, bench),
    }
    for name, way in ways.items():
        rows[name] = way()
        gc.collect()
        torch.accelerator.empty_cache()
        show(name, rows[name])
    losses = {row["loss"] for row in rows.values() if "loss" in row}
    print("the first losses are equal" if len(losses) == 1 else f"the first losses differ: {sorted(losses)}")
    if settings.output is not None:
        given = {name: str(value) for name, value in vars(settings).items() if value is not None and name != "output"}
        result = {"surroundings": about, "settings": given, "weight_bytes": weight_bytes}
        result |= {"budget_bytes": budget_bytes, "rows": rows}
        settings.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
