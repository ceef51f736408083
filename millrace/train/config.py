"""What can a training run be told? Frozen settings, checked before anything is read or allocated."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from millrace.config import parse_bytes
from millrace.errors import MillraceError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEAD_SIZE = 64  # of the built-in model: its hidden size is a multiple of this

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


class TrainInputError(MillraceError, ValueError):
    """Something that the user gave to a training run cannot be used: a path, a text, a model, a number."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one training run. Raises `TrainInputError` for a value that no run could use.

    `model` is a transformers directory; None stands for a small Llama with random weights and one token per byte,
    of `layers` x `hidden_size`. Memory is in bytes, as text such as "8GiB", or as a share of the weights ("25%").
    `disk` is a directory for what fits in neither: weights and gradients, and all of the optimizer's state.
    `steps` are optimizer steps of `batch_size * accumulate` sequences; None means `epochs` times through the text.
    """

    text: tuple[Path, ...]
    output: Path
    include: tuple[str, ...] = ("*.txt", "*.md")
    exclude: tuple[str, ...] = ()
    model: Path | None = None
    layers: int = 12
    hidden_size: int = 192
    device: str | None = None
    device_memory: int | str | None = None
    host_memory: int | str | None = None
    disk: Path | None = None
    steps: int | None = None
    epochs: float = 1.0
    batch_size: int = 4
    accumulate: int = 1
    sequence_length: int = 256
    learning_rate: float = 1e-4
    warmup_steps: int = 0
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    dtype: str | None = None
    gradient_checkpointing: bool = False
    seed: int = 0
    compare_plain: int = 0
    plain: bool = False

    def __post_init__(self) -> None:
        if not self.text:
            raise TrainInputError("no text is given; name at least one file or directory with --text")
        at_least_one = ("layers", "hidden_size", "batch_size", "accumulate")
        for name, value, least in (
            *((name, getattr(self, name), 1) for name in at_least_one),
            ("steps", 1 if self.steps is None else self.steps, 1),
            ("sequence_length", self.sequence_length, 2),
            ("warmup_steps", self.warmup_steps, 0),
            ("compare_plain", self.compare_plain, 0),
        ):
            if value < least:
                raise TrainInputError(f"{_option(name)} is {value}; give {least} or more")
        for name in ("epochs", "learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise TrainInputError(f"{_option(name)} is {value}; give a number above 0")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise TrainInputError(f"--weight-decay is {self.weight_decay}; give 0 or more")
        if self.hidden_size % HEAD_SIZE:
            raise TrainInputError(f"--hidden-size is {self.hidden_size}; give a multiple of {HEAD_SIZE}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise TrainInputError(f"--dtype is {self.dtype!r}; give one of {', '.join(DTYPES)}")
        for name in ("device_memory", "host_memory"):
            self.budget_bytes(name, weight_bytes=0)
        ours = ("device_memory", "host_memory", "disk", "compare_plain")
        if self.plain and any(getattr(self, name) for name in ours):
            raise TrainInputError(
                f"--plain trains without millrace, so {', '.join(map(_option, ours))} do not apply; leave either side "
                "out"
            )
        if self.disk is not None and self.model is not None and self.dtype is not None:
            raise TrainInputError(
                f"--disk reads the weights in {self.model} in place, in the dtype that they have; leave --dtype out, "
                "or save the model in that dtype first"
            )

    def budget_bytes(self, name: str, *, weight_bytes: int) -> int | None:
        """The budget `name` in bytes, for a model with `weight_bytes` of weights; None when none is set."""
        value = getattr(self, name)
        if value is None:
            return None
        if isinstance(value, str) and (percent := _PERCENT.fullmatch(value)):
            return int(weight_bytes * float(percent[1]) / 100)
        try:
            return parse_bytes(value, name=_option(name))
        except (TypeError, ValueError) as error:
            raise TrainInputError(f'{error}, or a share of the weights such as "25%"') from error

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


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
