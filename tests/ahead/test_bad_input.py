"""Is input that cannot be used refused in one line that names it, by every command that looks before and after runs?"""

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from tests.cost.conftest import LLAMA_8B


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("good.json").write_text(json.dumps(LLAMA_8B))
    Path("directory").mkdir()


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says; one line, with its name in front."""
    try:
        code = main(arguments)
    except SystemExit as left:  # argparse
        code = int(left.code or 0)
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith(f"headrace {arguments[0]}: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no JSON"),
        ('{"model_type":', "holds no JSON"),
        ("[" * 100_000, "holds no JSON"),
        ("[]", "holds a list; a transformers config is a JSON object"),
        ('{"model_type": "llama"}', "no hidden_size or n_embd"),
        (json.dumps(LLAMA_8B | {"hidden_size": -4}), "hidden_size is -4; it must be a whole number from 0"),
        (
            json.dumps(LLAMA_8B | {"num_hidden_layers": 10**9}),
            "num_hidden_layers is 1000000000; it must be a whole number from 0 to 10,000",
        ),
        (json.dumps(LLAMA_8B | {"num_hidden_layers": 4.5}), "num_hidden_layers is 4.5; it must be a whole number"),
        (json.dumps(LLAMA_8B | {"hidden_size": float("nan")}), "hidden_size is nan"),
        (json.dumps(LLAMA_8B | {"text_config": "none"}), "text_config is 'none'; it must be a JSON object"),
        (json.dumps(LLAMA_8B | {"model_type": "gpt2", "n_positions": float("inf")}), "n_positions is inf"),
        (json.dumps(LLAMA_8B | {"hidden_size": 1e30}), r"hidden_size is 1e+30"),
        (json.dumps(LLAMA_8B | {"num_hidden_layers": 0}), "no num_hidden_layers"),
        (json.dumps(LLAMA_8B | {"vocab_size": None}), "no vocab_size"),
        (json.dumps(LLAMA_8B | {"intermediate_size": "wide"}), "intermediate_size is 'wide'; it must be a number"),
        (json.dumps(LLAMA_8B | {"num_key_value_heads": "few"}), "num_key_value_heads is 'few'"),
        (json.dumps(LLAMA_8B | {"model_type": []}), "cannot make a model of type []"),
    ],
)
def test_configs(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.json").write_text(text)
    assert message in refused(["plan", "bad.json", "--hardware", "h100"], capsys)


def test_configs_that_are_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.json").write_bytes(b"\xff\xfe\x00")
    assert "holds no JSON" in refused(["plan", "bad.json"], capsys)
    assert "no config at 'directory'" in refused(["plan", "directory"], capsys)
    assert "File name too long" in refused(["plan", "x" * 5000], capsys)
    assert "no config at ''" in refused(["plan", ""], capsys)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--devices", "0", "devices=0; give at least 1"),
        ("--zero-stage", "3", "zero_stage=3"),
        ("--micro-batches", "-1", "micro_batches=-1"),
        ("--batch-size", "many", "invalid int value: 'many'"),
        ("--weight-bits", "nan", "weight_bits=nan"),
        ("--device-memory", "0", "device_memory_bytes is 0"),
        ("--host-memory", "nan", "host_memory='nan' is not a size"),
        ("--disk", "1e400GiB", "disk='1e400GiB' is not a size"),
        ("--state-dtype", "int3", "state_dtype='int3'; give one of"),
        ("--master-form", "half", "master_form='half'; give one of split, full, none"),
        ("--hardware", "", "hardware='' is not known; give 3090"),
    ],
)
def test_options_of_plan(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(["plan", "good.json", "--hardware", "h100", option, value], capsys)


@pytest.mark.parametrize("command", ["doctor", "probe"])
def test_devices_and_directories(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "device='nope' is not a device" in refused([command, "--device", "nope"], capsys)
    assert "device='cuda:99' is not available here" in refused([command, "--device", "cuda:99"], capsys)
    if command == "doctor":
        assert "good.json is no directory" in refused([command, "--disk", "good.json"], capsys)


def test_a_measurement_that_cannot_be_kept_is_not_begun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("good.json").absolute()))
    monkeypatch.setattr("headrace.probing.link_rates", lambda device: pytest.fail("measured"))
    said = refused(["probe", "--device", "cpu"], capsys)
    assert "the measurement cannot be kept in" in said
    assert "--no-cache" in said


def test_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no run at none; give the --output of" in refused(["report", "none"], capsys)
    assert "directory directory has no headrace-run.json; give" in refused(["report", "directory"], capsys)
    assert "no run record of version 3" in refused(["report", "good.json"], capsys)
