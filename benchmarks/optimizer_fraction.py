"""What does each quarter of the optimizer on the host save and cost? A published table, planned and run.

    PYTHONPATH=. python benchmarks/optimizer_fraction.py

Published, by Megatron-Bridge (its page on CPU offloading and that page's card): Qwen3-30B-A3B in training, tensor 2,
pipeline 2, expert 4, on two nodes of 8 H100; 20 steps with 0 to 100% of Adam's state on the host, and 100% with copies
beside the update.

Planned: a model of as many parameters as each device there updates, by `headrace.plan`. Two figures are fitted and the
rest is what the plan makes of them: the operations per second, such that 0% takes what was measured, and the rate of
host memory for the update, from the slope (134 GB/s for 8 devices: the update in PyTorch, not the machine, is the
limit). Two micro-batches of one sequence of 4,096 tokens are assumed.

Run: a decoder that stays on the emulated accelerator, in virtual time, with `device_fraction` of `headrace.optim.AdamW`
for what is not on the host. The link and the host's rate are such that all of the update, and all of the copies, take
as many times the step as published (2.89 and 0.31); the rows between are what comes of it.
"""

import gc
from collections.abc import Sequence
from typing import Any

import torch
from overlap import Case, configure, resident_seconds, settled_seconds

import headrace
from emulator import emu
from headrace.optim import AdamW
from headrace.optim.updates import Updates
from headrace.planning.cost import Place, RunPlan

MODEL = {  # 1.91B parameters
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 10336,
    "vocab_size": 32000,
}
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
PUBLISHED_MS = (996, 1871, 2484, 3187, 4189)
PUBLISHED_GB = (47.2, 43.4, 39.6, 35.6, 32.0)
PUBLISHED_BESIDE_MS = 3877  # 100%, copies beside the update
HOST_RATE = 134e9
FLOPS_PER_SECOND = 1.12e14  # fitted
COPIES = (PUBLISHED_MS[-1] - PUBLISHED_BESIDE_MS) / PUBLISHED_MS[0]  # of all gradients and weights, over a step
UPDATE = PUBLISHED_BESIDE_MS / PUBLISHED_MS[0] - 1  # of all parameters, over a step


def planned(share: float) -> RunPlan:
    """What one device of the published run updates, with an eighth of its node's host memory."""
    return headrace.plan(
        MODEL,
        hardware=headrace.Hardware.named("h100").changed(flops=FLOPS_PER_SECOND, host=HOST_RATE / 8),
        sequence_length=4096,
        micro_batches=2,
        method="activations=kept",
        optimizer_fraction=share,
        disk=False,
    )


def run(share: float, *, beside: bool = False) -> tuple[float, int]:
    """Virtual seconds of a step with `share` of the update on the host, and the device's peak bytes.

    `beside`: copies of some parameters run while others are updated.
    """
    case = Case(model="uniform", mode="training", ratio=1.0, budget_blocks=0)
    alone = resident_seconds("uniform", "training", 1.0)
    configure(case)
    model = case.build()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    emu.configure(
        h2d_bytes_per_second=2 * nbytes / (COPIES * alone), d2h_bytes_per_second=2 * nbytes / (COPIES * alone)
    )
    model = model.to("emu")
    elements_per_second = nbytes / 4 / (UPDATE * alone)
    perform = Updates._apply

    def timed(self: Updates, members: Sequence[Any], scale: float) -> None:
        for member in members:
            if member.master.host.device.type != "cpu":
                perform(self, [member], scale)
                continue
            emu.host_works(member.parameter.numel() / elements_per_second, "update")
            member.updated = True

    Updates._apply = timed  # type: ignore[method-assign]
    try:
        optimizer = AdamW(model.parameters(), device_fraction=1 - share, overlap_d2h_h2d=beside)

        def step() -> None:
            model(torch.empty(512, 1024, device="emu").requires_grad_()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        seconds = settled_seconds(step)
        torch.accelerator.reset_peak_memory_stats()
        step()
        torch.accelerator.synchronize()
        peak = torch.accelerator.max_memory_allocated()
    finally:
        Updates._apply = perform  # type: ignore[method-assign]
    reports = emu.take_reports()
    if reports:
        raise RuntimeError(f"{len(reports)} races, the first: {reports[0]}")
    gc.collect()
    return seconds, peak


def main() -> None:
    print("on host    published             planned                     run, over 0%")
    print("               ms      GB     over      ms      GB     over     step    state saved")
    baseline, most = run(0.0)
    plans = [planned(share) for share in SHARES]
    for share, ms, gb, plan in zip(SHARES, PUBLISHED_MS, PUBLISHED_GB, plans, strict=True):
        seconds, peak = (baseline, most) if share == 0 else run(share)
        step = 1e3 * (plan.step_seconds or 0)
        held = plan.tiers.total(Place.DEVICE) / 1e9
        over, planned_over = ms / PUBLISHED_MS[0], step / (1e3 * (plans[0].step_seconds or 1))
        state = 8 * 24 * 4 * 2**20  # two moments of 24 blocks of four matrices
        print(
            f"{share:7.0%} {ms:9} {gb:7.1f} {over:8.2f} {step:7.0f} {held:7.1f} {planned_over:8.2f}"
            f" {seconds / baseline:8.2f} {(most - peak) / state:12.0%}",
            flush=True,
        )
    beside, _ = run(1.0, beside=True)
    print(f"   100%, copies beside {PUBLISHED_BESIDE_MS / PUBLISHED_MS[0]:9.2f} {'':24}{beside / baseline:8.2f}")
    published, made = (list(gb) for gb in (PUBLISHED_GB, (plan.tiers.total(Place.DEVICE) / 1e9 for plan in plans)))
    own = sum(held.nbytes for held in plans[0].tiers.held if held.purpose == "master and state") / 10 / 1e9
    quarters = [(gb[0] - gb[3]) / 3 for gb in (published, made)]
    print(
        f"\nA device updates {own:.2f}B parameters. Published, each quarter saves {quarters[0]:.1f} GB, 8 bytes"
        f"\nfor each of them: both moments. Planned, {quarters[1]:.1f} GB, 10 bytes: with them goes what masters hold"
        "\nbeside the weights. At 100% gradients leave as they come, too. At 0% the plan lacks what the published run"
        "\nholds beside: gradients and masters in 32 bits (2 bytes more of each), and the runtime's own memory."
    )
    worst = max(abs((p.step_seconds or 0) * 1e3 / ms - 1) for p, ms in zip(plans, PUBLISHED_MS, strict=True))
    print(f"planned step times: off by {worst:.0%} at worst (bar 10%)")


if __name__ == "__main__":
    main()
