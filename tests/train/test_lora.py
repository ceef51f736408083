"""Are adapters trained on a model that stays as it is, and saved alone?"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file

import headrace
from headrace.cli.main import main
from headrace.errors import TrainInputError
from headrace.train.config import TrainConfig
from headrace.train.progress import Progress
from headrace.train.trainer import train
from tests.support.compare import assert_same
from tests.support.held import weight_bytes

Settings = Callable[..., TrainConfig]

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.mark.extended
@pytest.mark.parametrize(
    "changes",
    [{}, {"lora_dropout": 0.5}, {"gradient_checkpointing": True}, {"disk": "disk", "host_memory": "90%"}],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_adapters_equal_the_plain_runs_and_are_saved_alone(
    settings: Settings, progress: Progress, tmp_path: Path, model_directory: Path, changes: dict[str, Any]
):
    changes = {**changes, **({"disk": tmp_path / "disk"} if "disk" in changes else {})}
    adapters = {"lora_rank": 4, "lora_alpha": 8.0, "learning_rate": 1e-2, "model": model_directory}
    result = train(settings(compare_plain=3, device_memory="90%", **adapters, **changes), progress)
    assert result.losses == result.plain_losses
    assert result.losses[2] < result.losses[0]
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.peft_config["default"].r == 4
    assert loaded.peft_config["default"].lora_alpha == 8.0
    base = load_file(model_directory / "model.safetensors")
    for name, weight in loaded.get_base_model().state_dict().items():
        if (plain := name.replace(".base_layer", "")) in base:
            assert torch.equal(weight, base[plain]), name
    assert result.stats is not None
    assert result.stats.onload_bytes > 0


@pytest.mark.parametrize("model_directory", ["llama"], indirect=True)
def test_targets_are_those_named(settings: Settings, progress: Progress, tmp_path: Path, model_directory: Path):
    train(settings(model=model_directory, lora_rank=2, lora_targets=("q_proj", "v_proj")), progress)
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in saved} == {"q_proj", "v_proj"}
    assert len(saved) == 4 * 2 * 2
    with pytest.raises(TrainInputError, match=r"--lora-targets nowhere: Target modules .*nowhere.* not found"):
        train(
            settings(model=model_directory, lora_rank=2, lora_targets=("nowhere",), output=tmp_path / "two"), progress
        )


@pytest.mark.parametrize("model_directory", ["llama"], indirect=True)
def test_a_checkpoint_holds_adapters_and_their_state_alone(
    settings: Settings, progress: Progress, tmp_path: Path, model_directory: Path
):
    result = train(settings(model=model_directory, lora_rank=2, save_every=3), progress)
    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000003"
    assert [path.name for path in checkpoint.glob("*.safetensors")] == ["adapter_model.safetensors"]
    trained = sum(tensor.nbytes for tensor in load_file(checkpoint / "adapter_model.safetensors").values())
    assert trained < result.weight_bytes / 4
    state = torch.load(checkpoint / "optimizer.pt")["state"]
    assert sum(each["exp_avg"].nbytes for each in state.values()) == trained


@pytest.mark.parametrize("model_directory", ["llama"], indirect=True)
def test_what_is_written_is_read_wherever_that_is(
    settings: Settings,
    progress: Progress,
    tmp_path: Path,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(model_directory.parent)
    train(settings(model=Path(model_directory.name), lora_rank=2, learning_rate=1e-2), progress)
    monkeypatch.chdir("/")
    out, tokens = tmp_path / "out", torch.arange(8)[None]
    plain = AutoPeftModelForCausalLM.from_pretrained(out).eval()
    base = weight_bytes(plain)
    for trainable in (False, True):
        model, handle = headrace.from_pretrained(out, trainable=trainable, device="cpu", device_memory=base // 2)
        with handle, torch.no_grad():
            assert_same(model(tokens).logits, plain(tokens).logits)
            with plain.disable_adapter():
                assert not torch.equal(model(tokens).logits, plain(tokens).logits)
            trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
            assert bool(trained) == trainable
            assert all("lora_" in name for name in trained)
            assert not model.training
            assert handle.stats().onload_bytes > base
    asked = ["generate", "--model", str(out), "--prompt", "a", "--max-new-tokens", "2", "--device", "cpu"]
    assert main(asked) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (None, "adapter_config.json names no model that the adapters belong to; set base_model_name_or_path"),
        ("nowhere", "adapter_config.json names 'nowhere', which is no directory of a model; .*hf download nowhere"),
        (".", "adapter_config.json names '.', which is no directory of a model"),
    ],
)
def test_adapters_of_a_model_that_is_not_there(
    named: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named, "peft_type": "LORA"}))
    with pytest.raises(headrace.CheckpointError, match=says):
        headrace.from_pretrained(tmp_path)


@pytest.mark.parametrize("model_directory", ["llama"], indirect=True)
def test_adapters_without_their_weights(tmp_path: Path, model_directory: Path):
    named = {"base_model_name_or_path": str(model_directory), "peft_type": "LORA"}
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(named))
    with pytest.raises(headrace.CheckpointError, match=r"has no adapter_model.safetensors; save the adapters again"):
        headrace.from_pretrained(tmp_path / "adapters")


def test_adapters_need_a_model(settings: Settings):
    with pytest.raises(TrainInputError, match="--lora-rank adapts a model that is trained already"):
        settings(lora_rank=4)


@pytest.mark.parametrize("model_directory", ["llama"], indirect=True)
def test_adapters_without_peft_name_what_to_install(
    settings: Settings, progress: Progress, model_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(TrainInputError, match=r"peft.* is not installed; run: pip install peft"):
        train(settings(model=model_directory, lora_rank=2), progress)
