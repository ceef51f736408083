"""Do flags come from a YAML file, and does a key that is none name the nearest?"""

import json
import sys
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.cli.train import flags_of
from headrace.errors import TrainInputError

FILE = """
text: [one.txt, two.txt]
output: out
batch-size: 8
learning_rate: 1.0e-3
device_memory: 25%
packing: false
gradient_checkpointing: true
steps:
offload_activations: {layers: 2, min_bytes: 1KiB}
resume: true
"""


def test_each_key_becomes_its_flag(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(FILE)
    assert flags_of(tmp_path / "run.yaml") == [
        *("--text", "one.txt", "two.txt", "--output=out", "--batch-size=8", "--learning-rate=0.001"),
        *("--device-memory=25%", "--no-packing", "--gradient-checkpointing"),
        *("--offload-activations", "layers=2", "min_bytes=1KiB", "--resume"),
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            "batchsize: 3",
            "'batchsize' is no flag of headrace train (did you mean batch_size?); see headrace train --help",
        ),
        ("xyz: 3", "'xyz' is no flag of headrace train; see headrace train --help"),
        ("- a", "holds a list; write a flag and its value in a line"),
        ("a: [", "is no YAML: while parsing"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: str, says: str):
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(TrainInputError) as raised:
        flags_of(tmp_path / "run.yaml")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(TrainInputError, match=r"nothing\.yaml cannot be read: No such file"):
        flags_of(tmp_path / "nothing.yaml")


def test_a_run_takes_its_settings_from_a_file(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.yaml").write_text("steps: 2\nbatch_size: many\n")
    given = [argument for argument in arguments if argument not in ("--steps", "3")]
    with pytest.raises(SystemExit) as ended:
        main([*given, "--config", str(tmp_path / "run.yaml")])
    assert ended.value.code == 2
    assert "argument --batch-size: invalid int value: 'many'" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text("steps: 2\nbatch_size: 3\nseed: 7\n")
    assert main([*given, f"--config={tmp_path}/run.yaml"]) == 0  # of which a batch size is given, too
    assert "step 2/2" in capsys.readouterr().err
    told = json.loads((tmp_path / "out" / "training.json").read_text())["settings"]
    assert (told["batch_size"], told["seed"]) == (2, 7)


def test_a_file_without_the_library_that_reads_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(TrainInputError, match=r"yaml.* is not installed; run: pip install PyYAML"):
        flags_of(Path("run.yaml"))
