"""What does a training run tell, and how is it shown? By a bar or by lines, and in TensorBoard."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from headrace.config import format_bytes
from headrace.errors import TrainInputError

if TYPE_CHECKING:
    from headrace.train.evaluation import Evaluation

LINES = 12  # a whole run prints about this many without a terminal


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step as measured. Bytes of a tier are None when headrace does not manage that tier."""

    step: int  # 1 for the first
    steps: int
    loss: float
    tokens: int
    seconds: float
    device_bytes: int | None = None  # the peak so far, of managed weights
    host_bytes: int | None = None
    disk_bytes: int | None = None
    stall_seconds: float | None = None  # of this step


class Progress:
    """Receives what a run tells, and shows nothing. Ranks other than the first use this base class itself."""

    def note(self, text: str) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        pass

    def evaluation(self, measured: "Evaluation") -> None:
        self.note(str(measured))

    def close(self) -> None:
        pass


def describe(record: StepRecord) -> str:
    """Loss, speed, bytes in each tier, and the share of the step in which compute waited."""
    parts = [f"loss {record.loss:.4f}", f"{record.tokens / record.seconds:,.0f} tokens/s"]
    held = {"device": record.device_bytes, "host": record.host_bytes, "disk": record.disk_bytes}
    parts += [f"{tier} {format_bytes(nbytes)}" for tier, nbytes in held.items() if nbytes]
    if record.stall_seconds is not None:
        parts.append(f"stall {record.stall_seconds / record.seconds:.0%}")
    return ", ".join(parts)


class LineProgress(Progress):
    """About `LINES` lines for the whole run, the first and the last step among them."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None  # the first step, and when it ended

    def note(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def step(self, record: StepRecord) -> None:
        if self._first is None or record.step == record.steps or record.step % max(1, record.steps // LINES) == 0:
            self.note(f"step {record.step}/{record.steps}: {describe(record)}{self._rest(record)}")

    def _rest(self, record: StepRecord) -> str:
        """How long the rest will take, estimated from the steps after the first, which is slower than the others."""
        if self._first is None:
            self._first = record.step, time.monotonic()
        step, ended = self._first
        if not step < record.step < record.steps:
            return ""
        seconds = (time.monotonic() - ended) / (record.step - step) * (record.steps - record.step)
        return f", {tqdm.format_interval(seconds)} left"


class BarProgress(Progress):
    def __init__(self) -> None:
        self._bar: tqdm[NoReturn] | None = None

    def note(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def step(self, record: StepRecord) -> None:
        bar: tqdm[NoReturn] = self._bar or tqdm(
            total=record.steps, initial=record.step - 1, unit="step", dynamic_ncols=True
        )
        bar.set_postfix_str(describe(record), refresh=False)
        bar.update(1)
        self._bar = bar

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class ScalarProgress(Progress):
    """Passes everything on to `progress`, and writes each step's numbers for TensorBoard to `directory`."""

    def __init__(self, progress: Progress, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise TrainInputError(f"{error.name} is not installed; run: pip install tensorboard") from error
        self._progress = progress
        self._writer = SummaryWriter(str(directory))

    def note(self, text: str) -> None:
        self._progress.note(text)

    def step(self, record: StepRecord) -> None:
        self._progress.step(record)
        scalars = {
            "loss": record.loss,
            "tokens per second": record.tokens / record.seconds if record.seconds else 0.0,
            "seconds": record.seconds,
            "stall seconds": record.stall_seconds,
            "device bytes, peak": record.device_bytes,
            "host bytes": record.host_bytes,
            "disk bytes": record.disk_bytes,
        }
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(f"headrace/{name}", value, record.step)

    def evaluation(self, measured: "Evaluation") -> None:
        self._progress.evaluation(measured)
        self._writer.add_scalar("headrace/evaluation loss", measured.loss, measured.step)
        self._writer.add_scalar("headrace/perplexity", measured.perplexity, measured.step)

    def close(self) -> None:
        self._progress.close()
        self._writer.close()
