"""Does `headrace plan` say the same as `headrace.plan()`, and does it refuse what it cannot plan?"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import headrace
from headrace.cli.main import main
from tests.cost.conftest import LLAMA_8B, LLAMA_70B


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "llama" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA_8B))
    return path


def test_the_command_prints_the_plan(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--hardware", "4090", "--batch-size", "4"]) == 0
    assert capsys.readouterr().out == headrace.plan(str(config), hardware="4090", batch_size=4).to_text()
    assert main(["plan", str(config.parent), "--hardware", "4090", "--batch-size", "4", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    planned = headrace.plan(LLAMA_8B, hardware="4090", batch_size=4)
    assert numbers["step_seconds"] == planned.step_seconds
    assert numbers["model"]["parameters"] == planned.model.parameters == 8_030_261_248
    assert {row["tier"] for row in numbers["tiers"]} == {"device", "host"}
    assert numbers["tokens_per_second"] == pytest.approx(8192 / numbers["step_seconds"])


def test_the_command_needs_no_torch(config: Path) -> None:
    """PyTorch takes longer to import than a plan to be made."""
    program = (
        "import sys; from headrace.cli.main import main\n"
        f"main(['plan', {str(config)!r}, '--hardware', '4090'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.extended
def test_lora_is_the_training_of_adapters(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for training in ("lora", "adapter", "qlora"):
        assert main(["plan", str(config), "--hardware", "4090", "--training", training]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]
    assert "trained in adapters" in shown[0]


@pytest.mark.extended
def test_several_machines_are_compared(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--hardware", "4090", "h100", "gh200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["plan", "4090", "h100", "gh200"]


def test_what_does_not_fit_says_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B))
    assert main(["plan", str(path), "--hardware", "4090", "--no-disk"]) == 1
    printed = capsys.readouterr().out
    assert "does not fit" in printed
    assert "would fit" in printed
    assert "of host memory in the node" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "4091"], "hardware='4091' is not known; the nearest is 4090; give 3090"),
        (["--hardware", "measured"], "run headrace probe"),
        (["--training", "half"], "training='half'; give one of full, adapter, inference"),
        (["--hardware", "4090", "--device-memory", "lots"], "device_memory='lots' is not a size"),
        (["--hardware", "4090", "--batch-size", "0"], "batch_size=0; give at least 1"),
    ],
)
def test_refusals(config: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nowhere/config.json"]) == 2
    assert "nowhere/config.json" in capsys.readouterr().err
    for path in ("my-modle/", "./my-modle", "/my-modle"):  # no names: transformers is not asked
        assert main(["plan", path]) == 2
        assert capsys.readouterr().err == (
            f"headrace plan: there is no directory or file {path!r}; give a model's directory or its config.json\n"
        )


def test_a_name_is_looked_up_on_the_hub_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def model_info(self: object, name: str, *, timeout: float) -> None:
        asked.append((name, timeout))
        raise OSError("the hub cannot be reached")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    assert main(["plan", "nam"]) == 2
    assert "no config of that name on the Hugging Face hub: the hub cannot be reached" in capsys.readouterr().err
    assert asked == [("nam", 5.0)]


@pytest.mark.extended
def test_a_model_on_meta_is_planned_and_stays_there() -> None:
    config = transformers.LlamaConfig(**{key: LLAMA_70B[key] for key in LLAMA_70B if key != "model_type"})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    planned = headrace.plan(model, hardware="h100")
    assert planned.model.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    described = headrace.plan(LLAMA_70B, hardware="h100")
    # What a layer saves is seen in a dry run here, and by numbers alone there: they differ in the eighth digit.
    assert planned.step_seconds == pytest.approx(described.step_seconds, rel=1e-6)


def test_float32_weights_have_no_master() -> None:
    planned = headrace.plan(LLAMA_8B | {"dtype": "float32"}, hardware="h100")
    assert planned.work.master_bytes == 0
    assert planned.work.gradient_bytes == 4
    assert planned.model.weight_bytes == 4 * planned.model.parameters
    with pytest.raises(ValueError, match="master_form='full' is of bfloat16 weights, and these are float32"):
        headrace.plan(LLAMA_8B | {"dtype": "float32"}, hardware="h100", master_form="full")
