"""Why is a run refused, slow, or out of memory, how does one make sure, and what helps? The usual symptoms."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """What is seen, its likely cause, how to confirm it, and the fix.

    `says`: words of headrace's error, warning or report line about it, exactly as they stand there.
    """

    symptom: str
    says: str
    cause: str
    confirm: str
    fix: str

    def to_text(self) -> str:
        rows = (("named", f'"{self.says}"'), ("cause", self.cause), ("confirm", self.confirm), ("fix", self.fix))
        return "\n".join([self.symptom, *(f"  {name:<8} {text}" for name, text in rows)]) + "\n"


SYMPTOMS = (
    Symptom(
        symptom="pipeline, tensor or data parallel training is refused or not to be had with offloading",
        says="headrace does not run this yet",
        cause="a rank has one device; replicas run (mesh=), and tensor, pipeline and expert degrees of a plan, as ZeRO"
        " of offloaded weights, are simulated",
        confirm="the cannot line of headrace plan, or runnable in its JSON: what of the plan cannot be run",
        fix="one device that the weights visit (headrace.offload), which needs no pipeline to fit; replicas with"
        " headrace.offload(model, mesh=mesh); or PyTorch's own stages and shards, each offloaded by its rank",
    ),
    Symptom(
        symptom="gradients are not averaged between ranks",
        says="would never see its gradients",
        cause="DistributedDataParallel and FSDP wait for gradients of parameters that an offloaded model keeps at home",
        confirm="the StateError names the wrapper; Trainer, accelerate and Lightning wrap by themselves",
        fix="offload the model without a wrapper: headrace.offload(model, mesh=mesh) averages gradients over the ranks",
    ),
    Symptom(
        symptom="activation offloading and recomputation are refused together",
        says="recompute them (gradient checkpointing)",
        cause="other systems exclude one of them; with headrace both work, and layers that recompute have little left"
        " to offload",
        confirm="activations on the host in print(handle.report()): a few per cent of what the model saves",
        fix="offload the layers that are not recomputed, or recompute those that do not hide (the report names them)",
    ),
    Symptom(
        symptom="two ways of offloading activations are on at once",
        says="are offloaded already; call remove() on that handle",
        cause="whole layers and single modules were both asked for, or the same model twice",
        confirm="the StateError names the module that has a handle",
        fix="remove() on the first handle, then one call: headrace.offload_activations(model, modules=[...])",
    ),
    Symptom(
        symptom="two systems move the same weights: accelerate, diffusers, DeepSpeed or headrace itself",
        says="which moves weights too",
        cause="hooks of another system's offloading, or an earlier headrace.offload, are on the model",
        confirm="the StateError names the module and whose hook it carries",
        fix="load without device_map, take the hooks off as the error says, or remove() on the earlier handle",
    ),
    Symptom(
        symptom="CUDA graphs of the whole model fail, or torch.compile says that the model runs without it",
        says="an offloaded model runs without torch.compile",
        cause="weights and activations move between graphs: they lie elsewhere each time they are on the device",
        confirm="it works without mode='reduce-overhead', or without compiling the model as a whole",
        fix="compile each block: for layer in model.layers: layer.compile(), without mode='reduce-overhead'",
    ),
    Symptom(
        symptom="device out of memory although activations are offloaded",
        says="lacks",
        cause="what is not activations does not fit: weights, gradients or optimizer state",
        confirm="the table of headrace plan MODEL: the device's column without the row of activations",
        fix="stream the weights too (headrace.offload), and step on the host (headrace.optim)",
    ),
    Symptom(
        symptom="device out of memory although some of the optimizer's state is on the host",
        says="master and state",
        cause="the share on the device is still too large",
        confirm="headrace plan MODEL --optimizer-fraction 0.5, and smaller device_fraction: the device's column",
        fix="a smaller device_fraction of headrace.optim, down to 0; then stream the weights",
    ),
    Symptom(
        symptom="device out of memory before anything is allocated: device_memory is too small",
        says="device_memory allows",
        cause="a visit needs its block, and the ones that stay, at once",
        confirm="the BudgetError names the block, its bytes, and the least that would do",
        fix='what the error says: a larger device_memory, or smaller blocks, such as blocks="64MiB"',
    ),
    Symptom(
        symptom="a step is more than four times slower with the optimizer on the host",
        says="behind compute, from",
        cause="the update is limited by the host's memory or by too few threads, and nothing runs beside it",
        confirm="headrace plan: the update lane's share of the step; headrace doctor: threads",
        fix='overlap="forward" of headrace.optim, more tokens in a step, OMP_NUM_THREADS, a larger device_fraction',
    ),
    Symptom(
        symptom="overlapping copies gains a few per cent only",
        says="the update beside the next forward (overlap)",
        cause="the update itself takes the time, not the copies around it",
        confirm="print(handle.report()): onload and offload are busy for little of the step",
        fix='overlap="forward", which puts the update itself beside compute; then more tokens in a step',
    ),
    Symptom(
        symptom="compute waits for weights at every layer",
        says="waits for",
        cause="the link is slower than compute at this number of tokens",
        confirm="headrace plan: from how many tokens on onload hides; the report's GB/s beside the probed GB/s",
        fix="more tokens in a micro-batch, more device_memory, fewer bits in a frozen base; headrace doctor",
    ),
    Symptom(
        symptom="copies do not run beside compute, though the link is quick enough",
        says="could not be page-locked",
        cause="host memory could not be page-locked (WSL, a container on Windows, a driver that refuses)",
        confirm="host_refused_bytes of handle.stats() is above 0; headrace doctor says how much can be locked",
        fix="Linux itself; more device_memory, or less host_memory with disk=..., so that what is left can be locked",
    ),
    Symptom(
        symptom="backward fails because a weight has changed",
        says="WeightChangedError",
        cause="something wrote to a weight between the forward and its backward: a swap of EMA weights, a merge",
        confirm="the error names the parameter",
        fix="make the change between backward and the next forward",
    ),
    Symptom(
        symptom="the process is killed without a message",
        says="host memory can be taken",
        cause="host memory went over the cgroup's limit",
        confirm="dmesg, or memory.events of the cgroup: oom_kill; headrace doctor",
        fix="a smaller host_memory and disk=..., or a larger limit",
    ),
)


def matching(words: Sequence[str]) -> list[Symptom]:
    """The symptoms in which every word occurs, in upper or lower case; all of them if there are no words."""
    return [row for row in SYMPTOMS if all(word.lower() in row.to_text().lower() for word in words)]
