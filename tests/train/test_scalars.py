"""Does TensorBoard get each step's numbers?"""

import math
from pathlib import Path

import pytest

from headrace.train.evaluation import Evaluation
from headrace.train.progress import ScalarProgress, StepRecord


class Listener:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def note(self, text: str) -> None:
        self.heard.append(text)

    def step(self, record: StepRecord) -> None:
        self.heard.append(record.step)

    def evaluation(self, measured: Evaluation) -> None:
        self.heard.append(measured)

    def close(self) -> None:
        self.heard.append("closed")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_step_is_a_point_and_the_other_progress_hears_it_too(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    listener = Listener()
    progress = ScalarProgress(listener, tmp_path)
    progress.note("begins")
    for step in (1, 2):
        progress.step(StepRecord(step=step, steps=2, loss=4.0 / step, tokens=100, seconds=0.5, device_bytes=7))
    measured = Evaluation(step=2, loss=1.0)
    progress.evaluation(measured)
    progress.close()
    assert listener.heard == ["begins", 1, 2, measured, "closed"]
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [point.value for point in events.Scalars("headrace/loss")] == [4.0, 2.0]
    assert [point.value for point in events.Scalars("headrace/tokens per second")] == [200.0, 200.0]
    assert [point.step for point in events.Scalars("headrace/device bytes, peak")] == [1, 2]
    assert [point.value for point in events.Scalars("headrace/perplexity")] == [pytest.approx(math.e)]
    assert "headrace/stall seconds" not in events.Tags()["scalars"]  # not measured, so not shown
