"""Is a bar shown for what takes long, and can it be turned off as transformers' own can?"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.utils import logging

import headrace
from headrace.runtime import progress


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bars of small things show up at once."""
    monkeypatch.setattr(progress, "_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_LEAST_BYTES", 1)
    was_on = logging.is_progress_bar_enabled()  # a command that ran in this process turns them off
    logging.enable_progress_bar()
    yield
    if not was_on:
        logging.disable_progress_bar()


def run(directory: Path) -> None:
    """Offloads, saves and loads 2 MiB."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    with headrace.offload(model, device="cpu", device_memory="1MiB"):
        model(torch.ones(1, 256)).sum().backward()
        headrace.save(directory / "saved", model)
        headrace.load(directory / "saved", model)


def test_offloading_saving_and_loading_have_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    shown = capsys.readouterr().err
    for what in ("offloading", "saving", "reading"):
        assert f"headrace: {what}: 100%" in shown


@pytest.mark.parametrize("switch", ["transformers", "TQDM_DISABLE", "RANK"])
def test_bars_are_off(
    switch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if switch == "transformers":
        logging.disable_progress_bar()
    else:
        monkeypatch.setenv(switch, "1")
    run(tmp_path)
    assert "headrace: " not in capsys.readouterr().err


def test_what_is_quick_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_AFTER_SECONDS", 60.0)
    run(tmp_path)
    assert capsys.readouterr().err == ""
