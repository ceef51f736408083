"""Does transformers' Trainer log what offloading did, save by millrace, and take millrace's optimizers by name?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import millrace
from millrace.integrations.transformers import MillraceCallback, optimizer_cls_and_kwargs
from tests.matrix.compare import Outcome

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
    handle = millrace.offload(model, device="cpu", device_memory="64KiB")
    handle.reset_stats()
    trainer = trainer_of(model, arguments(tmp_path, save_strategy="no"), callbacks=[MillraceCallback(handle)])
    trainer.train()
    first, second, whole = trainer.state.log_history
    for name in ("onload_bytes", "offload_bytes"):
        key = f"millrace_{name}"
        assert first[key] > 0
        assert first[key] + second[key] == whole[key] == getattr(handle.stats(), name)
    assert 0 < whole["millrace_device_peak_bytes"] <= 64 << 10
    assert 0 <= second["millrace_stall_share"] < 1
    assert second["millrace_tokens_per_second"] > 0
    assert len(model._forward_pre_hooks) == 0
    handle.remove()


class Reporter(TrainerCallback):
    """Sees what is logged, before callbacks that are given later."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self.logs.append(dict(found["logs"]))


def test_attached_it_is_before_those_that_report(tmp_path: Path) -> None:
    model = llama()
    reporter = Reporter()
    with millrace.offload(model, device="cpu", device_memory="64KiB") as handle:
        trainer = trainer_of(model, arguments(tmp_path, save_strategy="no"), callbacks=[reporter])
        MillraceCallback(handle).attach(trainer)
        trainer.train()
    assert [log["millrace_onload_bytes"] > 0 for log in reporter.logs] == [True, True, True]


def test_checkpoints_beside_the_trainers_own(tmp_path: Path) -> None:
    model = llama()
    handle = millrace.offload(model, device="cpu", device_memory="64KiB")
    settings = arguments(tmp_path, save_steps=1, save_total_limit=2)
    trainer = trainer_of(
        model,
        settings,
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(settings, overlap="forward"),
        callbacks=[MillraceCallback(handle, save=True)],
    )
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "millrace").iterdir()) == ["step-3", "step-4"]
    newest = millrace.checkpoint.newest(tmp_path / "millrace")
    again = llama(seed=1)
    other = trainer_of(again, settings, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(settings))
    optimizer = other.create_optimizer()
    extra = millrace.load(newest, again, optimizer)
    assert extra["trainer_state"]["global_step"] == extra["scheduler"]["last_epoch"] == 4
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    whole = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert all(map(torch.equal, again.parameters(), whole.parameters()))
    mine, saved = (one.state_dict()["state"] for one in (optimizer, trainer.optimizer))
    assert len(mine) == len(list(model.parameters()))
    assert all(torch.equal(mine[number]["exp_avg"], saved[number]["exp_avg"]) for number in saved)
    handle.remove()


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
    handle = millrace.offload(model, device="cpu", device_memory="64KiB")
    trainer = trainer_of(model, settings, optimizer_cls_and_kwargs=chosen)
    trainer.train()
    assert type(trainer.optimizer.optimizer).__module__.startswith("millrace.optim")
    assert handle.stats().steps == 4
    handle.remove()
    if name == "sgd":  # PyTorch's default for it is not fused, and may differ in a weight's last bit
        torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
    else:
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_settings_of_optimizers(tmp_path: Path) -> None:
    def chosen(name: str, **more: Any) -> tuple[type, dict[str, Any]]:
        made = arguments(tmp_path, optim=name, learning_rate=0.5, **more)
        return optimizer_cls_and_kwargs(made, tier="disk", disk="/nvme")

    of_disk = {"lr": 0.5, "tier": "disk", "disk": "/nvme"}
    betas = {"betas": (0.9, 0.999)}
    assert chosen("lion_8bit") == (millrace.optim.Lion, of_disk | betas | {"state_dtype": "8bit"})
    assert chosen("adamw_torch", optim_args="eps=1e-4,amsgrad=True") == (
        millrace.optim.AdamW,
        of_disk | betas | {"eps": 1e-4, "amsgrad": True},
    )
    with pytest.raises(ValueError, match=r"optim='rmsprop'; give one of adamw_torch, .*millrace\.optim\.Adafactor"):
        chosen("rmsprop")


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
                handle = millrace.offload(model, device=trainer_device, device_memory="64KiB")
            trainer = trainer_of(model, settings, eval_dataset=ROWS[:4])
            trainer.train(resume_from_checkpoint=str(directory / "checkpoint-2") if run else None)
            found.append(Outcome().read(model))
            if offloads:
                assert handle.stats().onload_bytes > 64 << 10
                handle.remove()
        if way == "best":
            assert trainer.state.best_global_step < 4
    for outcome in found[1:]:
        outcome.assert_equals(found[0])
