"""A run is slow, or out of memory: why, how does one make sure, and what helps? The usual ones."""

from dataclasses import dataclass

__all__ = ["SYMPTOMS", "Symptom"]


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """What is seen, its likely cause, how to confirm it, and the fix."""

    symptom: str
    cause: str
    confirm: str
    fix: str


SYMPTOMS = (
    Symptom(
        symptom="device out of memory although activations are offloaded",
        cause="what is not activations does not fit: weights, gradients or optimizer state",
        confirm="the table of millrace plan MODEL: the device's column without the row of activations",
        fix="stream the weights too (millrace.offload), step on the host (millrace.optim), or spread the layers",
    ),
    Symptom(
        symptom="device out of memory although some of the optimizer's state is on the host",
        cause="the share on the device is still too large",
        confirm="print(handle.report()) and the state's row of millrace plan",
        fix="a smaller device_fraction of millrace.optim, down to 0; then stream the weights",
    ),
    Symptom(
        symptom="offloaded activations save nothing where layers are recomputed",
        cause="recomputation keeps each layer's input alone: there is little left to offload",
        confirm="activations on the host in print(handle.report()): a few per cent of what the model saves",
        fix="offload the layers that are not recomputed, or recompute those that do not hide (the report names them)",
    ),
    Symptom(
        symptom="a step is more than four times slower with the optimizer on the host",
        cause="the update is limited by the host's memory or by too few threads, and nothing runs beside it",
        confirm="millrace plan: the update lane's share of the step; millrace doctor: threads",
        fix='overlap="forward" of millrace.optim, more tokens in a step, OMP_NUM_THREADS, a larger device_fraction',
    ),
    Symptom(
        symptom="overlapping copies gains a few per cent only",
        cause="the update itself takes the time, not the copies around it",
        confirm="print(handle.report()): onload and offload are busy for little of the step",
        fix='overlap="forward", which puts the update itself beside compute; then more tokens in a step',
    ),
    Symptom(
        symptom="compute waits for weights at every layer",
        cause="the link is slower than compute at this number of tokens",
        confirm="millrace plan: from how many tokens on onload hides; the report's GB/s beside the probed GB/s",
        fix="more tokens in a micro-batch, more device_memory, fewer bits in a frozen base; millrace doctor",
    ),
    Symptom(
        symptom="CUDA graphs of the whole model fail, or torch.compile says that the model runs without it",
        cause="weights move between graphs: they lie elsewhere each time they are on the device",
        confirm="it works without mode='reduce-overhead', or without compiling the model as a whole",
        fix="compile each block: for layer in model.layers: layer.compile(), without mode='reduce-overhead'",
    ),
    Symptom(
        symptom="the process is killed without a message",
        cause="host memory went over the cgroup's limit",
        confirm="dmesg, or memory.events of the cgroup: oom_kill; millrace doctor",
        fix="a smaller host_memory and disk=..., or a larger limit",
    ),
)
