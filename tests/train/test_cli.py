"""What does `headrace train` print, and with which code does it end?"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import build_parser, main


def run_headrace(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_the_command_trains_compares_reports_and_saves(arguments: list[str], tmp_path: Path):
    done = run_headrace(*arguments, "--device-memory", "70%", "--compare-plain", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("yes") == 2
    assert "were on the device at once" in done.stdout
    assert "step 3/3: loss" in done.stderr
    assert "tokens/s, device " in done.stderr
    assert "stall" in done.stderr
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from transformers import AutoModelForCausalLM as M; M.from_pretrained(sys.argv[1]); "
            "sys.exit('headrace' in sys.modules)",
            tmp_path / "out",
        ],
        timeout=100,
    )
    assert loaded.returncode == 0
    shown = run_headrace("report", str(tmp_path / "out"), "--html", str(tmp_path / "run.html"))
    assert shown.returncode == 0, shown.stderr
    assert "last step" in shown.stdout
    assert "model.layers.0 forward" in (tmp_path / "run.html").read_text()


def test_a_second_ctrl_c_ends_at_once(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys):
    from headrace.train.run import Run

    def interrupted(self, batches):
        os.kill(os.getpid(), signal.SIGINT)
        while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # another thread may have got it
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(Run, "step", interrupted)
    assert main(arguments) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "headrace train: interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Arguments that follow the good ones, and a part of the one line that they lead to. {} is the test's directory.
BAD_INPUTS = {
    "text missing": ("--text {}/nothing", "--text {}/nothing does not exist"),
    "text empty": ("--text {}/empty.txt", "the text is empty: there is nothing in {}/empty.txt"),
    "text short": ("--text {}/short.txt", "has 6 tokens, fewer than one sequence of 32"),
    "no text files": ("--text {}/directory", "no text file in {}/directory matches *.txt *.md"),
    "model missing": ("--model {}/nothing", "--model: there is no directory '{}/nothing'; "),
    "not a model": (
        "--model {}/directory",
        "--model: {}/directory has no config.json; give the directory of a",
    ),
    "budget not a size": ("--device-memory lots", "--device-memory='lots' is not a size"),
    "budget without a unit": ("--device-memory 24", "--device-memory='24' is 24 bytes; did you mean \"24GB\"?"),
    "budget negative": ("--device-memory -1GiB", "--device-memory=-1GiB is negative"),
    "config broken": ("--model {}/broken", "--model: {}/broken/config.json is not readable as JSON"),
    "scalars in the output": ("--tensorboard {0}/out", "--tensorboard and --output are both {0}/out"),
    "scalars there by another name": ("--tensorboard {0}/full/../out", "--tensorboard and --output are both {0}/out"),
    "no number of blocks": ("--prefetch some", "argument --prefetch: 'some' is no number, nor auto"),
    "output not empty": ("--output {}/full", "output directory {}/full is not empty"),
    "output a file": ("--output {}/empty.txt", "output directory {}/empty.txt cannot be made"),
    "device unknown": ("--device abacus", "--device='abacus' is not a device; give one such as"),
    "not a number": ("--steps many", "argument --steps: invalid int value: 'many'"),
    "no such option": ("--quietly", "there is no flag --quietly; see headrace train --help"),
    "an option misspelt": ("--stepz 3", "there is no flag --stepz (did you mean --steps?); see headrace train --help"),
    "an option shortened": (
        "--batch 3",
        "there is no flag --batch (did you mean --batch-size?); see headrace train --help",
    ),
    "a choice misspelt": ("--optimizer adamm", "argument --optimizer: invalid choice: 'adamm'"),
    "no pattern matches": ("--resident nothing", "nothing"),
}


@pytest.mark.parametrize(("extra", "says"), BAD_INPUTS.values(), ids=BAD_INPUTS.keys())
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str, says: str
):
    for directory in ("directory", "full/directory"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": ')
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "short.txt").write_text("short")
    if "--text" in extra:
        arguments = [*arguments[:1], *arguments[3:]]
    if "--model" in extra:
        arguments = [word for word in arguments if word not in ("--layers", "4", "--hidden-size", "64")]
    try:
        code = main([*arguments, *extra.format(tmp_path).split()])
    except SystemExit as exit_of_argparse:
        code = exit_of_argparse.code
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert says.format(tmp_path) in lines[-1]
    assert [line for line in lines if line.startswith("headrace")] == lines[-1:]


@pytest.mark.extended
def test_help_and_version_do_not_wait_for_transformers():
    code = (
        "import sys; from headrace.cli.main import build_parser; build_parser(); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert run_headrace("--version").stdout == f"headrace {headrace.__version__}\n"


def test_without_a_command_the_commands_are_shown(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert all(re.search(rf"^    {command}\s", shown, re.MULTILINE) for command in build_parser().commands)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("generate --modle x", "headrace generate: there is no flag --modle (did you mean --model?); see headrace"),
        ("plan --hardwar=h100 x", "headrace plan: there is no flag --hardwar (did you mean --hardware?); see"),
        ("plan x --batchsize 2", "there is no flag --batchsize (did you mean --batch-size?)"),
        ("probe --jsn", "headrace probe: there is no flag --jsn (did you mean --json?)"),
        ("report --htm x", "headrace report: there is no flag --htm (did you mean --html?)"),
        ("doctor --dsik /tmp", "headrace doctor: there is no flag --dsik (did you mean --disk?)"),
        ("train --txt a --output b", "headrace train: there is no flag --txt (did you mean --text?)"),
        ("plam x", "headrace: there is no command plam (did you mean plan?); see headrace --help"),
        ("--versoin", "headrace: there is no flag --versoin (did you mean --version?)"),
        ("plan x y", "headrace: unrecognized arguments: y; see headrace --help"),
    ],
)
def test_every_command_names_the_nearest_flag(line: str, says: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert len(shown.splitlines()) == 1


def test_flags_may_be_written_with_underscores(arguments: list[str], tmp_path: Path):
    assert main([*arguments, "--learning_rate=0.1", "--no_packing", "--max_grad_norm", "1"]) == 0


def test_a_value_after_two_dashes_is_no_flag(capsys: pytest.CaptureFixture[str]):
    assert main(["report", "--", "--htm"]) == 2
    assert "there is no run at --htm" in capsys.readouterr().err
