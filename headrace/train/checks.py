"""Which settings can no run use? Each is refused before anything is read, in the words of the command line."""

import ast
import inspect
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from headrace.activation_offloading import offload_activations
from headrace.config import activation_config
from headrace.errors import TrainInputError
from headrace.train.idle import not_default, refuse_idle
from headrace.train.settings import declared, flag

if TYPE_CHECKING:
    from headrace.train.config import TrainConfig

__all__ = ["HEAD_SIZE", "check", "named_values"]

HEAD_SIZE = 64  # of the built-in model: its hidden size is a multiple of this

_AT_LEAST = {
    "layers": 1,
    "hidden_size": 1,
    "batch_size": 1,
    "accumulate": 1,
    "micro_batches_together": 1,
    "steps": 1,
    "sequence_length": 2,
    "warmup_steps": 0,
    "compare_plain": 0,
    "lora_rank": 1,
    "eval_every": 1,
    "save_every": 1,
    "keep": 1,
}
_POSITIVE = ("epochs", "learning_rate", "lora_alpha")
_NOT_NEGATIVE = ("weight_decay", "max_grad_norm")


def check(config: "TrainConfig") -> None:
    """Raises TrainInputError for the first value, or pair of values, that no run could use."""
    if not config.text:
        raise TrainInputError("no text is given; name at least one file or directory with --text")
    if not config.data_only:
        _ = config.output_directory
    _check_values(config)
    refuse_idle(config, not_default(config))
    for name in ("device_memory", "host_memory"):
        config.budget_bytes(name, weight_bytes=0)
    _check_activations(config)
    _check_optimizer(config)
    _check_pairs(config)


def _check_values(config: "TrainConfig") -> None:
    for about in declared(type(config)):
        value = getattr(config, about.name)
        if about.choices and value is not None and value not in about.choices:
            raise TrainInputError(f"{flag(about.name)} is {value!r}; give one of {', '.join(about.choices)}")
    for name, least in _AT_LEAST.items():
        value = getattr(config, name)
        if isinstance(value, int) and value < least:
            raise TrainInputError(f"{flag(name)} is {value}; give {least} or more")
    for name in _POSITIVE:
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise TrainInputError(f"{flag(name)} is {value}; give a number above 0")
    for name in _NOT_NEGATIVE:
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= 0):
            raise TrainInputError(f"{flag(name)} is {value}; give 0 or more")
    if not 0 <= config.lora_dropout < 1:
        raise TrainInputError(f"--lora-dropout is {config.lora_dropout}; give 0 or more, and less than 1")
    if not 0 <= config.seed < 2**32:
        raise TrainInputError(f"--seed is {config.seed}; give 0 to {2**32 - 1}")
    if config.hidden_size % HEAD_SIZE:
        raise TrainInputError(f"--hidden-size is {config.hidden_size}; give a multiple of {HEAD_SIZE}")


def _check_activations(config: "TrainConfig") -> None:
    settings = config.activation_settings()
    if settings is None:
        return
    known = [name for name in inspect.signature(offload_activations).parameters if name not in ("model", "disk")]
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise TrainInputError(f"--offload-activations has no setting {unknown[0]!r}; give one of {', '.join(known)}")
    try:
        activation_config(settings)
    except (TypeError, ValueError) as error:
        raise TrainInputError(f"--offload-activations: {error}") from error
    if settings.get("tier") == "disk" and config.disk is None:
        raise TrainInputError("--offload-activations tier=disk needs a directory; name one with --disk")


def _check_optimizer(config: "TrainConfig") -> None:
    named_values("optimizer_options", config.optimizer_options)
    if config.state_tier == "disk" and config.disk is None:
        raise TrainInputError("--optimizer-tier disk needs a directory; name one with --disk")
    if config.overlap == "backward":
        # What is updated in backward is over before the norm of all gradients, or the next micro-batch, is there.
        if config.max_grad_norm:
            raise TrainInputError(
                "--overlap backward updates weights before the norm of all gradients is known; give --max-grad-norm 0,"
                " or --overlap forward"
            )
        if config.accumulate > 1:
            raise TrainInputError(
                "--overlap backward updates weights in each backward; leave --accumulate out, or give --overlap forward"
            )
        if config.optimizer == "muon":
            raise TrainInputError("--overlap backward is for one optimizer, and --optimizer muon is two; leave one out")
    if config.state_dtype != "float32" and config.optimizer in ("adafactor", "muon"):
        raise TrainInputError(f"--state-dtype is float32 with --optimizer {config.optimizer}; leave it out")
    fraction = config.device_fraction
    if fraction is None:
        return
    if fraction != "auto" and not 0 <= float(fraction) <= 1:
        raise TrainInputError(f"--device-fraction is {fraction}; give 0 to 1, or auto")
    if config.compare_plain:
        raise TrainInputError("--compare-plain is for updates in host memory; leave --device-fraction out")


def _check_pairs(config: "TrainConfig") -> None:
    if config.compare_plain and (config.param_dtype or config.grad_dtype):
        raise TrainInputError(
            "--compare-plain is for weights in their own dtype; leave --param-dtype, --grad-dtype out"
        )
    if config.disk is not None and config.model is not None and config.dtype is not None:
        raise TrainInputError(
            f"--disk reads the weights in {config.model} in place, in the dtype that they have; leave --dtype out, "
            "or save the model in that dtype first"
        )
    output, scalars = config.output, config.tensorboard
    if output is not None and scalars is not None and output.absolute() == scalars.absolute():
        raise TrainInputError(f"--tensorboard and --output are both {output}; give --tensorboard {output / 'scalars'}")
    if config.lora_rank is not None and config.model is None:
        raise TrainInputError("--lora-rank adapts a model that is trained already; name one with --model")


def named_values(name: str, given: Iterable[str]) -> dict[str, Any]:
    """Settings given as NAME=VALUE; a value is a Python literal such as 4, 0.5 or True, else text."""
    values: dict[str, Any] = {}
    for each in given:
        key, equals, text = each.partition("=")
        if not (equals and key.isidentifier()):
            raise TrainInputError(f"{flag(name)} {each}: give NAME=VALUE")
        try:
            values[key] = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
        except (ValueError, SyntaxError):
            values[key] = text
    return values
