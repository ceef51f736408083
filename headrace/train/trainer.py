"""In which order does a training run do its work? Check, read, compare with plain PyTorch, train, save."""

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import headrace
from headrace.checkpoint.directory import exchange
from headrace.config import counted, format_bytes
from headrace.errors import HeadraceError, TrainingFailedError, TrainInputError
from headrace.report import Report
from headrace.train import resume
from headrace.train.config import TrainConfig
from headrace.train.data import Batch, Batches, read_sequences
from headrace.train.evaluation import evaluate
from headrace.train.model import check_vocabulary, load_model, tokenizer_of
from headrace.train.out_of_memory import explained
from headrace.train.placement import place
from headrace.train.progress import Progress, StepRecord
from headrace.train.ranks import World, joined
from headrace.train.resume import Past
from headrace.train.run import PlainRun, Run, Together, set_seed
from headrace.train.stop import stop_on_signals


@dataclass(kw_only=True)
class TrainResult(Past):
    """What a run did, the time before an interruption included; `tokens` and `seconds` count from the last start.
    `stats` and `report` are None if headrace moved no weights. `checkpoint`: where a stopped run can go on from."""

    tokens: int
    seconds: float
    weight_bytes: int
    stats: headrace.Stats | None
    report: Report | None
    checkpoint: Path | None


def train(config: TrainConfig, progress: Progress) -> TrainResult:
    """Trains as `config` says, writes the model and its tokenizer to `config.output`, and reports to `progress`.

    Goes on where an interrupted run with the same settings left off. When it is asked to stop, it leaves a checkpoint,
    but no model.

    Raises TrainInputError before training for input that cannot be used, OutOfMemoryError when a tier has no room, and
    TrainingFailedError when the loss is not finite or differs from the plain run's.
    """
    with explained(config), joined(config) as world:
        job = Job(config, world, progress)
        with stop_on_signals(progress.note) as stop:
            past = Past()
            if job.begins_at is None:
                past.plain_losses.extend(world.told(_plain_losses(job, progress, stop)))
            if world.any(stop.is_set()):
                raise TrainingFailedError("stopped before the first step; nothing was saved")
            result = _train(job, past, progress, stop)
            if result.checkpoint is None and world.is_first:
                _save(job, result)
    return result


class Job:
    """Everything that a run needs, read and checked. Raises TrainInputError for what cannot be used."""

    def __init__(self, config: TrainConfig, world: World, progress: Progress) -> None:
        self.config, self.world = config, world
        self.begins_at = resume.find_checkpoint(config)  # the checkpoint from which it goes on; None: it begins anew
        if (first := world.told(self.begins_at)) != self.begins_at:
            raise TrainInputError(
                f"rank {world.own} sees {self.begins_at or 'no checkpoint'} where rank 0 sees {first or 'none'}; put"
                " --output where all nodes see the same files"
            )
        if world.device.type == "cpu" and config.device_fraction:
            progress.note("--device-fraction: the device is the CPU, so all state is in host memory")
        with world.first_alone():  # the others then find what it has cached
            self.tokenizer = tokenizer_of(config)
            self.sequences = read_sequences(config, self.tokenizer, "text", progress.note)
            self.eval_sequences = (
                read_sequences(config, self.tokenizer, "eval_text", progress.note) if config.eval_text else None
            )
        self.steps = config.steps or self.batches().steps(config.epochs)
        eval_data = None if self.eval_sequences is None else self.eval_sequences.digest()
        terms = resume.Terms.of(
            config, world.device, data=self.sequences.digest(), eval_data=eval_data, steps=self.steps
        )
        if self.begins_at is not None:
            resume.check_terms(self.begins_at, terms)  # before a model is loaded
        self.loaded = load_model(config)
        self.terms = dataclasses.replace(terms, model=self.loaded.digest)
        if self.begins_at is not None:
            resume.check_terms(self.begins_at, self.terms)
        for each in (self.sequences, self.eval_sequences):
            if each is not None:
                check_vocabulary(self.loaded.model, each.largest_token)
        _make_output(config)
        progress.note(
            f"{type(self.loaded.model).__name__}, {format_bytes(self.loaded.weight_bytes)} of weights, on"
            f" {world.device}: {counted(self.sequences.files, 'file')}, {counted(self.sequences.tokens, 'token')},"
            f" {counted(self.steps, 'step')}"
        )
        if self.begins_at is not None:
            progress.note(f"going on from {self.begins_at}")

    def batches(self) -> Batches:
        """The micro-batches of all steps, from the first one on."""
        config = self.config
        return Batches(self.sequences, batch_size=config.batch_size, accumulate=config.accumulate, seed=config.seed)

    def save_model(self, directory: Path) -> None:
        self.loaded.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


def _plain_losses(job: Job, progress: Progress, stop: threading.Event) -> list[float]:
    """The losses of the first `config.compare_plain` steps in plain PyTorch, with a copy of the model."""
    if job.config.compare_plain == 0 or not job.world.is_first:
        return []
    progress.note(f"the first {counted(job.config.compare_plain, 'step')} without headrace, to compare with")
    set_seed(job.config.seed)
    run = PlainRun(copy.deepcopy(job.loaded.model), job.config, World(job.world.device), steps=job.steps)
    losses: list[float] = []
    for batches in itertools.islice(job.batches(), job.config.compare_plain):
        if stop.is_set():
            break
        losses.append(run.step(batches))
    return losses


def _train(job: Job, past: Past, progress: Progress, stop: threading.Event) -> TrainResult:
    config, world = job.config, job.world
    handle = place(job.loaded, config, world)
    saving: headrace.Saving | None = None
    try:
        set_seed(config.seed)
        run = Run(job.loaded.model, config, world, steps=job.steps, together=_together(handle, config))
        batches = job.batches()
        save = partial(resume.save_checkpoint, config, job.terms, run, batches, world)
        if job.begins_at is not None:
            past = resume.load_checkpoint(job.begins_at, run, batches)
            resume.tell_changes(job.begins_at, job.terms, past, progress.note)
        meter = _Meter(job, handle)
        steps = iter(batches)
        stopped = len(past.losses) < job.steps and world.any(stop.is_set())
        if stopped and config.checkpoints / resume.name_of(past) != job.begins_at:
            saving = save(past)
        while not stopped and len(past.losses) < job.steps:
            micro_batches, started = next(steps), time.monotonic()
            past.losses.append(run.step(micro_batches))
            progress.step(meter.record(past, micro_batches, time.monotonic() - started))
            _check_loss(past)
            if _evaluate(job, run, past, progress):
                meter.leave_out()
            stopped = len(past.losses) < job.steps and world.any(stop.is_set())
            if stopped or (config.save_every and len(past.losses) % config.save_every == 0):
                saving = save(past)
        if saving is not None:
            saving.wait()
        progress.close()
        result = TrainResult(
            **vars(past),
            tokens=meter.tokens,
            seconds=meter.seconds,
            weight_bytes=job.loaded.weight_bytes,
            stats=None if handle is None else handle.stats(),
            report=None if handle is None else handle.report(),
            checkpoint=config.checkpoints / resume.name_of(past) if stopped else None,
        )
        if handle is not None:
            handle.remove()
        world.wait()  # all ranks finish their updates before one saves the weights
        return result
    except BaseException:
        with contextlib.suppress(HeadraceError):  # in case the drive failed
            if saving is not None:
                saving.wait()
        with contextlib.suppress(HeadraceError):  # in case a pass was broken off
            if handle is not None:
                handle.remove()
        raise


def _together(handle: headrace.Offloaded | None, config: TrainConfig) -> Together | None:
    """What takes the micro-batches of a step through each block together; None if they go one after another."""
    if handle is None or config.micro_batches_together is None:
        return None
    count = None if config.micro_batches_together == "all" else config.micro_batches_together
    return partial(handle.forward_backward, together=count)


class _Meter:
    """Counts tokens, time and bytes of a run since it was started or resumed."""

    def __init__(self, job: Job, handle: headrace.Offloaded | None) -> None:
        self._job = job
        self._handle = handle
        self._stalled_seconds = 0.0
        self.leave_out()
        self.tokens = 0
        self.seconds = 0.0

    def leave_out(self) -> None:
        """Leaves out of the next record what headrace counted since the last step, because it was not training."""
        if self._handle is not None:
            self._stalled_seconds = self._handle.stats(wait_for_updates=False).stall_seconds

    def record(self, past: Past, batches: Sequence[Batch], seconds: float) -> StepRecord:
        step, tokens = len(past.losses), sum(batch["input_ids"].numel() for batch in batches)
        self.tokens += tokens
        self.seconds += seconds
        moved: dict[str, Any] = {}
        if self._handle is not None:
            stats, before = self._handle.stats(wait_for_updates=False), self._stalled_seconds
            self._stalled_seconds = stats.stall_seconds
            moved = {"device_bytes": stats.device_peak_bytes, "host_bytes": stats.host_bytes}
            moved |= {"disk_bytes": stats.disk_bytes, "stall_seconds": stats.stall_seconds - before}
        return StepRecord(
            step=step, steps=self._job.steps, loss=past.losses[-1], tokens=tokens, seconds=seconds, **moved
        )


def _check_loss(past: Past) -> None:
    """Raises TrainingFailedError if the last loss is not finite, or differs from the plain run's in any bit."""
    step, loss = len(past.losses), past.losses[-1]
    if step <= len(past.plain_losses) and loss.hex() != past.plain_losses[step - 1].hex():
        raise TrainingFailedError(
            f"the loss of step {step} is {loss!r}, but {past.plain_losses[step - 1]!r} without headrace: "
            "this is a defect of headrace; please report it with the command line"
        )
    if not math.isfinite(loss):
        raise TrainingFailedError(
            f"the loss of step {step} is {loss}; no model was saved; try a lower --learning-rate, with another --output"
        )


def _evaluate(job: Job, run: Run, past: Past, progress: Progress) -> bool:
    """Evaluates the model when it is due, and saves it as the best one if its loss is the lowest so far."""
    config, step = job.config, len(past.losses)
    if job.eval_sequences is None or (step < job.steps and (not config.eval_every or step % config.eval_every)):
        return False
    measured = evaluate(run, job.eval_sequences, job.world, batch_size=config.batch_size, step=step)
    progress.evaluation(measured)
    best = config.output / "best"
    with job.world.as_one(f"save {best}"):
        if job.world.is_first and all(measured.loss < other.loss for other in past.evaluations):
            new = config.output / "best.new"
            job.save_model(new)
            if best.exists():
                exchange(new, best)  # if the process is killed, one of them is whole
                shutil.rmtree(new, ignore_errors=True)
            else:
                new.rename(best)
    past.evaluations.append(measured)
    return True


def _make_output(config: TrainConfig) -> None:
    """Makes the output directory, before hours are spent on a model that cannot be written."""
    try:
        config.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainInputError(
            f"output directory {config.output} cannot be made: {error.strerror}; name another"
        ) from error


def _save(job: Job, result: TrainResult) -> None:
    output = job.config.output
    job.save_model(output)
    if result.report is not None:
        result.report.save(output / "headrace-run.json")
    summary: dict[str, Any] = {
        "settings": dataclasses.asdict(job.config),
        **dataclasses.asdict(dataclasses.replace(result, report=None)),
    }
    (output / resume.FINISHED).write_text(json.dumps(summary, indent=2, default=str) + "\n")
