"""Is the model measured rightly, and does training not notice?"""

import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.cli.main import main
from headrace.errors import TrainInputError
from headrace.train.config import TrainConfig
from headrace.train.evaluation import Evaluation
from headrace.train.progress import Progress
from headrace.train.trainer import train

Settings = Callable[..., TrainConfig]


@pytest.fixture
def eval_file(tmp_path: Path) -> Path:
    path = tmp_path / "eval.txt"
    path.write_text("".join(f"{number} plus 1 is {number + 1}.\n" for number in range(60)))
    return path


def measured(directory: Path, text: bytes, length: int) -> float:
    """The loss of a saved model on text of bytes, in windows, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = torch.tensor([*text, 256])
    windows = ids[: len(ids) // length * length].view(-1, length)
    with torch.no_grad():
        return float(model(input_ids=windows, labels=windows).loss)


@pytest.mark.parametrize("model_directory", ["gpt2"], indirect=True)
def test_training_is_the_same_with_evaluation_and_the_best_model_is_kept(
    settings: Settings,
    progress: Progress,
    tmp_path: Path,
    eval_file: Path,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    remove = shutil.rmtree

    def removed(path: Path, **settings: Any) -> None:
        remove(path, **settings)
        assert "best" not in Path(path).name or (tmp_path / "out" / "best").is_dir(), "one is there at any moment"

    monkeypatch.setattr(shutil, "rmtree", removed)
    common = {"model": model_directory, "device_memory": "75%", "steps": 5, "learning_rate": 3e-2}
    without = train(settings(output=tmp_path / "without", **common), progress)
    config = settings(eval_text=(eval_file,), eval_every=2, **common)
    result = train(config, progress)
    assert result.losses == without.losses  # GPT-2 draws random numbers for dropout
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "without")]
    assert weights[0] == weights[1]

    assert [evaluation.step for evaluation in result.evaluations] == [2, 4, 5]
    assert result.evaluations == progress.evaluations
    best = min(result.evaluations, key=lambda evaluation: evaluation.loss)
    kept = measured(tmp_path / "out" / "best", eval_file.read_bytes(), config.sequence_length)
    assert kept == pytest.approx(best.loss, rel=1e-5)
    last = measured(tmp_path / "out", eval_file.read_bytes(), config.sequence_length)
    assert last == pytest.approx(result.evaluations[-1].loss, rel=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "best")("a")["input_ids"] == [97]


def test_random_numbers_are_as_before_whatever_the_model_draws(
    settings: Settings, progress: Progress, tmp_path: Path, eval_file: Path, emu_device: ModuleType, monkeypatch: Any
):
    """Training in which forward draws from every generator, in evaluation too."""
    from headrace.train.run import Run

    plain = Run.loss

    def loss(self: Run, batch: Any) -> torch.Tensor:
        noise = torch.randn(1) + torch.randn(1, device="emu:1").cpu() + random.random() + np.random.random()
        return plain(self, batch) * float(1 + 0.01 * noise)

    monkeypatch.setattr(Run, "loss", loss)
    without = train(settings(device="emu:1", output=tmp_path / "without"), progress)
    result = train(settings(device="emu:1", eval_text=(eval_file,), eval_every=1), progress)
    assert result.losses == without.losses


def test_perplexity_is_the_exponential_of_the_loss():
    assert Evaluation(step=1, loss=2.0).perplexity == math.exp(2.0)
    assert Evaluation(step=1, loss=1e6).perplexity == math.inf


def test_the_command_tells_of_evaluations(arguments: list[str], eval_file: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*arguments, "--eval-text", str(eval_file), "--eval-every", "2"]) == 0
    shown = capsys.readouterr()
    assert "evaluation after step 2: loss 5." in shown.err
    assert "last evaluation after step 3: loss 5." in shown.out
    assert "best, in " in shown.out


def test_evaluation_needs_text(settings: Settings, progress: Progress, tmp_path: Path):
    with pytest.raises(TrainInputError, match="--eval-every needs something to measure on"):
        settings(eval_every=1)
    with pytest.raises(TrainInputError, match=r"--eval-text .*nothing does not exist"):
        train(settings(eval_text=(tmp_path / "nothing",)), progress)


def test_modes_of_modules_are_as_before(settings: Settings, progress: Progress, eval_file: Path, monkeypatch: Any):
    from headrace.train.run import Run

    modes: list[list[bool]] = []
    plain = Run.step

    def step(self: Run, batches: Any) -> float:
        if not modes:
            self.model.model.layers[1].eval()
        modes.append([module.training for module in self.model.modules()])
        return plain(self, batches)

    monkeypatch.setattr(Run, "step", step)
    train(settings(eval_text=(eval_file,), eval_every=1), progress)
    assert modes[0] == modes[1] == modes[2]
    assert {True, False} == set(modes[2])
