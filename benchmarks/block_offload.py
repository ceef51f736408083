"""What does streaming blocks cost in inference, one after the other and beside compute? Published figures, and ours.

    PYTHONPATH=. python benchmarks/block_offload.py

MindIE-SD's page on CPU offload compares synchronous and asynchronous offload in a picture: copies of layer N+1 run
beside layer N, so compute masks them. It gives no figures. A system of the same design has published some (vLLM-Omni,
pull request 1223: Wan 2.1 on an H100): 74.6 s resident, 121.6 s with sequential offload, 77.3 s layer by layer, so
1.63 and 1.036 times the resident run. Sequential offload says what a load takes: 0.63 of a layer's compute.

Virtual time on the emulated accelerator, the decoder of `overlap.py` (24 equal blocks), at this ratio and others: the
step over the one with all weights on the device, and beside it the blocks that are there at once, by the allocator's
peak. "Ahead" is the design as its documentation tells it, with 2 reserved blocks (`overlap_rivals.py`);
`enable_offload` is headrace's call of the same name and count (`headrace.compat`), and the last ones headrace's own
with a budget of 2 blocks and of as many as "ahead" holds.
"""

import gc
from collections.abc import Callable

import torch
from overlap import LINEARS, WIDTH, Case, Decoder, configure, cycle, settled_seconds
from overlap_rivals import ahead_of_residents, synchronous

import headrace
from emulator import emu
from headrace.compat.mindie_sd import enable_offload
from headrace.formulas import reserved_peak_blocks

RESERVED = 2
BLOCK_BYTES = LINEARS * WIDTH * WIDTH * 4
PUBLISHED_RESIDENT, PUBLISHED_SEQUENTIAL, PUBLISHED_LAYERWISE = 74.6, 121.6, 77.3  # seconds
PUBLISHED_RATIO = PUBLISHED_SEQUENTIAL / PUBLISHED_RESIDENT - 1  # of a load over a layer's compute
RATIOS = (0.3, PUBLISHED_RATIO, 0.9, 1.5)
AHEAD_BLOCKS = reserved_peak_blocks(24, RESERVED)


def measured(ratio: float, offload: Callable[[Decoder], object]) -> tuple[float, int]:
    """Virtual seconds of a settled pass over the model that `offload` was given, and the device's peak bytes."""
    case = Case(model="uniform", mode="inference", ratio=ratio, budget_blocks=0)
    configure(case)
    model = case.build()
    handle = offload(model)
    seconds = settled_seconds(lambda: cycle(model, case.mode))
    torch.accelerator.reset_peak_memory_stats()
    cycle(model, case.mode)
    torch.accelerator.synchronize()
    peak = torch.accelerator.max_memory_allocated()
    reports = emu.take_reports()
    if reports:
        raise RuntimeError(f"{len(reports)} races, the first: {reports[0]}")
    del handle
    gc.collect()
    return seconds, peak


def on_device(model: Decoder) -> object:
    return model.to("emu")


def in_turn(model: Decoder) -> None:
    synchronous(model.layers, torch.device("emu", 0), 0, training=False)


def ahead(model: Decoder) -> None:
    ahead_of_residents(model.layers, torch.device("emu", 0), AHEAD_BLOCKS, training=False)


def enabled(model: Decoder) -> None:
    enable_offload(model, model.layers, RESERVED)


def planned(blocks: int) -> Callable[[Decoder], object]:
    return lambda model: headrace.offload(
        model, device="emu", device_memory=blocks * BLOCK_BYTES, blocks=[model.layers]
    )


WAYS: dict[str, Callable[[Decoder], object]] = {
    "synchronous": in_turn,
    "ahead": ahead,
    "enable_offload": enabled,
    "2 blocks": planned(2),
    f"{AHEAD_BLOCKS} blocks": planned(AHEAD_BLOCKS),
}


def main() -> None:
    print(f"load / compute {'':3}" + "".join(f"{name:>22}" for name in WAYS))
    published = {}
    for ratio in RATIOS:
        alone, most = measured(ratio, on_device)
        activations = most - 24 * BLOCK_BYTES
        cells = []
        for name, way in WAYS.items():
            seconds, peak = measured(ratio, way)
            cells.append(f"{seconds / alone:10.3f} ({(peak - activations) / BLOCK_BYTES:4.1f} bl.)")
            if ratio == PUBLISHED_RATIO:
                published[name] = seconds / alone
        print(f"{ratio:14.2f} {'':3}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    print(
        f"\npublished at {PUBLISHED_RATIO:.2f}: sequential {PUBLISHED_SEQUENTIAL / PUBLISHED_RESIDENT:.3f},"
        f" layer by layer {PUBLISHED_LAYERWISE / PUBLISHED_RESIDENT:.3f}"
    )
    worst = max(seconds for name, seconds in published.items() if name != "synchronous")
    print(f"ours there, at worst {worst:.3f} (bar 1.036)")


if __name__ == "__main__":
    main()
