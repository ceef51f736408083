"""Which runs is a case made of? One `Job` for each way and budget: what a child process is told to do."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from torch import nn

from benchmarks.gpu.models import DITS, LLAMAS, dit, layers_of, llama, nbytes_of

MIB, GIB = 2**20, 2**30
TRAIN = ("plain", "headrace", "fsdp2", "deepspeed", "torchao", "roundpipe")
DECODE = ("plain", "headrace", "accelerate", "fsdp2", "deepspeed")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One way to do one kind of work, in a process of its own, with each of `loads` in turn.

    `kind`: "train", "lora", "decode", "dit" or "activations". `loads`: tokens of a step; when decoding, rows.
    `device_memory`, or a `share` of the weights: the budget, which only headrace has. `directory`: the process's own;
    weights rest there where `disk`.
    """

    case: str
    kind: str
    way: str
    size: str
    loads: tuple[int, ...]
    steps: int
    device: str
    device_memory: int | None = None
    share: float = 0.0
    host_memory: int | None = None
    disk: bool = False
    directory: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        fields = json.loads(text)
        return cls(**fields | {"loads": tuple(fields["loads"])})


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case as it runs where no flag says otherwise. `shares`: of the weights, each a budget."""

    kind: str
    about: str
    ways: tuple[str, ...]
    size: str
    loads: tuple[int, ...]
    shares: tuple[float, ...] = (0.5,)
    steps: int = 4
    disk: bool = False


CASES: dict[str, tuple[Case, ...]] = {
    "train": (Case(kind="train", about="full fine-tune", ways=TRAIN, size="8b", loads=(8192,)),),
    "lora": (
        Case(
            kind="lora",
            about="adapters beside a frozen model",
            ways=("plain", "headrace", "fsdp2", "deepspeed"),
            size="14b",
            loads=(8192,),
            shares=(0.25,),
        ),
    ),
    "decode": (
        Case(
            kind="decode",
            about="prefill, then greedy decoding",
            ways=DECODE,
            size="8b",
            loads=(1, 8, 64),
            shares=(0.5, 0.25),
            steps=16,
        ),
    ),
    "dit": (
        Case(
            kind="dit",
            about="denoising steps of a video DiT",
            ways=("plain", "headrace", "diffusers", "accelerate"),
            size="14b",
            loads=(16384,),
        ),
    ),
    "disk": (
        Case(
            kind="decode",
            about="decoding, weights on disk",
            ways=("plain", "headrace", "accelerate"),
            size="8b",
            loads=(1, 8),
            shares=(0.25,),
            steps=8,
            disk=True,
        ),
        Case(
            kind="train",
            about="full fine-tune, weights on disk",
            ways=("plain", "headrace"),
            size="3b",
            loads=(8192,),
            shares=(0.25,),
            steps=3,
            disk=True,
        ),
    ),
    "activations": (
        Case(
            kind="activations",
            about="what autograd saves",
            ways=("plain", "headrace", "save_on_cpu", "checkpointing"),
            size="1.5b",
            loads=(8192,),
        ),
    ),
}
TINY_LOADS = {"train": (64,), "lora": (64,), "decode": (1, 2), "dit": (64,), "activations": (256,)}


def meta_model(kind: str, size: str) -> nn.Module:
    """Without values; for counting."""
    return dit(size, "meta") if kind == "dit" else llama(size, "meta")


def with_budgets(job: Job, model: nn.Module) -> Job:
    """Where none are given: shares of the weights, or device memory for three blocks of the DiT."""
    if job.way != "headrace" or job.kind == "activations":
        return job
    weight_bytes = nbytes_of(model)
    budget, host = int(weight_bytes * job.share), weight_bytes // 4 if job.disk else None
    if job.kind == "dit":
        blocks = layers_of(model)
        budget = weight_bytes - (len(blocks) - 3) * nbytes_of(blocks[0])
    return replace(job, device_memory=job.device_memory or budget, host_memory=job.host_memory or host)


def jobs_of(
    case: Case,
    name: str,
    *,
    device: str,
    sizes: Sequence[str] | None,
    device_memory: Sequence[int] | None,
    host_memory: int | None,
    loads: Sequence[int] | None,
    steps: int | None,
    ways: Sequence[str] | None,
) -> Iterator[Job]:
    """Plain first, for what the others are compared with; ways that have no budget once, whatever the budgets."""
    budgets = [(None, share) for share in case.shares] if device_memory is None else [(b, 0.0) for b in device_memory]
    for size in sizes or [case.size]:
        for way in case.ways:
            if ways is not None and way not in ways:
                continue
            for budget, share in budgets if way == "headrace" else [(None, 0.0)]:
                yield Job(
                    case=name,
                    kind=case.kind,
                    way=way,
                    size=size,
                    loads=tuple(loads or (TINY_LOADS[case.kind] if size == "tiny" else case.loads)),
                    steps=steps or case.steps,
                    device=device,
                    device_memory=budget,
                    share=share,
                    host_memory=host_memory if case.disk and way == "headrace" else None,
                    disk=case.disk and way != "plain",
                )


def sizes_of(kind: str) -> list[str]:
    return list(DITS if kind == "dit" else LLAMAS)
