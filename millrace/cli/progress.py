"""How is a run shown while it goes on? A bar in a terminal, a line now and then anywhere else."""

import sys
from typing import NoReturn

from tqdm import tqdm

from millrace.config import format_bytes
from millrace.train.progress import StepRecord

LINES = 12  # that a whole run prints where there is no terminal


def describe(record: StepRecord) -> str:
    """Loss, speed, bytes in each tier, and the share of the step in which compute waited."""
    parts = [f"loss {record.loss:.4f}", f"{record.tokens / record.seconds:,.0f} tokens/s"]
    for tier, held_bytes in (
        ("device", record.device_bytes),
        ("host", record.host_bytes),
        ("disk", record.disk_bytes),
    ):
        if held_bytes:
            parts.append(f"{tier} {format_bytes(held_bytes)}")
    if record.stall_seconds is not None:
        parts.append(f"stall {record.stall_seconds / record.seconds:.0%}")
    return ", ".join(parts)


class LineProgress:
    """About `LINES` lines for the whole run, the first and the last step among them."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def step(self, record: StepRecord) -> None:
        if record.step in (1, record.steps) or record.step % max(1, record.steps // LINES) == 0:
            self.note(f"step {record.step}/{record.steps}: {describe(record)}")

    def close(self) -> None:
        pass


class BarProgress:
    def __init__(self) -> None:
        self._bar: tqdm[NoReturn] | None = None

    def note(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def step(self, record: StepRecord) -> None:
        bar: tqdm[NoReturn] = self._bar or tqdm(total=record.steps, unit="step", dynamic_ncols=True)
        bar.set_postfix_str(describe(record), refresh=False)
        bar.update(1)
        self._bar = bar

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
