"""What can a training run be told, and what is refused before anything is read? Frozen settings, a flag for each."""

import ast
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from headrace.config import activation_config, parse_budget
from headrace.errors import TrainInputError
from headrace.runtime.device import resolve_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEAD_SIZE = 64  # in the built-in model, whose hidden size is a multiple of this

_Dtype = Literal["float32", "bfloat16", "float16"]
_WeightDtype = Literal["float32", "bfloat16"]
_Optimizer = Literal["adamw", "adam", "sgd", "lion", "adafactor", "muon"]
OPTIMIZERS: tuple[str, ...] = get_args(_Optimizer)


def setting(
    default: Any,
    text: str,
    *,
    group: str | None = None,
    metavar: str | None = None,
    least: int | None = None,
    above: int | None = None,
) -> Any:
    """A field of `TrainConfig`; its type says how the command line reads it.

    `group`: the group of the help for this setting and those after it. Another value changes the result, unless
    `headrace.train.resume` lists the setting.
    """
    shown = " ".join(default) if isinstance(default, tuple) else default
    named = default is not None and default != () and not isinstance(default, bool)
    about = {"help": f"{text} (default: {shown})" if named else text, "group": group, "metavar": metavar}
    return dataclasses.field(default=default, metadata={**about, "least": least, "above": above})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one training run. Raises `TrainInputError` for a value that no run could use.

    `model` is a transformers directory; None stands for a small Llama of `layers` x `hidden_size` with random weights
    and one token per byte. Memory is in bytes, as text such as "8GiB", or as a share of the weights ("25%").
    `disk` is a directory for what fits in neither memory: weights and gradients, and all of the optimizer's state.
    `steps` are optimizer steps of `batch_size * accumulate` sequences; None means `epochs` times through the data.
    """

    text: tuple[Path, ...] = setting(
        (),
        'files and directories: plain text, JSON lines ({"text": ...}) or conversations ({"messages": [...]} or'
        ' ShareGPT\'s {"conversations": [...]}, loss on assistant turns only), which the content of each file says',
        group="data",
        metavar="PATH",
    )
    include: tuple[str, ...] = setting(
        ("*.txt", "*.md", "*.jsonl"), "files to take from directories", metavar="PATTERN"
    )
    exclude: tuple[str, ...] = setting((), "files to leave out, such as 'tests/*'", metavar="PATTERN")
    packing: bool | None = setting(
        None,
        "fill windows of --sequence-length with one example after another; without, each example is a sequence of its"
        " own, padded (default: for all but chat)",
    )
    sequence_length: int = setting(256, "tokens in a sequence", least=2)

    model: Path | None = setting(None, "a transformers model (default: a small Llama)", group="model")
    layers: int = setting(12, "layers of the small Llama", least=1)
    hidden_size: int = setting(192, "hidden size of the small Llama", least=1)
    dtype: _WeightDtype | None = setting(None, "of the weights (default: as saved)")
    output: Path = setting(None, "where the trained model is saved")

    lora_rank: int | None = setting(
        None, "train adapters of this rank (PEFT) and not the weights", group="LoRA", least=1
    )
    lora_alpha: float = setting(16.0, "their scale is this, divided by the rank", above=0)
    lora_dropout: float = setting(0.0, "before them, in training", metavar="P")
    lora_targets: tuple[str, ...] = setting(
        ("all-linear",), "modules that get one, such as q_proj v_proj", metavar="NAME"
    )

    device: str | None = setting(
        None, "compute device (default: the accelerator, else cpu)", group="memory", metavar="DEVICE"
    )
    device_memory: int | str | None = setting(None, "for weights on the device (default: what is free)", metavar="SIZE")
    host_memory: int | str | None = setting(None, "for weights in host RAM (default: what is free)", metavar="SIZE")
    disk: Path | None = setting(None, "for weights that fit in neither, and all optimizer state (default: none)")
    blocks: tuple[str, ...] = setting(
        ("auto",), "what travels together: auto, a size, or name patterns such as 'model.layers.*'", metavar="WHAT"
    )
    resident: tuple[str, ...] = setting((), "name patterns of modules that stay on the device", metavar="PATTERN")
    prefetch: int | Literal["auto"] = setting("auto", "blocks loaded ahead at most")
    param_dtype: _Dtype | None = setting(None, "in which weights travel and compute (default: their own)")
    grad_dtype: _Dtype | None = setting(None, "in which gradients are summed up (default: the weights' own)")
    gradient_checkpointing: bool = setting(False, "recompute activations in backward")
    micro_batches_together: int | Literal["all"] | None = setting(
        None,
        "this many micro-batches of a step (--accumulate), or 'all', go through each block before the next one comes,"
        " so that weights come once for all of them; what backward needs is then there for all of them, too",
        least=1,
    )
    offload_activations: tuple[str, ...] | None = setting(
        None,
        "what backward needs waits in host memory; settings of headrace.offload_activations may follow, such as"
        " device_memory=2GiB layers=4 tier=disk",
        metavar="NAME=VALUE",
    )

    optimizer: _Optimizer = setting("adamw", "the update rule", group="optimizer")
    optimizer_tier: Literal["host", "disk"] | None = setting(
        None, "where its state rests (default: disk with --disk, else host)"
    )
    state_dtype: Literal["float32", "bfloat16", "8bit"] = setting("float32", "of its moments")
    overlap: Literal["none", "forward", "backward"] = setting("none", "what updates run beside")
    device_fraction: float | Literal["auto"] | None = setting(
        None,
        "all weights stay on the device, and this share of the state, 0 to 1 or auto (default: weights come to the"
        " device block by block)",
    )

    steps: int | None = setting(None, "optimizer steps (default: from --epochs)", group="training", least=1)
    epochs: float = setting(1.0, "times through the data", above=0)
    batch_size: int = setting(4, "sequences in a micro-batch", least=1)
    accumulate: int = setting(1, "micro-batches in a step", least=1)
    learning_rate: float = setting(1e-4, "the highest", above=0)
    schedule: Literal["constant", "linear", "cosine"] = setting("constant", "of the learning rate after warm-up")
    warmup_steps: int = setting(0, "steps over which the learning rate rises from 0", least=0)
    weight_decay: float = setting(0.01, "of the optimizer", least=0)
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm; 0: they are not", least=0)
    seed: int = setting(0, "of the weights, the order of the data and dropout")
    compare_plain: int = setting(
        0, "first run N steps without headrace, and fail when a loss differs in a single bit", least=0
    )

    eval_text: tuple[Path, ...] = setting(
        (),
        "files and directories to measure loss and perplexity on; the best model is kept in OUTPUT/best",
        group="evaluation",
        metavar="PATH",
    )
    eval_every: int | None = setting(None, "steps between measurements (default: at the end only)", least=1)

    save_every: int | None = setting(
        None,
        "steps between checkpoints, in OUTPUT/checkpoints (default: when asked to stop)",
        group="checkpoints",
        least=1,
    )
    keep: int = setting(2, "checkpoints to keep", least=1)
    resume: Path | Literal[True] | None = setting(
        None,
        "go on from the newest checkpoint in DIR (default: in OUTPUT, where a run of the same settings was"
        " interrupted)",
    )
    tensorboard: Path | None = setting(None, "write loss, speed and bytes of each step there")

    def __post_init__(self) -> None:
        changed = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        for problem in itertools.chain(_bad_values(self), idle(self, changed), _bad_pairs(self)):
            raise TrainInputError(problem)

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"

    @property
    def state_tier(self) -> str:
        return self.optimizer_tier or ("host" if self.disk is None else "disk")

    def activation_settings(self) -> dict[str, Any] | None:
        """Settings of `headrace.offload_activations`; None when activations stay."""
        if self.offload_activations is None:
            return None
        values: dict[str, Any] = {}
        for each in self.offload_activations:
            name, equals, text = each.partition("=")
            if not (equals and name.isidentifier()):
                raise TrainInputError(f"--offload-activations {each}: give NAME=VALUE")
            try:
                values[name] = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
            except (ValueError, SyntaxError):
                values[name] = text.split(",") if name == "modules" else text
        return values

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
        try:
            return resolve_device(self.device)
        except ValueError as error:
            raise TrainInputError(f"--{error}") from error


def flag(name: str) -> str:
    """The name of a setting on the command line."""
    return "--" + name.replace("_", "-")


def kinds_of(hint: Any) -> list[Any]:
    """The types that a value of a setting with this type hint may have, except None."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [kind for kind in kinds if kind is not NoneType]


def words_of(hint: Any) -> tuple[Any, ...]:
    """The words that a setting with this type hint accepts."""
    return tuple(word for kind in kinds_of(hint) if get_origin(kind) is Literal for word in get_args(kind))


def _bad_values(config: TrainConfig) -> Iterator[str]:
    """What is wrong with single settings."""
    if not config.text:
        yield "no text is given; name at least one file or directory with --text"
    if config.output is None:
        yield "no output is given; name a directory with --output"
    hints = get_type_hints(TrainConfig)
    for field in dataclasses.fields(config):
        value, name, hint = getattr(config, field.name), flag(field.name), hints[field.name]
        words, least, above = words_of(hint), field.metadata["least"], field.metadata["above"]
        number = isinstance(value, int | float)
        if isinstance(value, str) and words and value not in words:
            yield f"{name} is {value!r}; give one of {', '.join(words)}"
        if number and least is not None and not (math.isfinite(value) and value >= least):
            yield f"{name} is {value}; give {least} or more"
        if number and above is not None and not (math.isfinite(value) and value > above):
            yield f"{name} is {value}; give a number above {above}"
    if not 0 <= config.lora_dropout < 1:
        yield f"--lora-dropout is {config.lora_dropout}; give 0 or more, and less than 1"
    if not 0 <= config.seed < 2**32:
        yield f"--seed is {config.seed}; give 0 to {2**32 - 1}"
    if config.hidden_size % HEAD_SIZE:
        yield f"--hidden-size is {config.hidden_size}; give a multiple of {HEAD_SIZE}"
    fraction = config.device_fraction
    if fraction not in (None, "auto") and not 0 <= float(fraction) <= 1:
        yield f"--device-fraction is {fraction}; give 0 to 1, or auto"
    for name in ("device_memory", "host_memory"):
        config.budget_bytes(name, weight_bytes=0)
    yield from _bad_activations(config)


def _bad_activations(config: TrainConfig) -> Iterator[str]:
    settings = config.activation_settings()
    if settings is None:
        return
    if "disk" in settings:
        del settings["disk"]
        yield "--offload-activations has no setting 'disk'; name the directory with --disk"
    try:
        activation_config(settings or True)
    except (TypeError, ValueError) as error:
        yield f"--offload-activations: {error}"
    if settings.get("tier") == "disk" and config.disk is None:
        yield "--offload-activations tier=disk needs a directory; name one with --disk"


def _bad_pairs(config: TrainConfig) -> Iterator[str]:
    """What is wrong with combinations of settings that are valid by themselves."""
    if config.state_tier == "disk" and config.disk is None:
        yield "--optimizer-tier disk needs a directory; name one with --disk"
    # An update in backward happens before the norm of all gradients is known, and before the next micro-batch.
    if config.overlap == "backward" and config.max_grad_norm:
        yield (
            "--overlap backward updates weights before the norm of all gradients is known; give --max-grad-norm 0, or"
            " --overlap forward"
        )
    if config.overlap == "backward" and config.accumulate > 1:
        yield "--overlap backward updates weights in each backward; leave --accumulate out, or give --overlap forward"
    if config.state_dtype != "float32" and config.optimizer in ("adafactor", "muon"):
        yield f"--state-dtype is float32 with --optimizer {config.optimizer}; leave it out"
    if config.compare_plain and config.device_fraction is not None:
        yield "--compare-plain is for updates in host memory; leave --device-fraction out"
    if config.compare_plain and (config.param_dtype or config.grad_dtype):
        yield "--compare-plain is for weights in their own dtype; leave --param-dtype, --grad-dtype out"
    if config.disk is not None and config.model is not None and config.dtype is not None:
        yield (
            f"--disk reads the weights in {config.model} in place, in the dtype that they have; leave --dtype out, or"
            " save the model in that dtype first"
        )
    output, scalars = config.output, config.tensorboard
    if scalars is not None and output.resolve() == scalars.resolve():
        yield f"--tensorboard and --output are both {output}; give --tensorboard {output / 'scalars'}"
    if config.lora_rank is not None and config.model is None:
        yield "--lora-rank adapts a model that is trained already; name one with --model"


def idle(config: TrainConfig, given: Collection[str]) -> Iterator[str]:
    """An error for each of the settings `given` that does nothing beside the others, even if it has its default."""

    def named(*names: str) -> str:
        """The given ones of these settings, and a verb; empty if none of them is given."""
        flags = [flag(name) for name in names if name in given]
        return f"{', '.join(flags)} {'do' if len(flags) > 1 else 'does'}" if flags else ""

    of_visits = ("device_memory", "host_memory", "blocks", "resident", "prefetch", "param_dtype", "grad_dtype")
    if config.device_fraction is not None and (flags := named(*of_visits, "micro_batches_together", "overlap")):
        yield f"--device-fraction is for weights that stay on the device, so {flags} not apply; leave either side out"
    if config.accumulate == 1 and (flags := named("micro_batches_together")):
        yield f"{flags} nothing for one micro-batch in a step; give --accumulate, too, or leave it out"
    if config.model is not None and (flags := named("layers", "hidden_size")):
        yield f"--model names a model that has its own sizes, so {flags} not apply to it; leave either side out"
    if config.lora_rank is None and (flags := named("lora_alpha", "lora_dropout", "lora_targets")):
        yield f"{flags} nothing without --lora-rank, which adds the adapters; give that too, such as --lora-rank 16"
    if config.steps is not None and "epochs" in given:
        yield "--steps and --epochs both say how long the run is; leave one of them out"
    if not config.eval_text and "eval_every" in given:
        yield "--eval-every needs something to measure on; name it with --eval-text"
