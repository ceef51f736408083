"""What does a training run tell whoever watches it? Notes, and one record for each step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.train.evaluation import Evaluation


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
        pass

    def close(self) -> None:
        pass
