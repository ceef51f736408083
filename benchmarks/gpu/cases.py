"""Which runs is a case made of? One `Job` for each way and budget: what a child process is told to do."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from torch import nn

from benchmarks.gpu.models import DITS, LLAMAS, MOES, dit, language_model, layers_of, nbytes_of

MIB, GIB = 2**20, 2**30
UPDATE_ROOM_BYTES = 3 * MIB // 2  # of device memory, at least, for update="device"
UPDATES = ("headrace-backward", "headrace-device")
TRAIN = ("plain", "headrace", "fsdp2", "deepspeed", "torchao", "roundpipe")
DECODE = ("plain", "headrace", "accelerate", "fsdp2", "deepspeed")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One way to do one kind of work, in a process of its own, with each of `loads` in turn.

    `kind`: "train", "lora", "decode", "moe", "dit" or "activations". `loads`: tokens of a step; when decoding, rows.
    `micro_batches`: each row is one. `device_memory`, or a `share` of the weights: the budget, which only headrace has.
    `directory`: the process's own; weights rest there where `disk`.
    """

    case: str
    kind: str
    way: str
    size: str
    loads: tuple[int, ...]
    steps: int
    device: str
    micro_batches: bool = False
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
    micro_batches: bool = False


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
    "updates": (
        Case(
            kind="train",
            about="full fine-tune, other ways to update",
            ways=("plain", "headrace", *UPDATES),
            size="3b",
            loads=(8192,),
            shares=(0.25,),
        ),
    ),
    "micro_batches": (
        Case(
            kind="train",
            about="full fine-tune, each row a micro-batch",
            ways=("plain", "headrace", "headrace-together"),
            size="3b",
            loads=(16384,),
            shares=(0.25,),
            micro_batches=True,
        ),
    ),
    "moe": (
        Case(
            kind="moe",
            about="decoding of a mixture of experts",
            ways=("plain", "headrace"),
            size="15b",
            loads=(1, 8),
            shares=(0.5, 0.25),
            steps=16,
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
TINY_LOADS = {"train": (64,), "lora": (64,), "decode": (1, 2), "moe": (1, 2), "dit": (64,), "activations": (256,)}


def meta_model(kind: str, size: str) -> nn.Module:
    """Without values; for counting."""
    return dit(size, "meta") if kind == "dit" else language_model(kind, size, "meta")


def is_headrace(way: str) -> bool:
    """Whether the way is headrace's; some are headrace with other settings."""
    return way.partition("-")[0] == "headrace"


def with_budgets(job: Job, model: nn.Module) -> Job:
    """Where none are given: shares of the weights, or device memory for three blocks of the DiT."""
    if not is_headrace(job.way) or job.kind == "activations":
        return job
    weight_bytes = nbytes_of(model)
    budget, host = int(weight_bytes * job.share), weight_bytes // 4 if job.disk else None
    if job.kind == "dit":
        blocks = layers_of(model)
        budget = weight_bytes - (len(blocks) - 3) * nbytes_of(blocks[0])
    elif job.way == "headrace-device":
        budget = max(budget, UPDATE_ROOM_BYTES)  # tiny models have less
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
            for budget, share in budgets if is_headrace(way) else [(None, 0.0)]:
                yield Job(
                    case=name,
                    kind=case.kind,
                    way=way,
                    size=size,
                    loads=tuple(loads or (TINY_LOADS[case.kind] if size == "tiny" else case.loads)),
                    steps=steps or case.steps,
                    device=device,
                    micro_batches=case.micro_batches,
                    device_memory=budget,
                    share=share,
                    host_memory=host_memory if case.disk and is_headrace(way) else None,
                    disk=case.disk and way != "plain",
                )


def sizes_of(kind: str) -> list[str]:
    return list({"dit": DITS, "moe": MOES}.get(kind, LLAMAS))
