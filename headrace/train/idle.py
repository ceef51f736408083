"""Which flags would do nothing beside the others? They are refused: none is taken without a word."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import TrainInputError
from headrace.train.settings import declared, flag

if TYPE_CHECKING:
    from headrace.train.config import TrainConfig

__all__ = ["not_default", "refuse_idle"]

_VISITING = ("device_memory", "host_memory", "blocks", "resident", "prefetch", "param_dtype", "grad_dtype")


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """Where `holds`, settings of these names do nothing; `says` why, of {flags} that {do} not."""

    names: Sequence[str]
    holds: Callable[["TrainConfig"], bool]
    says: str


_RULES = (
    _Rule(
        names=(
            *_VISITING,
            "micro_batches_together",
            "disk",
            "offload_activations",
            "optimizer_tier",
            "overlap",
            "device_fraction",
            "overlap_d2h_h2d",
            "compare_plain",
        ),
        holds=lambda config: config.plain,
        says="--plain trains without headrace, so {flags} {do} not apply; leave either side out",
    ),
    _Rule(
        names=(*_VISITING, "micro_batches_together", "overlap"),
        holds=lambda config: config.device_fraction is not None,
        says="--device-fraction is for weights that stay on the device, so {flags} {do} not apply; leave either side"
        " out",
    ),
    _Rule(
        names=("overlap_d2h_h2d",),
        holds=lambda config: config.device_fraction is None,
        says="{flags} {do} nothing without --device-fraction; give that too, or leave it out",
    ),
    _Rule(
        names=("micro_batches_together",),
        holds=lambda config: config.accumulate == 1,
        says="{flags} {do} nothing for one micro-batch in a step; give --accumulate, too, or leave it out",
    ),
    _Rule(
        names=("layers", "hidden_size"),
        holds=lambda config: config.model is not None,
        says="--model names a model that has its own sizes, so {flags} of the small Llama {do} not apply; leave either"
        " side out",
    ),
    _Rule(
        names=("lora_alpha", "lora_dropout", "lora_targets"),
        holds=lambda config: config.lora_rank is None,
        says="{flags} {do} nothing without --lora-rank, which adds the adapters; give that too, such as --lora-rank 16",
    ),
    _Rule(
        names=("epochs",),
        holds=lambda config: config.steps is not None,
        says="--steps and {flags} both say how long the run is; leave one of them out",
    ),
    _Rule(
        names=("eval_every",),
        holds=lambda config: not config.eval_text,
        says="{flags} needs something to measure on; name it with --eval-text",
    ),
)


def not_default(config: "TrainConfig") -> list[str]:
    """The settings that are not what they are by themselves."""
    return [about.name for about in declared(type(config)) if getattr(config, about.name) != about.default]


def refuse_idle(config: "TrainConfig", given: Iterable[str]) -> None:
    """Raises TrainInputError for the first of the settings `given` that does nothing beside the others."""
    given = list(given)
    for rule in _RULES:
        idle = [flag(name) for name in rule.names if name in given]
        if idle and rule.holds(config):
            raise TrainInputError(rule.says.format(flags=", ".join(idle), do="do" if len(idle) > 1 else "does"))
