"""In which order does a training run do its work? Check, read, compare with plain PyTorch, train, save."""

import copy
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

import millrace
from millrace.config import format_bytes
from millrace.errors import MillraceError
from millrace.memory.disk import Checkpoint
from millrace.report import Report
from millrace.train.config import TrainConfig, TrainInputError
from millrace.train.model import Tokens, check_vocabulary, load_model, load_tokens, weight_bytes
from millrace.train.progress import Progress, StepRecord
from millrace.train.run import PlainRun, Run
from millrace.train.stop import StopRequest, stop_on_signals
from millrace.train.text import Windows, find_text_files, read_tokens


class TrainingFailedError(MillraceError, RuntimeError):
    """Training ran and its result is worth nothing: the loss is not a number, or differs from the plain run's."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run did. `stats` and `report` are None for a plain run; `stopped`: it ended early, on request."""

    losses: tuple[float, ...]
    plain_losses: tuple[float, ...]
    tokens: int
    seconds: float
    weight_bytes: int
    stats: millrace.Stats | None
    report: Report | None
    stopped: bool


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a run needs, read and checked."""

    config: TrainConfig
    device: torch.device
    tokens: Tokens
    windows: Windows
    model: PreTrainedModel
    checkpoint: Checkpoint | None  # the files that its weights are mapped from
    weight_bytes: int
    steps: int


def train(config: TrainConfig, progress: Progress) -> TrainResult:
    """Trains as `config` says, writes the model and its tokenizer to `config.output`, and tells `progress`.

    Raises TrainInputError before training for input that cannot be used, BudgetError when the model does not fit the
    budgets, and TrainingFailedError when the loss is not finite or differs from the plain run's.
    """
    job = _read(config, progress)
    with stop_on_signals(progress.note) as stop:
        plain_losses = _plain_losses(job, progress, stop)
        if stop.requested:
            raise TrainingFailedError("stopped before the first step; nothing was saved")
        result = _train(job, plain_losses, progress, stop)
        _save(job, result)
    return result


def _read(config: TrainConfig, progress: Progress) -> Job:
    _check_output(config)
    device = config.compute_device()
    files = find_text_files(config)
    tokens = load_tokens(config)
    token_ids = read_tokens(files, tokens)
    windows = Windows(token_ids, length=config.sequence_length, seed=config.seed)
    model, checkpoint = load_model(config)
    check_vocabulary(model, token_ids)
    _check_comparable(config, model)
    steps = config.steps or max(1, int(len(windows) * config.epochs) // (config.batch_size * config.accumulate))
    job = Job(
        config=config,
        device=device,
        tokens=tokens,
        windows=windows,
        model=model,
        checkpoint=checkpoint,
        weight_bytes=weight_bytes(model),
        steps=steps,
    )
    _make_output(config)
    progress.note(
        f"{type(model).__name__}, {format_bytes(job.weight_bytes)} of weights, on {device}: "
        f"{len(files)} files, {len(token_ids):,} tokens, {steps} steps"
    )
    return job


def _plain_losses(job: Job, progress: Progress, stop: StopRequest) -> list[float]:
    """The losses of the first `config.compare_plain` steps of plain PyTorch, on a copy of the model."""
    if job.config.compare_plain == 0:
        return []
    progress.note(f"the first {job.config.compare_plain} steps without millrace, to compare with")
    torch.manual_seed(job.config.seed)
    run = PlainRun(copy.deepcopy(job.model), job.config, job.device)
    losses: list[float] = []
    for batches in itertools.islice(_steps_of(job), job.config.compare_plain):
        if stop.requested:
            break
        losses.append(run.step(batches))
    return losses


def _train(job: Job, plain_losses: Sequence[float], progress: Progress, stop: StopRequest) -> TrainResult:
    handle = None if job.config.plain else _offload(job)
    torch.manual_seed(job.config.seed)
    run = (Run if handle else PlainRun)(job.model, job.config, job.device)
    losses: list[float] = []
    stats = handle.stats() if handle else None
    started = time.monotonic()
    for batches in itertools.islice(_steps_of(job), job.steps):
        if stop.requested:
            break
        step_started, before = time.monotonic(), stats
        losses.append(run.step(batches))
        record = StepRecord(
            step=len(losses),
            steps=job.steps,
            loss=losses[-1],
            tokens=sum(batch.numel() for batch in batches),
            seconds=time.monotonic() - step_started,
        )
        if handle is not None and before is not None:
            stats = handle.stats()
            record = _with_tiers(record, before, stats)
        progress.step(record)
        _check_loss(losses, plain_losses)
    seconds = time.monotonic() - started
    progress.close()
    result = TrainResult(
        losses=tuple(losses),
        plain_losses=tuple(plain_losses),
        tokens=len(losses) * job.config.batch_size * job.config.accumulate * job.config.sequence_length,
        seconds=seconds,
        weight_bytes=job.weight_bytes,
        stats=stats,
        report=handle.report() if handle else None,
        stopped=stop.requested,
    )
    if handle:
        handle.remove()
    return result


def _with_tiers(record: StepRecord, before: millrace.Stats, after: millrace.Stats) -> StepRecord:
    return dataclasses.replace(
        record,
        device_bytes=after.device_peak_bytes,
        host_bytes=after.host_bytes,
        disk_bytes=after.disk_bytes,
        stall_seconds=after.stall_seconds - before.stall_seconds,
    )


def _offload(job: Job) -> millrace.Offloaded:
    return millrace.offload(
        job.model,
        device=job.device,
        device_memory=job.config.budget_bytes("device_memory", weight_bytes=job.weight_bytes),
        host_memory=job.config.budget_bytes("host_memory", weight_bytes=job.weight_bytes),
        disk=None if job.config.disk is None else job.config.disk / "weights",
        checkpoint=job.checkpoint,
    )


def _steps_of(job: Job) -> Iterator[list[torch.Tensor]]:
    """The micro-batches of each step, without end."""
    batches = job.windows.batches(job.config.batch_size)
    while True:
        yield list(itertools.islice(batches, job.config.accumulate))


def _check_loss(losses: Sequence[float], plain_losses: Sequence[float]) -> None:
    """Raises TrainingFailedError when the last loss is not finite, or is not the plain run's to the last bit."""
    step, loss = len(losses), losses[-1]
    if step <= len(plain_losses) and loss.hex() != plain_losses[step - 1].hex():
        raise TrainingFailedError(
            f"the loss of step {step} is {loss!r}, but {plain_losses[step - 1]!r} without millrace: "
            "this is a defect of millrace; please report it with the command line"
        )
    if not math.isfinite(loss):
        raise TrainingFailedError(f"the loss of step {step} is {loss}; nothing was saved; try a lower --learning-rate")


def _check_output(config: TrainConfig) -> None:
    if config.output.is_dir() and any(config.output.iterdir()):
        raise TrainInputError(f"output directory {config.output} is not empty; name another, or empty it")


def _check_comparable(config: TrainConfig, model: PreTrainedModel) -> None:
    low = {parameter.dtype for parameter in model.parameters()} - {torch.float32}
    if config.compare_plain and config.disk is not None and low:
        raise TrainInputError(
            f"--compare-plain with --disk needs weights of float32: for {low.pop()} the optimizer on disk keeps exact "
            "float32 masters, which PyTorch's does not; leave one of the options out"
        )


def _make_output(config: TrainConfig) -> None:
    """Makes the output directory, before hours are spent on what cannot be written."""
    try:
        config.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainInputError(
            f"output directory {config.output} cannot be made: {error.strerror}; name another"
        ) from error


def _save(job: Job, result: TrainResult) -> None:
    output = job.config.output
    job.model.save_pretrained(output)
    job.tokens.tokenizer.save_pretrained(output)
    if result.report is not None:
        result.report.save(output / "millrace-run.json")
    summary = {
        "settings": dataclasses.asdict(job.config),
        **dataclasses.asdict(dataclasses.replace(result, report=None)),
    }
    (output / "training.json").write_text(json.dumps(summary, indent=2, default=str) + "\n")
