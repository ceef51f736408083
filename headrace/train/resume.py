"""How does an interrupted run go on as if nothing had happened? From a checkpoint, with the settings it began with."""

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import headrace
from headrace.checkpoint import newest
from headrace.errors import TrainInputError
from headrace.optim.optimizer import HostOptimizer
from headrace.train.config import TrainConfig, flag
from headrace.train.data import Batches
from headrace.train.evaluation import Evaluation
from headrace.train.ranks import World
from headrace.train.run import Run

FINISHED = "training.json"  # in the output directory, once the model is saved
_TERMS = "run.json"  # beside the checkpoints
# Settings whose value changes no bit of the result, or is compared by what follows from it, which `Terms` has.
_MAY_DIFFER = {
    *("text", "include", "exclude", "model", "output", "device", "device_memory", "host_memory", "disk", "blocks"),
    *("resident", "prefetch", "gradient_checkpointing", "micro_batches_together", "offload_activations"),
    *("optimizer_tier", "overlap", "device_fraction", "steps", "epochs", "compare_plain", "eval_text", "eval_every"),
    *("save_every", "keep", "resume", "tensorboard"),
}
_KEPT = {"checkpoints", "best", "best.new"}  # what an interrupted run leaves in its output directory


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What determines the result: settings, the contents of model and data, and the steps after which a schedule ends.

    `eval_data` decides which model is the best, and `model` is None before it is known.
    """

    settings: dict[str, Any]
    data: str
    steps: int | None
    eval_data: str | None
    model: str | None = None

    @staticmethod
    def of(config: TrainConfig, device: torch.device, *, data: str, eval_data: str | None, steps: int) -> "Terms":
        deciding = {name: value for name, value in vars(config).items() if name not in _MAY_DIFFER}
        deciding["device"] = device.type  # kernels of each type round in their own way
        deciding["device_fraction"] = 0.0 if device.type == "cpu" else config.device_fraction or 0.0
        plain = json.loads(json.dumps(deciding, default=str))  # as reading them from a file gives them
        ends = None if config.schedule == "constant" else steps
        return Terms(settings=plain, data=data, eval_data=eval_data, steps=ends)


@dataclass(kw_only=True)
class Past:
    """What a run has measured so far."""

    losses: list[float] = dataclasses.field(default_factory=list)
    plain_losses: list[float] = dataclasses.field(default_factory=list)
    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)


def find_checkpoint(config: TrainConfig) -> Path | None:
    """The checkpoint from which the run goes on; None when it begins anew.

    Raises TrainInputError if `config.resume` asks for a checkpoint and there is none, and for an output directory that
    holds anything but an interrupted run.
    """
    output = config.output
    finished = (output / FINISHED).exists()
    if isinstance(config.resume, Path):
        directory = config.resume
        checkpoint = directory if (directory.parent / _TERMS).is_file() else _newest(directory)
    else:
        directory, checkpoint = output, _newest(output)
    if config.resume is not None and checkpoint is None:
        raise TrainInputError(f"--resume: {directory} has no whole checkpoint; leave it out to begin anew")
    kept = set(_KEPT)
    if config.tensorboard is not None and config.tensorboard.resolve().is_relative_to(output.resolve()):
        kept.add(config.tensorboard.resolve().relative_to(output.resolve()).parts[0])
    others = output.is_dir() and {path.name for path in output.iterdir()} - kept
    own = config.resume is not None and checkpoint is not None and checkpoint.is_relative_to(output)
    if others and not own and (finished or checkpoint is None):
        if finished and checkpoint is not None:
            raise TrainInputError(
                f"output directory {output} is not empty: it holds a finished run, which --resume with more --steps"
                " goes on with; name another for a new run"
            )
        raise TrainInputError(f"output directory {output} is not empty; name another, or empty it")
    return checkpoint


def _newest(directory: Path) -> Path | None:
    for place in (directory / "checkpoints", directory):
        if (place / _TERMS).is_file():
            return newest(place)
    return None


def _read_terms(checkpoint: Path) -> Terms:
    """The terms of the run that wrote the checkpoint."""
    file = checkpoint.parent / _TERMS
    try:
        return Terms(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise TrainInputError(f"{file}, which tells how the run began, cannot be read: {error}") from error


def check_terms(checkpoint: Path, terms: Terms) -> None:
    """Raises TrainInputError, naming what differs, if the terms are not those with which the run began."""
    before = _read_terms(checkpoint)
    differing = [
        f"{flag(name)} was {_shown(before.settings.get(name))} and is {_shown(value)}"
        for name, value in terms.settings.items()
        if before.settings.get(name) != value
    ]
    if before.steps != terms.steps and not differing:
        differing.append(f"--steps was {before.steps} and is {terms.steps}")
    if not differing and before.data != terms.data:
        differing.append("the data of --text is not what it was")
    if not differing and terms.model is not None and before.model != terms.model:
        differing.append("the model of --model is not what it was")
    if differing:
        raise TrainInputError(
            f"{checkpoint} is of a run that would end otherwise: {'; '.join(differing)}; give what it was, or another"
            " --output to begin anew"
        )


def tell_changes(checkpoint: Path, terms: Terms, past: Past, note: Callable[[str], None]) -> None:
    """Notes differences that are allowed, and their consequences. Drops evaluations on other text from `past`."""
    if _read_terms(checkpoint).eval_data not in (None, terms.eval_data):
        now = "was given and is not" if terms.eval_data is None else "is not what it was"
        note(f"--eval-text {now}: what was measured before does not count for OUTPUT/best any more")
        past.evaluations.clear()
    if terms.settings["device_fraction"] == "auto":
        note("--device-fraction auto is measured anew, and may change the last bits of what follows; a number does not")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "not given"
    return "not given" if value is None else str(value)


def name_of(past: Past) -> str:
    return f"step-{len(past.losses):08}"


def save_checkpoint(
    config: TrainConfig, terms: Terms, run: Run, batches: Batches, world: World, past: Past
) -> headrace.Saving | None:
    """Saves all that determines the rest of the run, in a directory that appears as a whole or not at all.

    A single process trains on while it is written. Of several ranks, the first writes it all while the others wait.
    """
    if isinstance(run.optimizer, HostOptimizer):
        run.optimizer.consolidate_state_dict(to=0)  # of the state that is dealt out to the ranks
    path = config.checkpoints / name_of(past)
    with world.as_one(f"save {path}"):
        if not world.is_first:
            return None
        config.checkpoints.mkdir(parents=True, exist_ok=True)
        new = config.checkpoints / "run.new"
        new.write_text(json.dumps(dataclasses.asdict(terms), indent=2) + "\n")
        os.replace(new, config.checkpoints / _TERMS)
        return headrace.save(
            path,
            run.model,
            run.optimizer,
            extra={"run": run, "data": batches, "past": dataclasses.asdict(past)},
            keep=config.keep,
            wait=world.count > 1,  # other ranks' updates do not wait until they have been read
        )


def load_checkpoint(checkpoint: Path, run: Run, batches: Batches) -> Past:
    """Restores what `save_checkpoint` saved. It sets random numbers, so it comes last before training goes on."""
    extra = headrace.load(checkpoint, run.model, run.optimizer)
    run.load_state_dict(extra["run"])
    batches.load_state_dict(extra["data"])
    past = Past(**extra["past"])
    past.evaluations = [Evaluation(**evaluation) for evaluation in extra["past"]["evaluations"]]
    return past
