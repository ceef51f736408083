"""What do activations on the host cost, and what do they save? Virtual time on the emulated accelerator, so no noise.

    PYTHONPATH=. python benchmarks/activations.py [--quick]

A decoder of 24 layers trains, each saving the same bytes. `copy/compute` is the time of a layer's copies to the host
over its forward's. `step` is the settled step time over the one without offloading, and `plan` over what the plan says.
`left` is the share of the saved bytes that leaves, `peak` that of the most that is on the device at once, and `saving`
the measured saving of peak bytes over the planned one. Beside it, at `save_on_cpu`, PyTorch's context of that name,
whose copies run on the compute stream. Then with gradient checkpointing, where what the checkpoints keep leaves; with a
ceiling in bytes; and with the weights offloaded too, over the same link.
"""

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import headrace
from emulator import emu
from headrace.planning import ActivationPlan

WIDTH = 1024
TOKENS = 2048
LINEARS = 4
LAYERS = 24
FLOPS_PER_SECOND = 2e11
FORWARD_SECONDS = LINEARS * 2 * TOKENS * WIDTH * WIDTH / FLOPS_PER_SECOND  # of a layer
SETTLED_AFTER = 5
MEASURED = 2
SAVED_BYTES = LINEARS * TOKENS * WIDTH * 4  # of a layer
BLOCK_BYTES = LINEARS * WIDTH * WIDTH * 4  # its weights
SCALAR_BYTES = 512  # that the allocator takes for one


class Layer(nn.Module):
    """Linear maps with a non-linearity between, which save one tensor each."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LINEARS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            hidden = torch.tanh(linear(hidden))
        return hidden


class Decoder(nn.Module):
    """Layers one behind the other, checkpointed or not."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.recompute = recompute

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.recompute else layer(hidden)
        return hidden


def configure(ratio: float, recompute: bool) -> None:
    """A device on which what a layer keeps takes `ratio` times its forward to copy."""
    kept_bytes = SAVED_BYTES // LINEARS if recompute else SAVED_BYTES
    bandwidth = kept_bytes / (ratio * FORWARD_SECONDS)
    gc.collect()
    emu.reset(
        scheduler="lazy",
        dry_run=True,
        allocator="exact",
        device_memory=32 << 30,
        pinned_memory=32 << 30,
        flops_per_second=FLOPS_PER_SECOND,
        device_bytes_per_second=1e13,
        h2d_bytes_per_second=bandwidth,
        d2h_bytes_per_second=bandwidth,
    )


def drop_gradients(model: Decoder) -> Decoder:
    """Gradients of weights go as they come, as they would if an optimizer took them: the peak is of activations."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    return model


def cycle(model: nn.Module) -> None:
    model(torch.empty(TOKENS, WIDTH, device="emu").requires_grad_()).sum().backward()
    model.zero_grad(set_to_none=True)


def measure(run: Callable[[], None]) -> tuple[float, int]:
    """Virtual seconds of one settled cycle on the compute stream, and the most bytes that it adds."""
    for _ in range(SETTLED_AFTER):
        run()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    begin, end = (torch.Event("emu", enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(MEASURED):
        run()
    end.record()
    torch.accelerator.synchronize()
    return begin.elapsed_time(end) / 1e3 / MEASURED, torch.accelerator.max_memory_allocated() - before


@dataclass(frozen=True, kw_only=True)
class DevicePeaks:
    """Of one cycle, in bytes: what the ledger has of weights and gradients, and what autograd keeps."""

    weights: int
    gradients: int
    activations: int


def device_peaks(model: nn.Module, handle: Any) -> DevicePeaks:
    """What autograd keeps on the device in one cycle: the allocator's peaks in forward and in backward, less the rest.

    The rest: a value that `tanh` is made of, in forward; the gradient that comes in and the one that goes on, the loss
    and its gradient in backward; the weights; and the gradients of these, where they are not offloaded of one matrix.
    """
    accelerator, value_bytes = torch.accelerator, SAVED_BYTES // LINEARS
    streamed = isinstance(handle, headrace.Offloaded)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    accelerator.synchronize()
    handle.reset_stats()
    accelerator.reset_peak_memory_stats()
    loss = model(torch.empty(TOKENS, WIDTH, device="emu").requires_grad_()).sum()
    forward = accelerator.max_memory_allocated() - value_bytes
    forward -= handle.stats().device_peak_bytes if streamed else weight_bytes
    accelerator.reset_peak_memory_stats()
    loss.backward()
    accelerator.synchronize()
    backward = accelerator.max_memory_allocated() - 2 * value_bytes - 2 * SCALAR_BYTES
    model.zero_grad(set_to_none=True)
    if not streamed:
        backward -= weight_bytes + BLOCK_BYTES // LINEARS
        return DevicePeaks(weights=0, gradients=0, activations=max(forward, backward))
    stats = handle.stats()
    weights, gradients = stats.device_peak_bytes, stats.device_gradient_peak_bytes
    return DevicePeaks(weights=weights, gradients=gradients, activations=max(forward, backward - weights - gradients))


def plain(ratio: float, recompute: bool, context: Callable[[], Any] | None = None) -> tuple[float, int]:
    configure(ratio, recompute)
    model = drop_gradients(Decoder(recompute).to("emu"))

    def run() -> None:
        if context is None:
            cycle(model)
        else:
            with context():
                loss = model(torch.empty(TOKENS, WIDTH, device="emu").requires_grad_()).sum()
            loss.backward()
            model.zero_grad(set_to_none=True)

    return measure(run)


def row(ratio: float, recompute: bool, device_memory: int | None) -> str:
    seconds, peak_bytes = plain(ratio, recompute)
    rival, _ = plain(ratio, recompute, lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))
    configure(ratio, recompute)
    model = drop_gradients(Decoder(recompute).to("emu"))
    with headrace.offload_activations(model, device_memory=device_memory) as handle:
        offloaded, offloaded_peak = measure(lambda: cycle(model))
        plan = handle.plan
    check_races()
    if plan is None:
        raise RuntimeError("nothing was planned")
    left = plan.host_bytes / plan.problem.nbytes
    budget = "" if device_memory is None else f"{device_memory / plan.problem.nbytes:.0%}"
    saving = (peak_bytes - offloaded_peak) / (plan.saving_bytes or 1)
    return (
        f"{'recomputing' if recompute else 'training':12} {ratio:12.1f} {budget:>7} {offloaded / seconds:8.3f}"
        f" {offloaded / plan.seconds:8.3f} {left:8.0%} {plan.peak_bytes / plan.problem.nbytes:8.2f} {saving:8.3f}"
        f" {rival / seconds:12.3f}"
    )


def with_weights(ratio: float, activations: bool) -> tuple[float, ActivationPlan | None]:
    """Seconds of a step with the weights offloaded: four blocks on the device at once."""
    configure(ratio, recompute=False)
    model = Decoder(recompute=False)
    with headrace.offload(
        model, device="emu", device_memory=4 * BLOCK_BYTES, blocks=[model.layers], activations=activations
    ) as handle:
        seconds, _ = measure(lambda: cycle(model))
        plan = None if handle.activations is None else handle.activations.plan
    check_races()
    return seconds, plan


def row_with_weights(ratio: float) -> str:
    """Weights and activations over one link."""
    seconds, _ = plain(ratio, recompute=False)
    alone, _ = with_weights(ratio, activations=False)
    both, plan = with_weights(ratio, activations=True)
    if plan is None:
        raise RuntimeError("nothing was planned")
    return (
        f"{'with weights':12} {ratio:12.1f} {'':>7} {both / seconds:8.3f} {'':8}"
        f" {plan.host_bytes / plan.problem.nbytes:8.0%} {plan.peak_bytes / plan.problem.nbytes:8.2f} {'':8}"
        f" weights alone {alone / seconds:.3f}, a block takes {ratio * BLOCK_BYTES / SAVED_BYTES:.2f} of a forward"
    )


def check_races() -> None:
    reports = emu.take_reports()
    if reports:
        raise RuntimeError(f"{len(reports)} races, the first: {reports[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one ratio of each kind")
    arguments = parser.parse_args()
    print(
        f"{'':12} {'copy/compute':>12} {'ceiling':>7} {'step':>8} {'plan':>8} {'left':>8} {'peak':>8} {'saving':>8}"
        f" {'save_on_cpu':>12}"
    )
    for ratio in (0.9,) if arguments.quick else (0.5, 0.9, 1.0, 1.5, 3.0):
        print(row(ratio, False, None), flush=True)
    for ratio in (0.9,) if arguments.quick else (0.5, 0.9):
        print(row(ratio, True, None), flush=True)
    for share in (0.3,) if arguments.quick else (0.5, 0.3, 0.15):
        print(row(1.5, False, int(share * SAVED_BYTES * LAYERS)), flush=True)
    for ratio in (0.9,) if arguments.quick else (0.5, 0.9, 1.2, 1.5):
        print(row_with_weights(ratio), flush=True)


if __name__ == "__main__":
    main()
