"""How does each system run a job? One function for each way; a system's own words stand in its function alone.

Each makes its own model, so that no second copy exists, and returns what runs it. The learning rate is 0: the updates
do all their arithmetic and move all their bytes, and every loss of every way has to equal plain's.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import headrace
from benchmarks.gpu.cases import GIB, UPDATES, Job
from benchmarks.gpu.models import layers_of
from benchmarks.gpu.work import SEQUENCE, build, is_training

CLIP = 1.0
ADAMW: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Step = Callable[[Tensor], Tensor]


@dataclass(kw_only=True)
class Running:
    """A job under way: `step` trains on a batch, (rows, tokens), and gives its loss; `model` is called to infer.

    `note`: in what the way differs from what a user of headrace gets.
    """

    model: Any
    step: Step | None = None
    handle: Any = None
    clock: "ComputeClock | None" = None
    note: str = ""


class ComputeClock:
    """Seconds of forward and backward, by the device's own events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[tuple[torch.Event, torch.Event]] = []

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        torch.accelerator.current_stream(self._device).record_event(event)
        return event

    def count(self, begin: torch.Event) -> None:
        self._steps.append((begin, self.mark()))

    def seconds(self, last: int) -> float:
        """Of one of the `last` steps, in the mean."""
        torch.accelerator.synchronize(self._device)
        return sum(begin.elapsed_time(end) for begin, end in self._steps[-last:]) / 1e3 / last


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def gradients(model: nn.Module, tokens: Tensor) -> Tensor:
    """Computes those of a batch, and gives its loss."""
    loss = loss_of(model, tokens)
    loss.backward()
    return loss.detach()


def gradients_in_turn(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of one row after the other, and gives all their losses."""
    return torch.cat([gradients(model, row)[None] for row in tokens.split(1)])


def stepping(
    model: nn.Module,
    optimizer: Any,
    *,
    clip: bool,
    clock: ComputeClock | None = None,
    compute: Callable[[nn.Module, Tensor], Tensor] = gradients,
) -> Step:
    """The loop as everybody writes it."""

    def step(tokens: Tensor) -> Tensor:
        begin = clock.mark() if clock is not None else None
        loss = compute(model, tokens)
        if clock is not None:
            clock.count(begin)
        if clip:
            torch.nn.utils.clip_grad_norm_(trained(model), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def plain(job: Job, device: torch.device) -> Running:
    """All on the device: the fastest that it can do."""
    model, clock = build(job, device), ComputeClock(device)
    if not is_training(job):
        return Running(model=model)
    optimizer = torch.optim.AdamW(trained(model), **ADAMW, fused=True)
    note = "no float32 masters; moments in bfloat16"
    compute = gradients_in_turn if job.micro_batches else gradients
    step = stepping(model, optimizer, clip=True, clock=clock, compute=compute)
    return Running(model=model, step=step, clock=clock, note=note)


def with_headrace(job: Job, device: torch.device) -> Running:
    """Weights within the budget, masters and moments in float32 on the host. What follows "headrace-" is a setting."""
    model = build(job)
    setting = job.way.partition("-")[2]
    handle = headrace.offload(
        model,
        device=device,
        device_memory=job.device_memory,
        host_memory=job.host_memory,
        disk=job.directory if job.disk else None,
    )
    if not is_training(job):
        return Running(model=model, handle=handle)
    options: dict[str, Any] = {"max_grad_norm": CLIP, "overlap": "forward"}
    if setting == "backward":
        options = {"overlap": "backward"}
    elif setting == "device":
        options["update"] = "device"
    optimizer = headrace.optim.AdamW(trained(model), **ADAMW, **options)

    def together(model: nn.Module, tokens: Tensor) -> Tensor:
        return torch.stack(handle.forward_backward(tokens.split(1), partial(loss_of, model)))

    compute = together if setting == "together" else gradients_in_turn if job.micro_batches else gradients
    step = stepping(model, optimizer, clip=False, compute=compute)
    return Running(model=model, step=step, handle=handle, note="no clipping" if setting == "backward" else "")


def fsdp2(job: Job, device: torch.device) -> Running:
    """`fully_shard` of each layer and of the rest, parameters in float32 on the host, as its users keep masters."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    backend = "nccl" if device.type == "cuda" else "gloo"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(f"cpu:gloo,{device.type}:{backend}", store=store, rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh(device.type, (1,))
    model = build(job, dtype=torch.float32 if job.kind == "train" else torch.bfloat16)
    policies: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=True)}
    if job.kind == "train":
        policies["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*layers_of(model), model):
        fully_shard(module, mesh=mesh, **policies)
    if not is_training(job):
        return Running(model=model)
    optimizer = torch.optim.AdamW(trained(model), **ADAMW, fused=True)
    note = "adapters without float32 masters" if job.kind == "lora" else ""
    return Running(model=model, step=stepping(model, optimizer, clip=True), note=note)


def with_deepspeed(job: Job, device: torch.device) -> Running:
    """ZeRO-3, parameters and optimizer offloaded to page-locked host memory."""
    import deepspeed

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    offloaded = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"stage": 3, "offload_param": offloaded, "overlap_comm": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    if is_training(job):
        zero |= {"offload_optimizer": offloaded, "contiguous_gradients": True}
        settings |= {"gradient_clipping": CLIP, "optimizer": {"type": "AdamW", "params": ADAMW}}
    model = build(job)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained(model) or None, config=settings)

    def step(tokens: Tensor) -> Tensor:
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Running(model=engine, step=step)


def with_accelerate(job: Job, device: torch.device) -> Running:
    """Each module's weights come when it is called; for inference."""
    from accelerate import cpu_offload, disk_offload

    model = build(job)
    if job.disk:
        return Running(model=disk_offload(model, job.directory, execution_device=device))
    return Running(model=cpu_offload(model, execution_device=device))


def with_diffusers(job: Job, device: torch.device) -> Running:
    """Group offloading of single blocks, on a stream of its own."""
    from diffusers.hooks import apply_group_offloading

    model = build(job)
    apply_group_offloading(
        model, onload_device=device, offload_type="block_level", num_blocks_per_group=1, use_stream=True
    )
    return Running(model=model)


def with_torchao(job: Job, device: torch.device) -> Running:
    """Weights and gradients on the device, AdamW on the host."""
    from torchao.optim import CPUOffloadOptimizer

    model = build(job, device)
    optimizer = CPUOffloadOptimizer(trained(model), torch.optim.AdamW, **ADAMW, fused=True)
    note = "no clipping, which it cannot; no float32 masters; moments in bfloat16"
    return Running(model=model, step=stepping(model, optimizer, clip=False), note=note)


def with_roundpipe(job: Job, device: torch.device) -> Running:
    """Layers as stages in turn, one micro-batch for each row, the update beside the next step."""
    from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
    from roundpipe.optim import Adam

    base = build(job, recomputing=False)  # it recomputes by itself
    micro_batches = max(1, min(job.loads) // SEQUENCE)
    model: Any = wrap_model_to_roundpipe(
        base,
        use_sequential_preset=True,
        optim_dtype=torch.float32,
        model_run_config=RoundPipeRunConfig(num_microbatch=micro_batches),
    )
    optimizer = Adam(model.optim_parameters(), **ADAMW, decoupled_weight_decay=True)

    def loss_of(outputs: Any, labels: Tensor) -> Tensor:
        loss = model.loss_function(logits=outputs.logits, labels=labels, vocab_size=base.config.vocab_size)
        return loss / micro_batches

    def step(tokens: Tensor) -> Tensor:
        rows = tokens.cpu()
        inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        loss = model.forward_backward(input_kwargs=inputs, label=rows, loss_fn=loss_of)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad(), None)[-1])
        return loss.detach()

    return Running(model=model, step=step, note=f"weights one step late; no clipping; {micro_batches} micro-batches")


# what autograd saves ------------------------------------------------------------------------------------------------
def forward_backward(model: nn.Module) -> Step:
    """Without an update; the loss, and the norm of the gradients."""

    def step(tokens: Tensor) -> Tensor:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        model.zero_grad(set_to_none=True)
        return torch.stack([loss.detach().float(), norm.float()])

    return step


def activations_kept(job: Job, device: torch.device) -> Running:
    model = build(job, device, recomputing=False)
    return Running(model=model, step=forward_backward(model))


def activations_recomputed(job: Job, device: torch.device) -> Running:
    model = build(job, device)
    return Running(model=model, step=forward_backward(model))


def activations_saved_on_cpu(job: Job, device: torch.device) -> Running:
    running = activations_kept(job, device)
    plain_step = running.step
    assert plain_step is not None

    def step(tokens: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type=device.type):
            return plain_step(tokens)

    running.step = step
    return running


def activations_with_headrace(job: Job, device: torch.device) -> Running:
    running = activations_kept(job, device)
    min_bytes = 1024 if job.size == "tiny" else "1MiB"
    running.handle = headrace.offload_activations(running.model, min_bytes=min_bytes)
    return running


@dataclass(frozen=True)
class Way:
    """`host_bytes`, `device_bytes`: of each parameter, at least; what has no room is not tried."""

    run: Callable[[Job, torch.device], Running]
    host_bytes: dict[str, int]
    device_bytes: dict[str, int]


HOST = {"train": 14, "lora": 2, "decode": 2, "moe": 2, "dit": 2}
WAYS: dict[str, Way] = {
    "plain": Way(plain, {}, {"train": 8, "lora": 2, "decode": 2, "moe": 2, "dit": 2}),
    **dict.fromkeys(("headrace", *UPDATES, "headrace-together"), Way(with_headrace, HOST, {})),
    "fsdp2": Way(fsdp2, HOST | {"train": 18}, {}),  # 16, and page-locked tensors are rounded up
    "deepspeed": Way(with_deepspeed, HOST | {"train": 18}, {}),
    "accelerate": Way(with_accelerate, HOST, {}),
    "diffusers": Way(with_diffusers, HOST, {}),
    "torchao": Way(with_torchao, {"train": 8}, {"train": 4}),
    "roundpipe": Way(with_roundpipe, {"train": 18}, {}),
}
ACTIVATION_WAYS: dict[str, Way] = {
    "plain": Way(activations_kept, {}, {"activations": 4}),
    "headrace": Way(activations_with_headrace, {}, {"activations": 4}),
    "save_on_cpu": Way(activations_saved_on_cpu, {}, {"activations": 4}),
    "checkpointing": Way(activations_recomputed, {}, {"activations": 4}),
}


def way_of(job: Job) -> Way:
    return (ACTIVATION_WAYS if job.kind == "activations" else WAYS)[job.way]


def no_room(job: Job, parameters: int, host_free: int, device_total: int) -> str:
    """Why the way is not tried, in numbers; "" where it is."""
    way = way_of(job)
    for place, each, free in (("host", way.host_bytes, host_free), ("device", way.device_bytes, device_total)):
        needed = each.get(job.kind, 0) * parameters
        if needed > free and not (place == "host" and job.disk):
            each_bytes = f"{each[job.kind]} bytes for each parameter"
            return f"needs {needed / GIB:.0f} GiB of {place} memory ({each_bytes}), and there are {free / GIB:.0f}"
    return ""
