"""How does a run look while it goes on, in a terminal and in a log?"""

import pytest

from headrace.train.evaluation import Evaluation
from headrace.train.progress import LINES, BarProgress, LineProgress, StepRecord, describe

PLAIN = StepRecord(step=1, steps=1, loss=2.5, tokens=1000, seconds=0.5)
OFFLOADED = StepRecord(
    step=2,
    steps=100,
    loss=2.5,
    tokens=1000,
    seconds=0.5,
    device_bytes=3 << 20,
    host_bytes=5 << 20,
    disk_bytes=0,
    stall_seconds=0.05,
)


def test_a_step_is_described_by_loss_speed_bytes_of_each_tier_and_stall():
    assert describe(PLAIN) == "loss 2.5000, 2,000 tokens/s"
    assert describe(OFFLOADED) == "loss 2.5000, 2,000 tokens/s, device 3 MiB, host 5 MiB, stall 10%"


def test_a_terminal_shows_a_bar(capsys: pytest.CaptureFixture[str]):
    progress = BarProgress()
    progress.note("about to begin")
    progress.step(PLAIN)
    progress.step(OFFLOADED)
    progress.close()
    shown = capsys.readouterr().err
    assert "about to begin\n" in shown
    assert "stall 10%" in shown


def test_a_log_tells_how_long_the_rest_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    now = iter([0.0, 30.0, 60.0, 90.0])
    monkeypatch.setattr("headrace.train.progress.time.monotonic", lambda: next(now))
    progress = LineProgress()
    for step in range(11, 15):  # the first of a run that goes on
        progress.step(StepRecord(step=step, steps=14, loss=1.0, tokens=1, seconds=1.0))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("tokens/s")[2] for line in lines] == ["", ", 01:00 left", ", 00:30 left", ""]


def test_evaluations_are_told(capsys: pytest.CaptureFixture[str]):
    for progress in (LineProgress(), BarProgress()):
        progress.evaluation(Evaluation(step=20, loss=2.0))
        assert "evaluation after step 20: loss 2.0000, perplexity 7.39\n" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [1, 5, 1000])
def test_a_log_gets_few_lines_with_the_first_and_the_last_step(capsys: pytest.CaptureFixture[str], steps: int):
    progress = LineProgress()
    for step in range(1, steps + 1):
        progress.step(StepRecord(step=step, steps=steps, loss=1.0, tokens=1, seconds=1.0))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= LINES + 2
    assert lines[0].startswith(f"step 1/{steps}:")
    assert lines[-1].startswith(f"step {steps}/{steps}:")
