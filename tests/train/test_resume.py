"""Does a run that was interrupted end exactly as one that was not?"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.cli.main import main
from headrace.errors import TrainInputError
from headrace.train.config import TrainConfig
from headrace.train.progress import Progress
from headrace.train.run import Run
from headrace.train.trainer import train
from tests.support.compare import assert_same

Settings = Callable[..., TrainConfig]


class CrashError(Exception):
    """Ends a run without warning."""


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The run after this one crashes in its step of that number, after the update; 0: none does any more."""
    plain = Run.step

    def at(number: int) -> None:
        steps: list[float] = []

        def step(self: Run, batches: Any) -> float:
            steps.append(plain(self, batches))
            if len(steps) == number:
                raise CrashError
            return steps[-1]

        monkeypatch.setattr(Run, "step", step)

    return at


def final(output: Path) -> dict[str, Any]:
    """All that a run has come to: its weights and its last checkpoint, tensor by tensor."""
    checkpoint = max((output / "checkpoints").glob("step-*"))
    tensors: dict[str, Any] = {"number": int(checkpoint.name.removeprefix("step-"))}
    for path in (*output.glob("*.safetensors"), *checkpoint.glob("*.safetensors")):
        tensors |= {f"{path.relative_to(output)} {name}": tensor for name, tensor in load_file(path).items()}
    for path in (*checkpoint.glob("optimizer*.pt"), checkpoint / "extra.pt"):
        tree = torch.load(path)
        tree.pop("passes", None)  # measured times, which differ from run to run
        tensors |= leaves(tree, path.name)
    assert len(tensors) > 10
    return dict(sorted(tensors.items()))


def leaves(tree: Any, name: str) -> dict[str, Any]:
    if isinstance(tree, dict):
        return {key: leaf for part, value in tree.items() for key, leaf in leaves(value, f"{name} {part}").items()}
    if isinstance(tree, list | tuple):
        return leaves(dict(enumerate(tree)), name)
    return {name: tree}


VARIANTS: dict[str, dict[str, Any]] = {
    "dropout and accumulation": {"accumulate": 2, "model": "gpt2"},
    "cosine": {"schedule": "cosine", "warmup_steps": 2},
    "bfloat16 and 8 bits": {"dtype": "bfloat16", "state_dtype": "8bit"},
    "muon": {"optimizer": "muon"},
    "disk": {"disk": "disk", "host_memory": "90%"},
    "updates beside forward": {"overlap": "forward"},
    "adapters": {"model": "gpt2", "lora_rank": 2, "lora_dropout": 0.1, "lora_targets": ("c_attn",)},
    "evaluation": {"eval_every": 2},
}


@pytest.mark.core(variant="disk")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_directory", ["gpt2"], indirect=True)
def test_a_crashed_run_goes_on_as_if_nothing_had_happened(
    settings: Settings,
    progress: Progress,
    tmp_path: Path,
    text_file: Path,
    model_directory: Path,
    crash_at: Callable[[int], None],
    variant: str,
):
    changes = {"device_memory": "75%", **VARIANTS[variant]}
    changes |= {name: model_directory for name in changes if name == "model"}
    changes |= {name: tmp_path / "disk" for name in changes if name == "disk"}
    changes |= {"eval_text": (text_file,)} if "eval_every" in changes else {}
    common = {"steps": 6, "save_every": 2, **changes}
    whole = train(settings(output=tmp_path / "whole", **common), progress)
    crash_at(4)
    with pytest.raises(CrashError):
        train(settings(**common), progress)
    assert not (tmp_path / "out" / "training.json").exists()
    crash_at(0)
    resumed = train(settings(**common), progress)
    assert f"going on from {tmp_path / 'out' / 'checkpoints' / 'step-00000002'}" in progress.notes
    assert resumed.losses == whole.losses
    assert resumed.evaluations == whole.evaluations
    assert_same(final(tmp_path / "out"), final(tmp_path / "whole"))


def test_on_an_accelerator_a_crashed_run_goes_on(
    settings: Settings, progress: Progress, tmp_path: Path, crash_at: Callable[[int], None], emu_device: ModuleType
):
    common = {"steps": 4, "save_every": 2, "device": "emu:1", "device_memory": "75%"}
    whole = train(settings(output=tmp_path / "whole", **common), progress)
    crash_at(3)
    with pytest.raises(CrashError):
        train(settings(**common), progress)
    crash_at(0)
    assert train(settings(**common), progress).losses == whole.losses
    assert_same(final(tmp_path / "out"), final(tmp_path / "whole"))


@pytest.fixture
def crashed(settings: Settings, progress: Progress, crash_at: Callable[[int], None]) -> dict[str, Any]:
    """The settings of a run of which a checkpoint after two of four steps is left."""
    common = {"steps": 4, "save_every": 2, "device_memory": "75%"}
    crash_at(3)
    with pytest.raises(CrashError):
        train(settings(**common), progress)
    crash_at(0)
    return common


def test_budgets_and_cadence_may_differ_and_the_result_stays(
    settings: Settings, progress: Progress, tmp_path: Path, crashed: dict[str, Any]
):
    whole = train(settings(output=tmp_path / "whole", **crashed), progress)
    others = {"save_every": 1, "keep": 1, "device_memory": "90%", "gradient_checkpointing": True, "overlap": "forward"}
    resumed = train(settings(**{**crashed, **others}), progress)
    assert resumed.losses == whole.losses
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert_same(final(tmp_path / "out"), final(tmp_path / "whole"))


@pytest.mark.extended
def test_more_steps_may_follow_where_the_schedule_does_not_end(
    settings: Settings, progress: Progress, tmp_path: Path, crashed: dict[str, Any]
):
    whole = train(settings(output=tmp_path / "whole", **{**crashed, "steps": 6}), progress)
    first = train(settings(**crashed), progress)
    second = train(settings(**{**crashed, "steps": 6}, resume=True), progress)
    assert [*first.losses, *second.losses[4:]] == whole.losses
    assert_same(final(tmp_path / "out"), final(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"learning_rate": 1.0, "seed": 5}, "--learning-rate was 0.0001 and is 1.0; --seed was 0 and is 5; give what"),
        ({"batch_size": 3}, "--batch-size was 2 and is 3"),
        ({"optimizer": "lion"}, "--optimizer was adamw and is lion"),
        ({"schedule": "linear"}, "--schedule was constant and is linear"),
        ({"include": ("*",), "exclude": ("text.txt",)}, "the data of --text is not what it was"),
    ],
)
def test_settings_that_change_the_result_are_named(
    settings: Settings,
    progress: Progress,
    tmp_path: Path,
    crashed: dict[str, Any],
    changes: dict[str, Any],
    says: str,
):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "other.txt").write_text("another text " * 100)
    if "include" in changes:
        changes = {**changes, "text": (tmp_path / "more",)}
    with pytest.raises(TrainInputError, match="is of a run that would end otherwise") as raised:
        train(settings(**{**crashed, **changes}), progress)
    assert says in str(raised.value)


@pytest.fixture
def begin(
    settings: Settings, progress: Progress, crash_at: Callable[[int], None]
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Leaves a checkpoint after one of two steps of a run with these changes."""

    def leave(changes: dict[str, Any]) -> dict[str, Any]:
        common = {"steps": 2, "save_every": 1, **changes}
        crash_at(2)
        with pytest.raises(CrashError):
            train(settings(**common), progress)
        crash_at(0)
        return common

    return leave


@pytest.mark.extended
@pytest.mark.parametrize("model_directory", ["gpt2"], indirect=True)
@pytest.mark.parametrize("rank", [None, 2])
def test_a_model_is_the_same_by_its_contents_and_not_by_its_name(
    settings: Settings,
    progress: Progress,
    tmp_path: Path,
    model_directory: Path,
    begin: Callable[[dict[str, Any]], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    rank: int | None,
):
    common = begin(
        {"model": model_directory, "lora_rank": rank, "lora_targets": ("c_attn",) if rank else ("all-linear",)}
    )
    weights = load_file(model_directory / "model.safetensors")
    other = {name: weight.clone() for name, weight in weights.items()}
    other["transformer.h.3.mlp.c_proj.bias"][-1] += 1
    save_file(other, model_directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(TrainInputError, match="the model of --model is not what it was"):
        train(settings(**common), progress)
    save_file(weights, model_directory / "model.safetensors", {"format": "pt"})
    config = json.loads((model_directory / "config.json").read_text())
    (model_directory / "config.json").write_text(json.dumps({**config, "activation_function": "relu"}))
    with pytest.raises(TrainInputError, match="the model of --model is not what it was"):
        train(settings(**common), progress)
    (model_directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrainInputError, match=r"the model of --model is not what it was|--lora-rank was 2"):
        train(settings(**{**common, "model": None, "lora_rank": None, "lora_targets": ("all-linear",)}), progress)
    monkeypatch.chdir(tmp_path)
    moved = model_directory.rename(tmp_path / "moved").name
    others = {"model": Path(moved), "disk": tmp_path / "disk", "host_memory": "90%"}
    assert len(train(settings(**{**common, **others}), progress).losses) == 2


@pytest.mark.extended
@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({"device": "cpu"}, {"device": "emu:1"}, "--device was cpu and is emu"),
        ({"device": "emu:1"}, {"device": "emu"}, None),
        ({"device_fraction": 0.5}, {"device_fraction": 0.25}, "--device-fraction was 0.5 and is 0.25"),
        ({"device_fraction": 0.5}, {}, "--device-fraction was 0.5 and is 0.0"),
        ({"device_fraction": 0.0}, {}, None),
        ({"device": "cpu", "device_fraction": 0.5}, {"device": "cpu"}, None),
    ],
)
def test_where_updates_and_passes_are_computed_decides_the_last_bits(
    settings: Settings,
    progress: Progress,
    tmp_path: Path,
    begin: Callable[[dict[str, Any]], dict[str, Any]],
    emu_device: ModuleType,
    before: dict[str, Any],
    after: dict[str, Any],
    says: str | None,
):
    device = {"device": "emu:1"}
    common = begin({**device, **before})
    changed = {**{name: value for name, value in common.items() if name not in before}, **device, **after}
    if says is None:
        resumed = train(settings(**changed), progress)
        assert resumed.losses == train(settings(**{**common, "output": tmp_path / "whole"}), progress).losses
        assert_same(final(tmp_path / "out"), final(tmp_path / "whole"))
    else:
        with pytest.raises(TrainInputError, match="is of a run that would end otherwise") as raised:
            train(settings(**changed), progress)
        assert says in str(raised.value)


def test_a_share_that_is_measured_anew_is_told(
    settings: Settings, progress: Progress, begin: Callable[[dict[str, Any]], dict[str, Any]], emu_device: ModuleType
):
    train(settings(**begin({"device": "emu:1", "device_fraction": "auto"})), progress)
    assert any(note.startswith("--device-fraction auto is measured anew") for note in progress.notes)


@pytest.mark.extended
def test_another_text_to_measure_on_is_told_and_the_best_model_is_chosen_anew(
    settings: Settings,
    progress: Progress,
    tmp_path: Path,
    text_file: Path,
    begin: Callable[[dict[str, Any]], dict[str, Any]],
):
    other = tmp_path / "other.txt"
    other.write_text("\u00fc \u4e2d " * 500)  # bytes that were never learned: a higher loss than on the text before
    common = begin({"eval_text": (text_file,), "eval_every": 1})
    result = train(settings(**{**common, "eval_text": (other,)}), progress)
    assert progress.notes[-1].startswith("--eval-text is not what it was: what was measured before does not count")
    assert [measured.step for measured in result.evaluations] == [2]
    assert result.evaluations[0].loss > progress.evaluations[0].loss
    best = load_file(tmp_path / "out" / "best" / "model.safetensors")
    last = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(best[name], weight) for name, weight in last.items())


@pytest.mark.extended
def test_measuring_no_more_is_told(
    settings: Settings, progress: Progress, text_file: Path, begin: Callable[[dict[str, Any]], dict[str, Any]]
):
    common = begin({"eval_text": (text_file,), "eval_every": 1})
    train(settings(**{**common, "eval_text": (), "eval_every": None}), progress)
    assert progress.notes[-1].startswith("--eval-text was given and is not: what was")


def test_fewer_steps_matter_to_a_schedule_that_ends_with_them(
    settings: Settings, progress: Progress, crash_at: Callable[[int], None]
):
    common = {"save_every": 2, "schedule": "linear"}
    crash_at(3)
    with pytest.raises(CrashError):
        train(settings(steps=4, **common), progress)
    with pytest.raises(TrainInputError, match="--steps was 4 and is 5"):
        train(settings(steps=5, **common), progress)


@pytest.mark.extended
def test_a_checkpoint_elsewhere_is_gone_on_from_when_named(
    settings: Settings, progress: Progress, tmp_path: Path, crashed: dict[str, Any]
):
    whole = train(settings(output=tmp_path / "whole", **crashed), progress)
    for number, place in enumerate((".", "checkpoints", "checkpoints/step-00000002")):
        output = tmp_path / f"resumed-{number}"
        resumed = train(settings(output=output, resume=tmp_path / "out" / place, **crashed), progress)
        assert resumed.losses == whole.losses
        assert_same(final(output), final(tmp_path / "whole"))
    with pytest.raises(TrainInputError, match=r"--resume: .*nothing has no whole checkpoint"):
        train(settings(resume=tmp_path / "nothing", output=tmp_path / "new", **crashed), progress)
    with pytest.raises(TrainInputError, match=r"--resume: .*new has no whole checkpoint"):
        train(settings(resume=True, output=tmp_path / "new", **crashed), progress)


def test_a_finished_run_is_not_trained_again(settings: Settings, progress: Progress, crashed: dict[str, Any]):
    train(settings(**crashed), progress)
    with pytest.raises(TrainInputError, match="is not empty"):
        train(settings(**crashed), progress)


@pytest.mark.core(number=signal.SIGTERM)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_saves_and_the_same_command_goes_on(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
):
    command = [*arguments, "--device-memory", "70%", "--schedule", "linear", "--steps", "6", "--save-every", "4"]
    plain = Run.step

    def asked(self: Run, batches: Any) -> float:
        loss = plain(self, batches)
        if not (tmp_path / "asked").exists():
            (tmp_path / "asked").touch()
            os.kill(os.getpid(), number)
        return loss

    monkeypatch.setattr(Run, "step", asked)
    assert main(command) == 3
    shown = capsys.readouterr()
    assert "stopping after this step, then saving" in shown.err
    assert "1 step (stopped on request)" in shown.out
    assert f"checkpoint in {tmp_path / 'out' / 'checkpoints' / 'step-00000001'}; the same command goes on" in shown.out
    assert not (tmp_path / "out" / "training.json").exists()
    assert main(command) == 0
    assert "going on from" in capsys.readouterr().err
    assert main([*command, "--output", str(tmp_path / "whole"), "--save-every", "6"]) == 0
    losses = [json.loads((tmp_path / name / "training.json").read_text())["losses"] for name in ("out", "whole")]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "whole")]
    assert weights[0] == weights[1]


@pytest.mark.extended
def test_a_run_that_was_killed_goes_on_from_the_last_whole_checkpoint(arguments: list[str], tmp_path: Path):
    command = [*arguments, "--steps", "60", "--save-every", "2", "--keep", "3"]
    process = subprocess.Popen([sys.executable, "-m", "headrace", *command], stderr=subprocess.PIPE, text=True)
    with process:
        for line in process.stderr or ():
            if line.startswith("step 5/"):
                break
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert main(command) == 0
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert names == ["run.json", "step-00000056", "step-00000058", "step-00000060"]
    assert main([*command, "--output", str(tmp_path / "whole")]) == 0
    assert_same(final(tmp_path / "out"), final(tmp_path / "whole"))
