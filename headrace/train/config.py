"""What can a training run be told? Frozen settings; the command line has a flag for each, of the same name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.config import parse_budget
from headrace.errors import TrainInputError
from headrace.train import checks
from headrace.train.settings import flag, setting

__all__ = ["DTYPES", "OPTIMIZERS", "TrainConfig"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "adafactor", "muon")

_WEIGHT_DTYPES = ("float32", "bfloat16")


def _share(text: str) -> float | str:
    return text if text == "auto" else float(text)


def _how_many(text: str) -> int | Literal["all"]:
    return "all" if text == "all" else int(text)


def _depth(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(text)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one training run. Raises `TrainInputError` for a value that no run could use.

    `model` is a transformers directory; None stands for a small Llama with random weights and one token per byte,
    of `layers` x `hidden_size`. Memory is in bytes, as text such as "8GiB", or as a share of the weights ("25%").
    `disk` is a directory for what fits in neither: weights and gradients, and all of the optimizer's state.
    `steps` are optimizer steps of `batch_size * accumulate` sequences; None means `epochs` times through the data.
    """

    # data
    text: tuple[Path, ...] = setting(
        (), "files and directories", group="data", kind=Path, metavar="PATH", several="+", decides=False
    )
    include: tuple[str, ...] = setting(
        ("*.txt", "*.md", "*.jsonl"),
        "files to take from directories",
        group="data",
        metavar="PATTERN",
        several="+",
        decides=False,
    )
    exclude: tuple[str, ...] = setting(
        (), "files to leave out, such as 'tests/*'", group="data", metavar="PATTERN", several="+", decides=False
    )
    format: str | None = setting(
        None,
        'text, jsonl ({"text": ...} in each line) or chat ({"messages": [...]} or ShareGPT\'s {"conversations": [...]},'
        " loss on assistant turns only) (default: from each file's name and content)",
        group="data",
        choices=("text", "jsonl", "chat"),
    )
    packing: bool | None = setting(
        None,
        "fill windows of --sequence-length with one example after another; without, each example is a sequence of its"
        " own, padded (default: for all but chat)",
        group="data",
    )
    sequence_length: int = setting(256, "tokens in a sequence", group="data", kind=int, metavar="N")
    data_only: bool = setting(
        False, "read and tokenize the data, keep it for the next run, and end", group="data", decides=False
    )
    # model
    model: Path | None = setting(
        None, "a transformers model (default: a small Llama)", group="model", kind=Path, metavar="DIR", decides=False
    )
    layers: int = setting(12, "layers of the small Llama", group="model", kind=int, metavar="N")
    hidden_size: int = setting(192, "hidden size of the small Llama", group="model", kind=int, metavar="N")
    dtype: str | None = setting(None, "of the weights (default: as saved)", group="model", choices=_WEIGHT_DTYPES)
    output: Path | None = setting(
        None, "where the trained model is saved", group="model", kind=Path, metavar="DIR", decides=False
    )
    # adapters
    lora_rank: int | None = setting(
        None, "train adapters of this rank (PEFT) and not the weights", group="LoRA", kind=int, metavar="N"
    )
    lora_alpha: float = setting(16.0, "their scale is this by rank", group="LoRA", kind=float, metavar="X")
    lora_dropout: float = setting(0.0, "before them, in training", group="LoRA", kind=float, metavar="P")
    lora_targets: tuple[str, ...] = setting(
        ("all-linear",), "modules that get one, such as q_proj v_proj", group="LoRA", metavar="NAME", several="+"
    )
    # memory
    device: str | None = setting(
        None,
        "compute device (default: the accelerator, else cpu)",
        group="memory",
        metavar="DEVICE",
        decides=False,
    )
    device_memory: int | str | None = setting(
        None, "for weights on the device (default: what is free)", group="memory", metavar="SIZE", decides=False
    )
    host_memory: int | str | None = setting(
        None, "for weights in host RAM (default: what is free)", group="memory", metavar="SIZE", decides=False
    )
    disk: Path | None = setting(
        None,
        "for weights that fit in neither, and all optimizer state (default: none)",
        group="memory",
        kind=Path,
        metavar="DIR",
        decides=False,
    )
    blocks: tuple[str, ...] = setting(
        ("auto",),
        "what travels together: auto, a size, or name patterns such as 'model.layers.*'",
        group="memory",
        metavar="WHAT",
        several="+",
        decides=False,
    )
    resident: tuple[str, ...] = setting(
        (), "name patterns of modules that stay on the device", group="memory", metavar="PATTERN", several="+",
        decides=False,
    )  # fmt: skip
    prefetch: int | Literal["auto"] = setting(
        "auto", "blocks loaded ahead at most", group="memory", kind=_depth, metavar="N", decides=False
    )
    param_dtype: str | None = setting(
        None, "in which weights travel and compute (default: their own)", group="memory", choices=tuple(DTYPES)
    )
    grad_dtype: str | None = setting(
        None, "in which gradients are summed up (default: the weights' own)", group="memory", choices=tuple(DTYPES)
    )
    gradient_checkpointing: bool = setting(False, "recompute activations in backward", group="memory", decides=False)
    micro_batches_together: int | Literal["all"] | None = setting(
        None,
        "so many micro-batches of a step (--accumulate), or 'all', go through each block before the next one comes, so"
        " that weights come once for all of them; what backward needs is then there for all of them, too",
        group="memory",
        kind=_how_many,
        metavar="N",
        decides=False,
    )
    offload_activations: tuple[str, ...] | None = setting(
        None,
        "what backward needs waits in host memory; settings of headrace.offload_activations may follow, such as"
        " device_memory=2GiB layers=4 tier=disk",
        group="memory",
        metavar="NAME=VALUE",
        several="*",
        decides=False,
    )
    # optimizer
    optimizer: str = setting("adamw", "the update rule", group="optimizer", choices=OPTIMIZERS)
    optimizer_options: tuple[str, ...] = setting(
        (), "more of its settings, such as momentum=0.9", group="optimizer", metavar="NAME=VALUE", several="+"
    )
    optimizer_tier: str | None = setting(
        None,
        "where its state rests (default: disk with --disk, else host)",
        group="optimizer",
        choices=("host", "disk"),
        decides=False,
    )
    state_dtype: str = setting("float32", "of its moments", group="optimizer", choices=("float32", "bfloat16", "8bit"))
    master_form: str = setting(
        "split", "of what bfloat16 weights lack to float32: 2 bytes or 4", group="optimizer", choices=("split", "full")
    )
    overlap: str = setting(
        "none",
        "what updates run beside",
        group="optimizer",
        choices=("none", "forward", "backward"),
        decides=False,
    )
    device_fraction: float | str | None = setting(
        None,
        "all weights stay on the device, and this share of the state, 0 to 1 or auto (default: weights come to the"
        " device block by block)",
        group="optimizer",
        kind=_share,
        metavar="X",
        decides=False,
    )
    overlap_d2h_h2d: bool = setting(
        True,
        "with --device-fraction: gradients and weights travel while others are updated",
        group="optimizer",
        decides=False,
    )
    # training
    steps: int | None = setting(
        None, "optimizer steps (default: from --epochs)", group="training", kind=int, metavar="N", decides=False
    )
    epochs: float = setting(1.0, "times through the data", group="training", kind=float, metavar="X", decides=False)
    batch_size: int = setting(4, "sequences in a micro-batch", group="training", kind=int, metavar="N")
    accumulate: int = setting(1, "micro-batches in a step", group="training", kind=int, metavar="N")
    learning_rate: float = setting(1e-4, "the highest", group="training", kind=float, metavar="X")
    schedule: str = setting(
        "constant",
        "of the learning rate after warm-up",
        group="training",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: int = setting(
        0, "steps over which the learning rate rises from 0", group="training", kind=int, metavar="N"
    )
    weight_decay: float = setting(0.01, "of the optimizer", group="training", kind=float, metavar="X")
    max_grad_norm: float = setting(
        1.0, "gradients are clipped to this norm; 0: they are not", group="training", kind=float, metavar="X"
    )
    seed: int = setting(0, "of the weights, the order of the data and dropout", group="training", kind=int, metavar="N")
    compare_plain: int = setting(
        0,
        "first run N steps without headrace, and fail when a loss differs in a single bit",
        group="training",
        kind=int,
        metavar="N",
        decides=False,
    )
    plain: bool = setting(False, "train without headrace, for comparison", group="training")
    # evaluation
    eval_text: tuple[Path, ...] = setting(
        (),
        "files and directories to measure loss and perplexity on; the best model is kept in OUTPUT/best",
        group="evaluation",
        kind=Path,
        metavar="PATH",
        several="+",
        decides=False,
    )
    eval_every: int | None = setting(
        None, "steps between measurements (default: at the end only)", group="evaluation", kind=int, metavar="N",
        decides=False,
    )  # fmt: skip
    # checkpoints
    save_every: int | None = setting(
        None,
        "steps between checkpoints, in OUTPUT/checkpoints (default: when asked to stop)",
        group="checkpoints",
        kind=int,
        metavar="N",
        decides=False,
    )
    keep: int = setting(2, "checkpoints to keep", group="checkpoints", kind=int, metavar="N", decides=False)
    resume: Path | None = setting(
        None,
        "go on from the newest checkpoint in DIR (default: in OUTPUT, where a run of the same settings was"
        " interrupted)",
        group="checkpoints",
        kind=Path,
        metavar="DIR",
        several="?",
        decides=False,
    )
    tensorboard: Path | None = setting(
        None,
        "write loss, speed and bytes of each step there",
        group="checkpoints",
        kind=Path,
        metavar="DIR",
        decides=False,
    )

    def __post_init__(self) -> None:
        checks.check(self)

    @property
    def output_directory(self) -> Path:
        if self.output is None:
            raise TrainInputError("no output is given; name a directory with --output")
        return self.output

    @property
    def checkpoints(self) -> Path:
        return self.output_directory / "checkpoints"

    @property
    def state_tier(self) -> str:
        return self.optimizer_tier or ("host" if self.disk is None else "disk")

    def activation_settings(self) -> dict[str, Any] | None:
        """Settings of `headrace.offload_activations`; None when activations stay."""
        if self.offload_activations is None:
            return None
        settings = checks.named_values("offload_activations", self.offload_activations)
        return {name: value.split(",") if name == "modules" else value for name, value in settings.items()}

    def budget_bytes(self, name: str, *, weight_bytes: int) -> int | None:
        """The budget `name` in bytes, for a model with `weight_bytes` of weights; None when none is set."""
        value = getattr(self, name)
        if value is None:
            return None
        try:
            return parse_budget(value, name=flag(name), whole_bytes=weight_bytes)
        except (TypeError, ValueError) as error:
            raise TrainInputError(str(error)) from error

    def compute_device(self) -> torch.device:
        """The device to compute on: the one named, else the machine's accelerator, else the CPU."""
        if self.device is None:
            return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        try:
            device = torch.device(self.device)
            torch.empty(1, device=device)
        except Exception as error:  # each backend raises its own kind
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise TrainInputError(f"--device {self.device!r} cannot be used: {reason}; try --device cpu") from error
        return device
