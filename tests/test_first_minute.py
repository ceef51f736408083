"""What do the first commands import and print? Only what they need, and only lines of headrace's own."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.cli.noise import without_noise

OPTIONAL = ("accelerate", "bitsandbytes", "datasets", "diffusers", "peft", "tensorboard", "torchao", "transformers")
LIGHT = {*OPTIONAL, "numpy", "torch"}  # what takes a tenth of a second imports none of these
HELP = """
try:
    headrace.cli.main.main(["--help"])
except SystemExit:
    pass
"""
TRAIN = """
arguments = "train --text text --steps 2 --layers 2 --hidden-size 64 --sequence-length 16 --device-memory 50%".split()
sys.exit(headrace.cli.main.main([*arguments, "--device", "cpu", "--output", "trained"]))
"""


def in_a_fresh_process(code: str, directory: Path) -> tuple[set[str], str]:
    """Which of the optional libraries it imported, and what it wrote to stderr."""
    imports = f"import atexit, sys\nasked = {LIGHT}\n"
    told = "atexit.register(lambda: open('imported', 'w').write(' '.join(n for n in asked if n in sys.modules)))\n"
    command = [sys.executable, "-c", imports + told + code]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return set((directory / "imported").read_text().split()), done.stderr


@pytest.mark.parametrize("code", ["import headrace", "import headrace.cli.main" + HELP], ids=["import", "help"])
def test_nothing_is_imported_before_it_is_used(code: str, tmp_path: Path):
    assert in_a_fresh_process(code, tmp_path) == (set(), "")


@pytest.mark.parametrize("name", ["offload", "optim.AdamW"])
def test_what_is_used_first_within_another_device_is_as_ever(name: str, tmp_path: Path):
    code = f"import torch, headrace\nwith torch.device('meta'):\n    headrace.{name}\n"
    assert in_a_fresh_process(code, tmp_path)[0].isdisjoint(OPTIONAL)


@pytest.mark.extended
def test_training_a_plain_model_imports_no_peft_and_prints_lines_of_headrace_alone(tmp_path: Path):
    """transformers imports torchao by itself, and what that says is left out."""
    (tmp_path / "text").write_text("Once upon a time. " * 50)
    imported, printed = in_a_fresh_process("import headrace.cli.main" + TRAIN, tmp_path)
    assert imported.isdisjoint({"bitsandbytes", "peft", "tensorboard"})
    ours = re.compile(r"LlamaForCausalLM, .* of weights, on cpu|step \d/2: loss ")
    assert [line for line in printed.splitlines() if not ours.match(line)] == []


def test_only_messages_that_say_nothing_about_the_run_are_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    theirs, plain = (type("Kind", (), {"__module__": module}) for module in ("torchao.kernels", "somebody.own"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)

    def said() -> list[str]:
        caplog.clear()
        logging.getLogger("torchao").warning("Failed to load a.so: no such symbol")
        logging.getLogger("torchao").warning("update torchao")
        for kind in (theirs, plain):
            logging.getLogger("torch.utils._pytree").warning("%s is an Enum subclass", kind)
        return [record.getMessage().split(" ", 1)[0] for record in caplog.records]

    everything = said()
    assert len(everything) == 4
    with without_noise():
        assert said() == ["update", "<class"]
        assert "somebody.own" in caplog.text
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        assert said() == ["Failed", "update", "<class"]  # a kernel that could have been used
    assert said() == everything
