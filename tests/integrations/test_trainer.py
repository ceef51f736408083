"""Does transformers' Trainer log what offloading did, save by headrace, and take headrace's optimizers by name?"""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainerState, TrainingArguments

import headrace
from headrace import saving
from headrace.checkpoint import sources, writing
from headrace.integrations.transformers import HeadraceCallback, micro_batches_together, optimizer_cls_and_kwargs
from tests.optim.test_overlap import Held
from tests.support.compare import Outcome, assert_same

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
ROWS = [{"input_ids": list(range(n, n + 8)), "labels": list(range(n, n + 8))} for n in range(16)]


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=None, eos_token_id=None))


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    settings = {"max_steps": 4, "logging_steps": 2, "save_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True}
    return TrainingArguments(str(directory), **{**settings, **changes}, report_to=[], disable_tqdm=True)


def trainer_of(model: Any, settings: TrainingArguments, **more: Any) -> Trainer:
    return Trainer(model, settings, train_dataset=ROWS, **more)


def test_logs(tmp_path: Path) -> None:
    """The last log has the numbers of all of training; those before it, of the steps between."""
    model = llama()
    handle = headrace.offload(model, device="cpu", device_memory="64KiB")
    settings = arguments(tmp_path, save_strategy="no", eval_strategy="steps", eval_steps=2)
    trainer = trainer_of(model, settings, eval_dataset=ROWS[:2], callbacks=[HeadraceCallback(handle)])
    trainer.train()
    *logs, whole = trainer.state.log_history
    trained, evaluated = logs[::2], logs[1::2]
    for log in (*trained, whole):
        assert 0 < log["headrace_device_peak_gib"] <= 2**-14
        assert 0 <= log["headrace_stall_share"] < 1
        assert log["headrace_tokens_per_second"] > 0
    assert len(evaluated) == 2
    for log in evaluated:
        assert {name for name in log if name.startswith("headrace_")} == {
            "headrace_device_peak_gib",
            "headrace_stall_share",
        }
    assert len(model._forward_pre_hooks) == 0
    handle.remove()


def test_a_log_does_not_wait_for_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    model, state = llama(), TrainerState(log_history=[{}])
    with headrace.offload(model, device="cpu", device_memory="64KiB") as handle:
        optimizer = headrace.optim.AdamW(model.parameters(), lr=0.01, overlap="forward")
        callback = HeadraceCallback(handle)
        callback.on_train_begin(None, state, None, model=model)
        updates = Held(monkeypatch)
        model(**{name: torch.tensor([row]) for name, row in ROWS[0].items()}).loss.backward()
        optimizer.step()
        callback.on_log(None, state, None, logs=state.log_history[0])
        assert not updates.gate.is_set()
        assert state.log_history[0]["headrace_device_peak_gib"] > 0
        updates.release_soon()
        optimizer.synchronize()
        assert updates.waited > 0
        callback._stop_counting()


class Reporter(TrainerCallback):
    """Sees what is logged, before callbacks that are given later."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self.logs.append(dict(found["logs"]))


def test_attached_it_is_before_those_that_report(tmp_path: Path) -> None:
    model = llama()
    reporter = Reporter()
    with headrace.offload(model, device="cpu", device_memory="64KiB") as handle:
        trainer = trainer_of(model, arguments(tmp_path, save_strategy="no"), callbacks=[reporter])
        HeadraceCallback(handle).attach(trainer)
        trainer.train()
    assert [log["headrace_tokens_per_second"] > 0 for log in reporter.logs] == [True, True, True]


def test_checkpoints_beside_the_trainers_own(tmp_path: Path) -> None:
    model = llama()
    handle = headrace.offload(model, device="cpu", device_memory="64KiB")
    settings = arguments(tmp_path, save_steps=1, save_total_limit=2)
    trainer = trainer_of(
        model,
        settings,
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(settings, overlap="forward"),
        callbacks=[HeadraceCallback(handle, save=True)],
    )
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "headrace").iterdir()) == ["step-3", "step-4"]
    newest = headrace.checkpoint.newest(tmp_path / "headrace")
    again = llama(seed=1)
    other = trainer_of(again, settings, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(settings))
    optimizer = other.create_optimizer()
    extra = headrace.load(newest, again, optimizer)
    assert extra["trainer_state"]["global_step"] == extra["scheduler"]["last_epoch"] == 4
    assert_same(again.parameters(), model.parameters())
    whole = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert_same(again.parameters(), whole.parameters())
    mine, saved = (one.state_dict()["state"] for one in (optimizer, trainer.optimizer))
    assert len(mine) == len(list(model.parameters()))
    assert all(torch.equal(mine[number]["exp_avg"], saved[number]["exp_avg"]) for number in saved)
    handle.remove()


@pytest.mark.parametrize("own", [True, False], ids=["headrace's optimizer", "the Trainer's"])
def test_the_trainer_goes_on_from_them(own: bool, tmp_path: Path) -> None:
    """Within an epoch; schedule, order of the data and dropout included."""
    settings = arguments(tmp_path, logging_steps=1, save_only_model=True, learning_rate=0.01)
    found: list[tuple[Any, list[float], Outcome]] = []
    for run in range(2):
        model = llama(seed=run)
        model.config.attention_dropout = 0.3
        with headrace.offload(model, device="cpu", device_memory="64KiB") as handle:
            trainer = trainer_of(
                model,
                settings,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(settings, overlap="forward") if own else None,
                callbacks=[HeadraceCallback(handle, save=True)],
            )
            trainer.train(resume_from_checkpoint=str(tmp_path / "headrace" / "step-2") if run else None)
            losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
            found.append((trainer.state.global_step, losses, Outcome().read(model)))
            assert handle.stats().onload_bytes > 64 << 10
    assert found[0][:2] == found[1][:2]
    assert len(set(found[0][1])) == 4
    assert_same(found[1][2], found[0][2])


def test_the_last_one_is_whole_before_the_best_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    fill, wait = writing.Piece.fill, saving.Saving.wait

    def late(*given: Any) -> None:
        """The weights are not read before somebody waits for the checkpoint."""
        asked.wait()
        fill(*given)

    def waits(one: saving.Saving) -> None:
        asked.set()
        wait(one)

    monkeypatch.setattr(sources, "SMALL_BYTES", 0)
    monkeypatch.setattr(writing.Piece, "fill", late)
    monkeypatch.setattr(saving.Saving, "wait", waits)
    settings = arguments(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)
    model = llama()
    with headrace.offload(model, device="cpu", device_memory="64KiB") as handle:
        callbacks = [HeadraceCallback(handle, save=True)]
        trainer = trainer_of(model, settings, eval_dataset=ROWS[:4], callbacks=callbacks)
        trainer.train()
        assert trainer.state.best_global_step == 2
        headrace.load(tmp_path / "headrace" / "step-2", model)


@pytest.mark.parametrize("name", ["adamw_torch_fused", "sgd"])
def test_an_optimizer_by_its_name_computes_the_same(name: str, tmp_path: Path) -> None:
    """Against the Trainer's own, of the same arguments."""
    settings = arguments(
        tmp_path,
        save_strategy="no",
        optim=name,
        learning_rate=0.01,
        weight_decay=0.1,
        adam_beta2=0.9,
        adam_epsilon=1e-6,
    )
    plain, model = llama(), llama()
    trainer_of(plain, settings).train()
    chosen = optimizer_cls_and_kwargs(settings, overlap="forward")
    handle = headrace.offload(model, device="cpu", device_memory="64KiB")
    trainer = trainer_of(model, settings, optimizer_cls_and_kwargs=chosen)
    trainer.train()
    assert type(trainer.optimizer.optimizer).__module__.startswith("headrace.optim")
    assert handle.stats().steps == 4
    handle.remove()
    if name == "sgd":  # PyTorch's default for it is not fused, and may differ in a weight's last bit
        torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
    else:
        assert_same(model.parameters(), plain.parameters())


def test_settings_of_optimizers(tmp_path: Path) -> None:
    def chosen(name: str, **more: Any) -> tuple[type, dict[str, Any]]:
        made = arguments(tmp_path, optim=name, learning_rate=0.5, **more)
        return optimizer_cls_and_kwargs(made, tier="disk", disk="/nvme")

    of_disk = {"lr": 0.5, "tier": "disk", "disk": "/nvme"}
    betas = {"betas": (0.9, 0.999)}
    assert chosen("lion_8bit") == (headrace.optim.Lion, of_disk | betas | {"state_dtype": "8bit"})
    assert chosen("adamw_torch", optim_args="eps=1e-4,amsgrad=True") == (
        headrace.optim.AdamW,
        of_disk | betas | {"eps": 1e-4, "amsgrad": True},
    )
    with pytest.raises(ValueError, match=r"optim='rmsprop'; give one of adamw_torch, .*headrace\.optim\.Adafactor"):
        chosen("rmsprop")


@pytest.mark.parametrize("pair", ["eps", "overlap=forward", "betas=(0.9"])
def test_settings_that_cannot_be_read(pair: str, tmp_path: Path) -> None:
    settings = arguments(tmp_path, optim_args=f"amsgrad=True, {pair}")
    with pytest.raises(ValueError, match=rf"\(optim_args=...\) has {re.escape(repr(pair))}; give pairs name=value"):
        optimizer_cls_and_kwargs(settings)


@pytest.mark.core(way="resumed")
@pytest.mark.parametrize("way", ["resumed", "best"])
def test_the_trainers_own_checkpoints(way: str, trainer_device: torch.device, tmp_path: Path) -> None:
    """Resumed in the middle; and the one of the greatest loss loaded into the model at the end."""
    found = []
    for offloads in (False, True):
        directory = tmp_path / str(offloads)
        changes: dict[str, Any] = {"use_cpu": trainer_device.type == "cpu", "save_steps": 1}
        if way == "best":
            changes |= {
                "eval_strategy": "steps",
                "eval_steps": 1,
                "load_best_model_at_end": True,
                "greater_is_better": True,
            }
        settings = arguments(directory, **changes)
        model = llama()
        runs = 2 if way == "resumed" else 1
        for run in range(runs):
            model = llama(seed=run)
            if offloads:
                handle = headrace.offload(model, device=trainer_device, device_memory="64KiB")
            trainer = trainer_of(model, settings, eval_dataset=ROWS[:4])
            trainer.train(resume_from_checkpoint=str(directory / "checkpoint-2") if run else None)
            found.append(Outcome().read(model))
            if offloads:
                assert handle.stats().onload_bytes > 64 << 10
                handle.remove()
        if way == "best":
            assert trainer.state.best_global_step < 4
    for outcome in found[1:]:
        assert_same(outcome, found[0])


# Micro-batches together ----------------------------------------------------------------------------------------------
class Calls(TrainerCallback):
    """What the trainer comes to."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_substep_end(self, *args: Any, **found: Any) -> None:
        self.calls.append("substep")

    def on_step_end(self, *args: Any, **found: Any) -> None:
        self.calls.append("step")


def logged(trainer: Trainer) -> list[dict[str, float]]:
    return [{key: log[key] for key in ("loss", "grad_norm") if key in log} for log in trainer.state.log_history]


@pytest.mark.extended
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bf16": True},
        {"label_smoothing_factor": 0.1, "max_grad_norm": 0.0},
        {"average_tokens_across_devices": False, "num_train_epochs": 3, "max_steps": -1},  # 4 and 2 micro-batches
    ],
    ids=["as it is", "bfloat16", "smoothed", "epochs"],
)
def test_micro_batches_together_equal_the_trainers_loop(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 4, "logging_steps": 1, "save_strategy": "no", "learning_rate": 0.01}
    trained: list[tuple[LlamaForCausalLM, Trainer, list[str]]] = []
    rows = [{**row, "labels": row["labels"][: 2 + n % 5] + [-100] * (6 - n % 5)} for n, row in enumerate(ROWS[:12])]
    for together in (False, True):
        model, calls = llama(), Calls()
        handle = headrace.offload(model, device="cpu", device_memory="64KiB")
        trainer = Trainer(model, arguments(tmp_path, **settings, **changes), train_dataset=rows, callbacks=[calls])
        if together:
            micro_batches_together(trainer, handle)
        trainer.train()
        trained.append((model, trainer, calls.calls))
        stats = handle.stats()
        handle.remove()
    (plain, own, calls_of_loop), (model, ours, calls_of_ours) = trained
    assert_same(model.parameters(), plain.parameters())
    assert logged(ours) == logged(own)
    assert len(logged(own)) > 4
    assert calls_of_ours == calls_of_loop
    assert "substep" in calls_of_loop
    assert stats.micro_batches_together == len(calls_of_loop)
    assert stats.micro_batches_in_turn == 0
    assert "backward" not in vars(ours.accelerator)


def test_a_loss_that_fails_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    model = llama()
    with headrace.offload(model, device="cpu", device_memory="64KiB") as handle:
        trainer = trainer_of(model, arguments(tmp_path, save_strategy="no", gradient_accumulation_steps=2))
        micro_batches_together(trainer, handle)
        compute_loss, fails = trainer.compute_loss, [False, True]

        def failing(*args: Any, **named: Any) -> Any:
            if fails and fails.pop(0):
                raise RuntimeError("odd")
            return compute_loss(*args, **named)

        trainer.compute_loss = failing
        with pytest.raises(RuntimeError, match="odd"):
            trainer.train()
        assert "backward" not in vars(trainer.accelerator)
        assert all(parameter.grad is None for parameter in model.parameters())
        trainer.train()
        assert handle.stats().micro_batches_together == 4 * 2


def test_trainers_whose_steps_cannot_go_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Trainer):
        def training_step(self, *args: Any, **named: Any) -> Any:
            return super().training_step(*args, **named)

    class Offloading(Counting):
        maybe_activation_offload_context = torch.no_grad()

    model = llama()
    with headrace.offload(model, device="cpu", device_memory="64KiB") as handle:
        for kind, error, says in (
            (Counting, TypeError, "Counting has a"),
            (Offloading, ValueError, "activations=True"),
        ):
            with pytest.raises(error, match=says):
                micro_batches_together(kind(model, arguments(tmp_path), train_dataset=ROWS), handle)
        trainer = trainer_of(model, arguments(tmp_path))
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(ValueError, match="fp16=True scales the loss"):
            micro_batches_together(trainer, handle)
        monkeypatch.setattr(headrace.Offloaded, "averages", True)
        with pytest.raises(ValueError, match="of a model with mesh= do not go together"):
            micro_batches_together(trainer_of(model, arguments(tmp_path)), handle)
