"""Does an offloaded training run do exactly what a plain one does, within its budget, and save the result?"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.errors import TrainingFailedError, TrainInputError
from headrace.optim.optimizer import HostOptimizer
from headrace.train import trainer
from headrace.train.config import TrainConfig
from headrace.train.progress import Progress
from headrace.train.run import Run
from headrace.train.trainer import train
from tests.support.compare import assert_same
from tests.train.conftest import train_plainly

Settings = Callable[..., TrainConfig]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Of a saved model, loaded by transformers alone."""
    return dict(AutoModelForCausalLM.from_pretrained(directory).state_dict())


VARIANTS: list[dict[str, Any]] = [
    {},
    {"gradient_checkpointing": True},
    {"accumulate": 3, "warmup_steps": 2},
    {"dtype": "bfloat16"},
]


@pytest.mark.core(changes={})
@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: "-".join(changes) or "default")
def test_losses_and_saved_weights_equal_the_plain_run(
    settings: Settings, progress: Progress, tmp_path: Path, changes: dict[str, Any]
):
    losses, plain = train_plainly(settings(**changes))
    offloaded = train(settings(compare_plain=3, device_memory="70%", **changes), progress)

    assert offloaded.losses == offloaded.plain_losses == losses
    assert_same(weights(tmp_path / "out"), plain)

    # It is no proof of anything unless the weights did travel, within the budget.
    stats = offloaded.stats
    assert stats is not None
    assert stats.steps == 3
    assert stats.onload_bytes > 3 * offloaded.weight_bytes * changes.get("accumulate", 1) * 0.3
    assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes < offloaded.weight_bytes


def test_on_an_accelerator_losses_and_saved_weights_equal_the_plain_run(
    settings: Settings, progress: Progress, tmp_path: Path, emu_device: ModuleType
):
    losses, plain = train_plainly(settings(device="emu:1"))
    offloaded = train(settings(compare_plain=3, device="emu:1", device_memory="70%"), progress)
    assert offloaded.losses == offloaded.plain_losses == losses
    assert_same(weights(tmp_path / "out"), plain)
    stats = offloaded.stats
    assert stats.onload_bytes > offloaded.weight_bytes
    assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes < offloaded.weight_bytes


@pytest.mark.core(model_directory="llama")
def test_on_disk_losses_and_saved_weights_equal_the_plain_run(
    settings: Settings, progress: Progress, tmp_path: Path, model_directory: Path
):
    """Weights and gradients that the host has no room for, and the optimizer's state; the saved model is not loaded."""
    losses, plain = train_plainly(settings(model=model_directory))
    budgets = {"host_memory": "80%", "device_memory": "70%", "disk": tmp_path / "disk"}
    offloaded = train(settings(compare_plain=3, model=model_directory, **budgets), progress)
    assert offloaded.losses == offloaded.plain_losses == losses
    assert_same(weights(tmp_path / "out"), plain)
    stats = offloaded.stats
    assert stats is not None
    assert stats.host_peak_bytes <= 0.8 * offloaded.weight_bytes
    assert stats.fetch_bytes > offloaded.weight_bytes
    assert stats.spill_bytes > 0
    assert [*(tmp_path / "disk" / "optimizer").iterdir(), *(tmp_path / "disk" / "weights").iterdir()] == []


def test_a_model_from_a_directory_trains_and_loads_without_headrace(
    settings: Settings, progress: Progress, model_directory: Path, tmp_path: Path
):
    before = weights(model_directory)
    result = train(settings(model=model_directory, compare_plain=3, device_memory="75%"), progress)
    assert result.losses == result.plain_losses
    after = weights(tmp_path / "out")
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], before[name]) for name in after)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a b")["input_ids"] == list(b"a b")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.use_cache


def test_the_summary_beside_the_model_holds_settings_losses_and_measured_bytes(
    settings: Settings, progress: Progress, tmp_path: Path
):
    result = train(settings(device_memory="80%"), progress)
    summary = json.loads((tmp_path / "out" / "training.json").read_text())
    assert summary["losses"] == result.losses == [record.loss for record in progress.records]
    assert summary["settings"]["device_memory"] == "80%"
    assert summary["stats"]["onload_bytes"] == result.stats.onload_bytes
    assert [record.step for record in progress.records] == [1, 2, 3]
    assert all(record.device_bytes and record.stall_seconds is not None for record in progress.records)


def test_telling_of_a_step_waits_for_no_update(settings: Settings, progress: Progress, monkeypatch: pytest.MonkeyPatch):
    telling: list[bool] = []
    waits: list[int] = []
    record, synchronize = trainer._Meter.record, HostOptimizer.synchronize

    def told(meter: Any, *given: Any) -> Any:
        telling.append(True)
        try:
            return record(meter, *given)
        finally:
            telling.clear()

    def waited(optimizer: HostOptimizer) -> None:
        waits.extend([1] * bool(telling))
        synchronize(optimizer)

    monkeypatch.setattr(trainer._Meter, "record", told)
    monkeypatch.setattr(HostOptimizer, "synchronize", waited)
    train(settings(device_memory="80%", overlap="forward", steps=12), progress)
    assert waits == []
    assert len(progress.records) == 12
    assert all(record.device_bytes and record.stall_seconds is not None for record in progress.records)


def test_training_learns(settings: Settings, progress: Progress):
    losses = train(settings(steps=30, learning_rate=3e-3), progress).losses
    assert losses[-1] < 0.7 * losses[0]


def test_epochs_count_the_text(settings: Settings, progress: Progress, text_file: Path):
    windows = (len(text_file.read_bytes()) + 1) // 32
    result = train(settings(steps=None, epochs=0.2, accumulate=2), progress)
    assert len(result.losses) == math.ceil(0.2 * math.ceil(windows / 4))


def test_fewer_conversations_than_a_micro_batch_holds_are_each_seen_once(
    settings: Settings, progress: Progress, tmp_path: Path
):
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": "one"}\n{"text": "and two"}\n')
    result = train(settings(text=(path,), packing=False, batch_size=4, steps=None), progress)
    assert len(result.losses) == 1
    assert result.tokens == 2 * (len("and two") + 1)  # two sequences of the longer one's length


def test_a_loss_that_differs_in_the_last_bit_fails_the_run(
    settings: Settings, progress: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Astray(Run):
        def step(self, batches):
            loss = torch.tensor(super().step(batches))
            return float(torch.nextafter(loss, loss + 1))

    monkeypatch.setattr(trainer, "Run", Astray)
    with pytest.raises(TrainingFailedError, match=r"the loss of step 1 is .*, but .* without headrace"):
        train(settings(compare_plain=1, device_memory="80%"), progress)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_loss_that_is_not_a_number_stops_the_run(settings: Settings, progress: Progress, tmp_path: Path):
    with pytest.raises(TrainingFailedError, match="no model was saved; try a lower --learning-rate"):
        train(settings(learning_rate=1e30, max_grad_norm=0.0, steps=20), progress)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("spoilt", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("model_directory", ["llama"], indirect=True)
def test_a_broken_model_directory_is_named(settings: Settings, progress: Progress, model_directory: Path, spoilt: str):
    (model_directory / spoilt).write_text("{")
    with pytest.raises(TrainInputError) as raised:
        train(settings(model=model_directory), progress)
    assert str(model_directory) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("model_directory", ["gpt2"], indirect=True)
def test_a_sequence_longer_than_the_model_reads_is_refused(
    settings: Settings, progress: Progress, model_directory: Path
):
    with pytest.raises(TrainInputError, match="--sequence-length is 128, but the model reads 64 tokens"):
        train(settings(model=model_directory, sequence_length=128), progress)


@pytest.mark.parametrize("model_directory", ["llama"], indirect=True)
def test_a_tokenizer_of_another_model_is_refused(
    settings: Settings, progress: Progress, model_directory: Path, text_file: Path
):
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    tokenizer.add_tokens(["times"])
    tokenizer.save_pretrained(model_directory)
    with pytest.raises(TrainInputError, match="the tokenizer gives token 258, but the model embeds tokens below 258"):
        train(settings(model=model_directory), progress)


@pytest.mark.core(model_directory="llama", changes={})
@pytest.mark.parametrize("model_directory", ["llama", "gpt2"], indirect=True)
@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}], ids=["saved", "recomputed"])
def test_micro_batches_together_change_no_bit_and_bring_weights_once(
    settings: Settings, progress: Progress, tmp_path: Path, model_directory: Path, changes: dict[str, Any]
):
    """GPT-2 has dropout, and weights that the first and the last layer share."""
    common = {"model": model_directory, "accumulate": 4, "batch_size": 1, "device_memory": "60%", **changes}
    losses, plain = train_plainly(settings(**common))
    of_one = train(settings(output=tmp_path / "one", **{**common, "accumulate": 1}), progress)
    together = train(settings(micro_batches_together="all", compare_plain=3, **common), progress)

    assert together.losses == together.plain_losses == losses
    assert_same(weights(tmp_path / "out"), plain)
    assert together.stats.micro_batches_together == 4 * 3
    assert "micro-batches           12 together" in str(together.report)
    assert 0 < together.stats.onload_bytes <= 1.02 * of_one.stats.onload_bytes
    assert together.stats.device_peak_bytes <= together.stats.device_budget_bytes

    in_pairs = train(settings(micro_batches_together=2, output=tmp_path / "pairs", **common), progress)
    assert in_pairs.losses == losses
    assert in_pairs.stats.micro_batches_together == 4 * 3
    # The sums of a step's second pair begin with the gradients of its first one, which come to the device for it.
    weights_bytes = in_pairs.stats.onload_bytes - in_pairs.stats.offload_bytes // 2
    assert together.stats.onload_bytes < in_pairs.stats.onload_bytes
    assert weights_bytes <= 2.04 * of_one.stats.onload_bytes
