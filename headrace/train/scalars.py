"""What does TensorBoard see of a training run? Loss, speed, stalls and bytes by tier, one point for each step."""

from pathlib import Path

from headrace.errors import TrainInputError
from headrace.train.evaluation import Evaluation
from headrace.train.progress import Progress, StepRecord


class ScalarProgress(Progress):
    """Passes everything on to `progress`, and writes each step's numbers to `directory`."""

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

    def evaluation(self, measured: Evaluation) -> None:
        self._progress.evaluation(measured)
        self._writer.add_scalar("headrace/evaluation loss", measured.loss, measured.step)
        self._writer.add_scalar("headrace/perplexity", measured.perplexity, measured.step)

    def close(self) -> None:
        self._progress.close()
        self._writer.close()
