"""Do adapters load that PEFT saved, alone or as Trainer's checkpoint? As its own reader loads them, to the last bit."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import headrace
import headrace.optim
from tests.checkpoint.test_other_programs import llama, train, values
from tests.support.compare import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def adapted(*names: str, seed: int = 0, **settings: Any) -> Any:
    """A small model with adapters of these names, or with `default`."""
    first, *others = names or ("default",)
    model = llama(tied=False)
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA | settings), adapter_name=first)
    for name in others:
        model.add_adapter(name, peft.LoraConfig(**LORA))
    return model


class _Seen(transformers.TrainerCallback):
    """The weights and the state of the optimizer when the first step begins."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []

    def on_step_begin(self, *_: Any, model: Any = None, optimizer: Any = None, **__: Any) -> None:
        if not self.values:
            self.values = values(model, getattr(optimizer, "optimizer", optimizer))


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["lm_head"], "bias": "lora_only"}])
def test_the_trainers_checkpoint_of_adapters(tmp_path: Path, settings: dict[str, Any]) -> None:
    data = [{"input_ids": list(range(n, n + 8)), "labels": list(range(n, n + 8))} for n in range(16)]

    def trainer(seed: int, steps: int, *callbacks: Any) -> transformers.Trainer:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, save_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True
        )
        model = adapted(seed=seed, **settings)
        return transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=list(callbacks))

    trainer(0, 2).train()
    seen = _Seen()
    again = trainer(1, 3, seen)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.optimizer is not None
    model = adapted(seed=2, **settings)
    handle = headrace.offload(model, device="cpu", device_memory="200KiB")
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = set(again.get_decay_parameter_names(model))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [{"params": [p for n, p in named if (n in decayed) == wanted]} for wanted in (True, False)]
    optimizer = headrace.optim.AdamW(groups, lr=0.5)
    extra = headrace.load(tmp_path / "checkpoint-2", model, optimizer)
    assert extra["trainer_state"]["global_step"] == 2
    assert len(optimizer.state) == len(trained)
    assert_same(values(model, optimizer), seen.values)
    handle.remove()


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("place", ["directory", "file"])
def test_one_adapter(tmp_path: Path, safe: bool, place: str) -> None:
    source, model, wanted = adapted(), adapted(seed=1), adapted(seed=1)
    optimizer = torch.optim.AdamW([p for p in source.parameters() if p.requires_grad], lr=1e-2)
    train(source, optimizer)
    source.save_pretrained(tmp_path / "lora")
    if not safe:
        state = peft.get_peft_model_state_dict(source)
        torch.save(state, tmp_path / "lora" / "adapter_model.bin")
        (tmp_path / "lora" / "adapter_model.safetensors").unlink()
    file = f"adapter_model.{'safetensors' if safe else 'bin'}"
    headrace.load(tmp_path / "lora" / (file if place == "file" else ""), model)
    wanted.load_adapter(tmp_path / "lora", "default")
    assert_same(values(model), values(wanted))
    assert_same(values(model), values(source))


def test_several_adapters(tmp_path: Path) -> None:
    source, model, other = adapted("default", "fr", "de"), adapted("default", "fr", "de", seed=1), adapted("de", seed=2)
    source.save_pretrained(tmp_path / "all")
    assert {path.name for path in (tmp_path / "all").iterdir() if path.is_dir()} == {"fr", "de"}
    headrace.load(tmp_path / "all", model)
    assert_same(values(model), values(source))
    headrace.load(tmp_path / "all" / "de", other)
    wanted = peft.get_peft_model_state_dict(source, adapter_name="de")
    found = peft.get_peft_model_state_dict(other, adapter_name="de")
    assert found.keys() == wanted.keys()
    assert_same(list(found.values()), list(wanted.values()))
    with pytest.raises(headrace.CheckpointError, match="holds an adapter 'fr', and the model has"):
        headrace.load(tmp_path / "all", adapted("default", "de"))


def test_adapters_that_transformers_put_on(tmp_path: Path) -> None:
    source, model = llama(tied=False), llama(tied=False)
    for seed, one in enumerate((source, model)):
        torch.manual_seed(seed)
        one.add_adapter(peft.LoraConfig(**LORA))
    source.save_pretrained(tmp_path / "lora")
    assert (tmp_path / "lora" / "adapter_model.safetensors").is_file()
    headrace.load(tmp_path / "lora", model)
    assert_same(values(model), values(source))


def test_adapters_that_do_not_fit(tmp_path: Path) -> None:
    adapted().save_pretrained(tmp_path / "lora")
    with pytest.raises(headrace.CheckpointError, match="holds adapters of PEFT, and the model has none"):
        headrace.load(tmp_path / "lora", llama())
    more = adapted(target_modules=["q_proj", "v_proj", "k_proj"])
    before = values(more)
    with pytest.raises(
        headrace.CheckpointError, match=r"lacks .*k_proj.lora_A.weight' \(and 3 more\) of adapter 'default'"
    ):
        headrace.load(tmp_path / "lora", more)
    more.save_pretrained(tmp_path / "more")
    with pytest.raises(
        headrace.CheckpointError, match=r"holds '[\w.]*k_proj.lora_A.weight'.*which the model does not have"
    ):
        headrace.load(tmp_path / "more", adapted())
    assert_same(values(more), before)


def test_what_trains_beside_adapters_and_was_not_saved_is_told(tmp_path: Path) -> None:
    model = adapted()
    model.save_pretrained(tmp_path / "lora")
    model.base_model.model.lm_head.requires_grad_(True)
    with pytest.warns(RuntimeWarning, match=r"lm_head.weight' \(and 0 more\) can be trained and is not in"):
        headrace.load(tmp_path / "lora", model)


def test_adapters_that_a_checkpoint_of_ours_lacks_are_told(tmp_path: Path) -> None:
    headrace.save(tmp_path / "one", adapted(target_modules=["q_proj"]))
    with pytest.warns(RuntimeWarning, match=r"v_proj.* \(and 3 more\) can be trained and is not in"):
        headrace.load(tmp_path / "one", adapted())


def test_files_beside_those_of_an_adapter_stay(tmp_path: Path) -> None:
    """Also where that adapter is gone by the next save."""
    model = adapted("default", "other")
    headrace.save(tmp_path / "last", model)
    (tmp_path / "last" / "other" / "notes.txt").write_text("mine")
    headrace.save(tmp_path / "last", model)
    assert (tmp_path / "last" / "other" / "notes.txt").read_text() == "mine"
    model.delete_adapter("other")
    headrace.save(tmp_path / "last", model)
    assert [path.name for path in (tmp_path / "last" / "other").iterdir()] == ["notes.txt"]
