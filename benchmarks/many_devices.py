"""What would headrace's plan of many devices come to, and what was published of others? Simulated, as Markdown tables.

    PYTHONPATH=. python benchmarks/many_devices.py [--only 8B]

Each row is a call of `headrace.plan`: no figure of headrace here was measured. Published figures were read where the
row says (docs/many_devices.md has the addresses); two rates are fitted, to one row each, and marked.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import headrace
from headrace.planning.cost import Place, RunPlan
from headrace.planning.text import decimal_text

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
LLAMA_405B = LLAMA_8B | {
    "hidden_size": 16384,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "intermediate_size": 53248,
}
# Like Kimi K2: DeepSeek V3's layers with 384 experts.
MOE_1T: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
# Eight layers with eight experts of a model with an embedding of 508,559,360 elements, which the source names.
QWEN35_CUT = QWEN3_30B_A3B | {
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "moe_intermediate_size": 512,
    "num_experts": 8,
    "vocab_size": 248320,
}
# Two rates of products are fitted, each to one published figure; what is planned with them is marked (a) and (b).
FITTED_4090 = 189.3e12  # the plan of one card says what RoundPipe measured on one: 3,142 tokens/s
FITTED_H200 = 241.7e12  # products at which prime-rl's step of 1.75 s at 8K, sharded by ZeRO-3, takes that long
FORWARD: dict[str, Any] = {"overlap": "forward"}


@dataclass(frozen=True)
class Case:
    """A plan to be made: its arguments, and what its row says of the machine."""

    model: str
    config: dict[str, Any]
    machine: str
    settings: dict[str, Any] = field(default_factory=dict)

    def plan(self) -> RunPlan:
        return headrace.plan(self.config, **(FORWARD | self.settings))


def on(
    machine: str, nodes: int = 1, devices: int = 8, figures: Mapping[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    changed = headrace.Hardware.named(machine).changed(**figures or {})
    return {"hardware": changed, "devices": devices, "nodes": nodes, **settings}


def sized() -> Iterator[Case]:
    """8B to 1T, on one node and on several."""
    small = {"batch_size": 4, "sequence_length": 2048, "micro_batches": 8}
    large = {"batch_size": 4, "sequence_length": 4096, "micro_batches": 2}
    for nodes in (1, 4):
        yield Case("8B", LLAMA_8B, f"{nodes} x 8 4090", on("8x4090", nodes, **small))
    for nodes in (1, 16):
        yield Case("8B", LLAMA_8B, f"{nodes} x 8 H100", on("8xh100", nodes, **large))
    halves = {"batch_size": 2, "sequence_length": 2048, "micro_batches": 16}
    yield Case("70B", LLAMA_70B, "1 x 8 4090, state on 4 drives", on("8x4090", **halves))
    yield Case("70B", LLAMA_70B, "1 x 8 4090, 1.2 TB", on("8x4090", host_memory="1.2TB", **halves))
    for nodes in (1, 16):
        yield Case("70B", LLAMA_70B, f"{nodes} x 8 H100", on("8xh100", nodes, **large))
    most = {"batch_size": 2, "sequence_length": 4096, "micro_batches": 4}
    for nodes in (1, 16):
        yield Case("405B", LLAMA_405B, f"{nodes} x 8 H200, state on 4 drives", on("8xh200", nodes, **most))
    yield Case("405B", LLAMA_405B, "16 x 8 H200, 6.5 TB", on("8xh200", 16, host_memory="6.5TB", **most))
    many = {"batch_size": 4, "sequence_length": 4096, "micro_batches": 4}
    drives: dict[str, Any] = {"host_memory": "6TB", "figures": {"drive": "8xnvme-gen5"}}
    yield Case("1T MoE", MOE_1T, "16 x 8 H200, 6 TB, state on 8 drives", on("8xh200", 16, **drives, **many))
    yield Case("1T MoE", MOE_1T, "16 x 8 B200, 6 TB, state on 8 drives", on("8xb200", 16, **drives, **many))


def published() -> Iterator[tuple[str, str, Case, str]]:
    """What was measured of others, what it is in, the nearest plan, and where it is from."""
    yield from _roundpipe()
    source = "[prime-rl][prime]"
    fitted = on("8xh200", figures={"flops": FITTED_H200})
    for length, offloaded in ((8192, "3.96 s"), (16384, "5.73 s")):
        shared = fitted | {"method": "state=host,activations=recomputed", "sequence_length": length}
        name = f"prime-rl, 30B-A3B, {length // 1024}K, optimizer offloaded"
        yield name, offloaded, Case("", QWEN3_30B_A3B, "8 H200 (b)", shared), source
    source = "[Megatron-LM][mfsdp]"
    cut = on("8xh100", sequence_length=1024, micro_batches=4, method="state=host")
    for name, seconds in (("Megatron-FSDP", "2.377 s"), ("FSDP2", "2.554 s"), ("Megatron HDO", "1.435 s")):
        yield f"{name}, 8 layers, 8 experts", seconds, Case("", QWEN35_CUT, "8 H100", cut), source
    source = "[MegaTrain][megatrain]"
    sequences = {"batch_size": 8, "sequence_length": 1024, "micro_batches": 8}
    for count, rate in ((1, "272 TFLOP/s"), (4, "1,290 TFLOP/s")):
        case = Case("", QWEN2_7B, f"{count} H100", on("8xh100", devices=count, **sequences))
        yield f"MegaTrain, 7B, {count} H100", rate, case, source


def _roundpipe() -> Iterator[tuple[str, str, Case, str]]:
    """Measured on 8 x 4090 and 8 x A800 in one paper, 8B, full fine-tuning."""
    source = "[RoundPipe][roundpipe]"
    step: dict[str, Any] = {"batch_size": 4, "sequence_length": 2048, "micro_batches": 8, "host_memory": "800GB"}
    step |= {"method": "stream-weights,activations=recomputed"}
    fast = step | {"figures": {"flops": FITTED_4090}}
    little = step | {"micro_batches": 1}
    slow_memory = step | {"figures": {"flops": FITTED_4090, "host": "150GB/s"}}
    card = Case("", LLAMA_8B, "1 4090", on("8x4090", devices=1, **step))
    fast_card = Case("", LLAMA_8B, "1 4090 (a)", on("8x4090", devices=1, **fast))
    cards, fast_cards = (
        Case("", LLAMA_8B, f"8 4090{mark}", on("8x4090", **own)) for mark, own in (("", step), (" (a)", fast))
    )
    slow_cards = Case("", LLAMA_8B, "8 4090 (a), host memory of 150 GB/s", on("8x4090", **slow_memory))
    few = Case("", LLAMA_8B, "8 4090, 65,536 tokens a step", on("8x4090", **little))
    yield "RoundPipe, stale, 1 4090", "3,142 tokens/s", card, source
    yield "the same", "3,142 tokens/s", fast_card, source
    yield "RoundPipe, stale, 8 4090", "24,275 tokens/s", fast_cards, source
    yield "RoundPipe, synchronous, 8 4090", "18,888 tokens/s", cards, source
    yield "the same", "18,888 tokens/s", fast_cards, source
    yield "the same", "18,888 tokens/s", slow_cards, source
    yield "Megatron, pipeline, 8 4090", "16,412 tokens/s", cards, source
    yield "FSDP, ZeRO 3, 8 4090", "1,924 tokens/s", few, source
    yield "ZeRO-Infinity, 8 4090", "1,843 tokens/s", cards, source
    a800: dict[str, Any] = {
        "figures": {"peers": "160GB/s"},
        "batch_size": 8,
        "sequence_length": 2048,
        "micro_batches": 4,
    }
    a800s = Case("", LLAMA_8B, "8 A800", on("8xa100", **a800))
    yield "FSDP, ZeRO 3, 8 A800", "29,148 tokens/s", a800s, source
    yield "RoundPipe, stale, 8 A800", "28,427 tokens/s", a800s, source
    yield "RoundPipe, synchronous, 8 A800", "22,703 tokens/s", a800s, source


def scaling() -> Iterator[tuple[int, list[RunPlan]]]:
    """8B on cards without and with peer access, one to eight of them in the same server."""
    for count in (1, 2, 4, 8):
        plans = []
        for peer in ("none", "pcie"):
            for tokens in (4, 1):
                asked: dict[str, Any] = {"figures": {"peer": peer}, "batch_size": tokens, "sequence_length": 2048}
                settings = on("8x4090", devices=count, **asked)
                plans.append(Case("8B", LLAMA_8B, "", settings).plan())
        yield count, plans


def bound(plan: RunPlan) -> str:
    """What is in use for the largest part of the step."""
    if plan.run is None:
        return ""
    name = max(plan.run.in_use, key=lambda one: plan.run.in_use[one] if plan.run else 0.0)
    return f"{name} {plan.run.in_use[name]:.0%}"


def ways(plan: RunPlan) -> str:
    """How weights come and gradients go."""
    if plan.run is None or plan.run.sharing is None:
        return "by ZeRO's collectives" if plan.spread.zero_stage else "all-reduce"
    sharing = plan.run.sharing
    loads = "gather" if sharing.gathered else "own"
    return f"{loads}, {'devices' if sharing.reduced else 'host'}"


def table(heads: list[str], rows: Iterator[list[str]]) -> None:
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
    print()


def sized_row(case: Case) -> list[str]:
    plan = case.plan()
    work, node = plan.work, plan.hardware.devices
    tokens = f"{work.micro_batches} x {work.tokens:,}"
    host, disk = (decimal_text(plan.tiers.total(place) * node) for place in (Place.HOST, Place.DISK))
    if plan.run is None or plan.tokens_per_second is None:
        lacking = plan.shortfall.lacks if plan.shortfall else ()
        lacks = ", ".join(f"{decimal_text(lack)} of {place.value} memory" for place, lack in lacking)
        return [case.model, case.machine, tokens, host, disk, f"does not fit: lacks {lacks}", "", "", "", ""]
    kept = f"{plan.run.efficiency:.0%}"
    step, speed = f"{plan.run.seconds:.3g} s", f"{plan.tokens_per_second:,.0f}"
    return [case.model, case.machine, tokens, host, disk, ways(plan), step, speed, kept, bound(plan)]


def published_row(name: str, measured: str, case: Case, source: str) -> list[str]:
    plan = case.plan()
    if plan.tokens_per_second is None or plan.step_seconds is None:
        return [name, measured, case.machine, "does not fit", "", source]
    simulated = f"{plan.tokens_per_second:,.0f} tokens/s"
    if measured.endswith(" s"):
        simulated = f"{plan.step_seconds:.3g} s"
    elif measured.endswith("TFLOP/s"):
        computed = sum(block.active_parameters for block in plan.model.blocks)
        simulated = f"{6 * computed * plan.tokens_per_second / 1e12:,.0f} TFLOP/s"
    return [name, measured, case.machine, simulated, bound(plan), source]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="rows of the first table whose model has this name")
    only = parser.parse_args().only
    heads = [
        "model",
        "nodes x devices",
        "tokens a step of each device",
        "host, node",
        "disk, node",
        "weights, gradients",
    ]
    rows = (sized_row(case) for case in sized() if only in (None, case.model))
    table([*heads, "step, simulated", "tokens/s, simulated", "of compute", "most in use"], rows)
    if only is not None:
        return
    heads = ["4090s", "8,192 tokens, no peers", "2,048 tokens, no peers", "8,192, PCIe peers", "2,048, PCIe peers"]
    speeds = ([str(count), *(f"{p.tokens_per_second:,.0f}" for p in plans)] for count, plans in scaling())
    table([heads[0], *(f"{head}: tokens/s, simulated" for head in heads[1:])], speeds)
    heads = ["published", "measured by its authors", "planned on", "simulated", "most in use", "source"]
    table(heads, (published_row(*row) for row in published()))


if __name__ == "__main__":
    sys.exit(main())
