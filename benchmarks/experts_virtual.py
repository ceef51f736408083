"""What does a token take when experts come one by one? Virtual time on the emulated accelerator, so no noise.

    PYTHONPATH=. python benchmarks/experts_virtual.py [--steps 300] [--tokens 48]

A Qwen3-MoE of 8 layers of 32 experts, 4 for a token, decodes. Its routing is that of `experts_cache.py`: recorded from
a model that has learned a little and writes text, and drawn (Zipf 1.0, 30% kept). Room for 1.5 times the experts of a
layer's token, a quarter and a half of all, beside all other weights. The device's rates are a 200th of a card's, so
that the model is to it as one 200 times its size is to a card; latencies are a card's.

Rows: milliseconds of a token in the second half of the trace, the share of experts that was there, and the time over

- `link|compute`: max(bytes moved / link, compute). No program comes to it that computes one token at a time: which
  experts a layer needs is known when its router has computed, and until those that are missing are there, nothing else
  is left to compute but the layer's other experts.
- `dependent`: the bound with that: loads of missing experts, plus max(compute, loads of other weights), as these have
  the link while something computes. That is the bar: 1.05. Of other weights the fewest bytes are counted that blocks
  as they are cut could move (`fewest_bytes`), of experts those that moved.

`compute` is the time in which the compute lane worked in the same run. In rows "half of others", the device has room
for half of the other weights, and so for the experts of one token alone. "whole": the time of a token when all experts
of a layer come with it, with the same budget, over the time one by one.
"""

import argparse
import contextlib
import gc
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers
from experts_cache import EXPERTS, LAYERS, ROUTED, Trace, drawn_trace, learned_trace

import headrace
from emulator import emu
from headrace.cli.noise import without_noise
from headrace.planning.bounds import fewest_bytes
from headrace.weights.model.partition import _Cutter

HIDDEN, INTERMEDIATE = 256, 256
SLOWER = 200
LINK = 25e9 / SLOWER
BAR = 1.05


def configure() -> None:
    gc.collect()
    emu.reset(
        scheduler="lazy",
        race_detector=True,
        allocator="exact",
        device_memory=16 << 30,
        pinned_memory=16 << 30,
        flops_per_second=100e12 / SLOWER,
        device_bytes_per_second=1e12 / SLOWER,
        h2d_bytes_per_second=LINK,
        d2h_bytes_per_second=LINK,
    )


def model_of(implementation: str) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=ROUTED,
        moe_intermediate_size=INTERMEDIATE,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    model.set_experts_implementation(implementation)
    return model


class Routed:
    """The model's routers choose what the trace says: for each token, in each layer."""

    def __init__(self, model: Any, trace: Trace) -> None:
        chosen = [[expert for _, expert in wanted] for wanted in trace]
        self.tokens = len(trace) // LAYERS
        self._chosen = torch.tensor(chosen).view(self.tokens, LAYERS, ROUTED).to("emu")
        self.token = 0
        for layer, block in enumerate(model.model.layers):
            block.mlp.gate.register_forward_hook(self._choose(layer))

    def _choose(self, layer: int) -> Callable[..., Any]:
        def choose(_module: Any, _args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (*output[:-1], self._chosen[self.token, layer][None])

        return choose


class Measured(NamedTuple):
    """The second half of a trace, in the mean of its tokens; seconds and bytes."""

    seconds: float
    compute_seconds: float
    nbytes: float
    expert_bytes: float
    there: float
    fewest_bytes: float


def decode(model: Any, routed: Routed, handle: Any) -> Measured:
    """The tokens of the trace, one by one."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=routed.tokens)
    token = torch.ones(1, 1, dtype=torch.int64, device="emu")
    begin, end = (torch.Event("emu", enable_timing=True) for _ in range(2))
    busy, before = 0.0, handle.stats()
    half = routed.tokens // 2
    with torch.no_grad():
        for routed.token in range(2 * half):
            if routed.token == half:
                torch.accelerator.synchronize()
                busy, before = emu.stats()["compute_busy_seconds"], handle.stats()
                begin.record()
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
    end.record()
    torch.accelerator.synchronize()
    after = handle.stats()
    uses = after.expert_uses - before.expert_uses
    return Measured(
        seconds=begin.elapsed_time(end) / 1e3 / half,
        compute_seconds=(emu.stats()["compute_busy_seconds"] - busy) / half,
        nbytes=(after.onload_bytes - before.onload_bytes) / half,
        expert_bytes=(after.expert_bytes - before.expert_bytes) / half,
        there=1 - (after.expert_loads - before.expert_loads) / uses if uses else 0.0,
        fewest_bytes=0.0 if handle.plan is None else fewest_bytes(handle.plan.problem),
    )


def measured(implementation: str, trace: Trace, slots: int, others: float, *, whole: bool = False) -> Measured | None:
    """With room for so many experts beside a share of the other weights; None where whole layers have none."""
    configure()
    model = model_of(implementation)
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    beside = sum(p.nbytes for p in model.parameters()) - experts
    limit = int(others * beside + slots * experts / (LAYERS * EXPERTS)) + 2**14
    with contextlib.ExitStack() as stack:
        if whole:
            stack.enter_context(patch.object(_Cutter, "_cut_experts", lambda _cutter: None))
        try:
            handle = stack.enter_context(headrace.offload(model, device="emu", device_memory=limit))
        except headrace.BudgetError:
            return None
        return decode(model, Routed(model, trace), handle)


CASES = [("6 experts", 6, 1.0), ("quarter", 64, 1.0), ("half", 128, 1.0), ("half of others", ROUTED, 0.5)]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=300, help="for which the recorded model has learned")
    arguments.add_argument("--tokens", type=int, default=48)
    given = arguments.parse_args()
    traces = {
        "learned": learned_trace(given.steps, given.tokens),
        "Zipf": drawn_trace(given.tokens, 1.0, 0.3),
    }
    print(f"{'':32}{'ms':>7}{'there':>7}{'link|compute':>14}{'dependent':>11}{'whole':>8}")
    worst = 0.0
    for (name, trace), implementation in itertools.product(traces.items(), ("eager", "batched_mm", "grouped_mm")):
        for room, slots, others in CASES:
            found = measured(implementation, trace, slots, others)
            if found is None:
                raise RuntimeError(f"no room for {slots} experts")
            whole = measured(implementation, trace, slots, others, whole=True) if implementation == "eager" else None
            simple = max(found.nbytes / LINK, found.compute_seconds)
            other_seconds = found.fewest_bytes / LINK
            bound = found.expert_bytes / LINK + max(found.compute_seconds, other_seconds)
            worst = max(worst, found.seconds / bound)
            print(
                f"{name:8}{implementation:12}{room:12.12}{found.seconds * 1e3:7.1f}{found.there:7.0%}"
                f"{found.seconds / simple:14.3f}{found.seconds / bound:11.3f}"
                + (f"{whole.seconds / found.seconds:8.2f}" if whole else f"{'':>8}"),
                flush=True,
            )
    print(f"\nworst {worst:.3f}, bar {BAR}: {'held' if worst <= BAR else 'missed'}")


if __name__ == "__main__":
    with without_noise():
        main()
