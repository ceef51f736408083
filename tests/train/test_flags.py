"""Does each flag do what it says? Where none of the other files says so."""

import argparse
import dataclasses
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

import headrace
from headrace.cli.main import build_parser, main
from headrace.cli.train import run
from headrace.errors import TrainInputError
from headrace.train import placement, resume, trainer
from headrace.train.config import OPTIMIZERS, TrainConfig
from headrace.train.optimizer import make_optimizer, make_schedule
from headrace.train.progress import Progress
from headrace.train.trainer import train
from tests.train.conftest import train_plainly

Settings = Callable[..., TrainConfig]


def parsed(*flags: str, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """What the command line makes of these flags."""
    made: list[TrainConfig] = []

    def take(config: TrainConfig, progress: Progress) -> None:
        made.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "train", take)
    common = [("--text", "a"), ("--output", "b"), ("--disk", "d"), ("--eval-text", "e")]
    line = [word for pair in common if pair[0] not in flags for word in pair]
    assert main(["train", *line, *flags]) == 130
    return made[0]


# Flags of each type of setting, of which all others are: how they are given, and what a run is told.
FLAGS: dict[str, tuple[str, Any]] = {
    "text": ("--text one two", (Path("one"), Path("two"))),
    "include": ("--include *.py *.c", ("*.py", "*.c")),
    "exclude": ("--exclude tests/*", ("tests/*",)),
    "packing": ("--no-packing", False),
    "sequence_length": ("--sequence-length 8", 8),
    "output": ("--output other", Path("other")),
    "lora_alpha": ("--lora-alpha 32 --lora-rank 8 --model m", 32.0),
    "lora_targets": ("--lora-targets q_proj v_proj --lora-rank 8 --model m", ("q_proj", "v_proj")),
    "device": ("--device cpu", "cpu"),
    "device_memory": ("--device-memory 25%", "25%"),
    "disk": ("--disk e", Path("e")),
    "blocks": ("--blocks model.layers.* lm_head", ("model.layers.*", "lm_head")),
    "prefetch": ("--prefetch 2", 2),
    "gradient_checkpointing": ("--gradient-checkpointing", True),
    "micro_batches_together": ("--micro-batches-together 2 --accumulate 4", 2),
    "offload_activations": ("--offload-activations layers=2 tier=disk", ("layers=2", "tier=disk")),
    "optimizer": ("--optimizer lion", "lion"),
    "state_dtype": ("--state-dtype 8bit", "8bit"),
    "device_fraction": ("--device-fraction 0.5", 0.5),
    "learning_rate": ("--learning-rate 1e-3", 1e-3),
    "max_grad_norm": ("--max-grad-norm 0", 0.0),
    "compare_plain": ("--compare-plain 7", 7),
    "resume": ("--resume", True),
}


def test_every_setting_has_a_flag():
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    command = build_parser().commands["train"]
    options = {option for action in command._actions for option in action.option_strings}
    known = {"-h", "--help", "--config", *("--" + name.replace("_", "-") for name in names)}
    assert options == known | {"--no-packing"}


def test_what_may_differ_when_a_run_goes_on_are_settings():
    """A name that is none would leave the setting that it means among those that may not."""
    assert {field.name for field in dataclasses.fields(TrainConfig)} > resume._MAY_DIFFER


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_becomes_its_setting(monkeypatch: pytest.MonkeyPatch, name: str):
    flags, value = FLAGS[name]
    assert getattr(parsed(*flags.split(), monkeypatch=monkeypatch), name) == value
    if name == "resume":
        assert parsed("--resume", "there", monkeypatch=monkeypatch).resume == Path("there")


def test_help_says_each_default_once():
    text = re.sub(r"\s+", " ", build_parser().commands["train"].format_help())
    assert "--keep N checkpoints to keep (default: 2)" in text
    assert "3 stopped on request after a checkpoint was saved" in text
    assert text.count("(default: the accelerator, else cpu)") == 1


def test_what_is_not_given_is_named():
    for given, missing in (({"text": (Path("a"),)}, "no output is given"), ({"output": Path("b")}, "no text is given")):
        with pytest.raises(TrainInputError, match=missing):
            TrainConfig(**given)


# memory ---------------------------------------------------------------------------------------------------------------
def test_memory_flags_reach_offload(
    settings: Settings, progress: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: dict[str, Any] = {}
    real = headrace.offload

    def offload(model: Any, **given: Any) -> Any:
        asked.update(given)
        return real(model, **given)

    monkeypatch.setattr(headrace, "offload", offload)
    train(
        settings(
            blocks=("model.layers.*",),
            resident=("lm_head",),
            prefetch=1,
            param_dtype="bfloat16",
            grad_dtype="float32",
            offload_activations=("layers=2", "min_bytes=1KiB", "modules=*.mlp,*.self_attn"),
        ),
        progress,
    )
    assert asked["blocks"] == ["model.layers.*"]
    assert asked["resident"] == ("lm_head",)
    assert asked["prefetch"] == 1
    assert asked["param_dtype"] is torch.bfloat16
    assert asked["grad_dtype"] is torch.float32
    assert asked["activations"] == {"layers": 2, "min_bytes": "1KiB", "modules": ["*.mlp", "*.self_attn"]}


@pytest.mark.parametrize(("given", "becomes"), [(("64KiB",), "64KiB"), (("auto",), "auto"), (("lm_*",), ["lm_*"])])
def test_blocks_are_a_size_or_patterns(given: tuple[str, ...], becomes: Any):
    assert placement._blocks(given) == becomes


def test_activations_leave_and_the_losses_stay(settings: Settings, progress: Progress, emu_device: ModuleType):
    common = {"device": "emu:1", "device_memory": "75%"}
    offloaded = train(settings(compare_plain=3, offload_activations=("min_bytes=1KiB",), **common), progress)
    assert offloaded.losses == offloaded.plain_losses
    assert offloaded.report is not None
    assert "activations" in str(offloaded.report)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_weights_may_stay_on_the_device_with_a_share_of_the_state(
    settings: Settings, progress: Progress, emu_device: ModuleType, fraction: float
):
    losses, _ = train_plainly(settings(device="emu:1"))
    staying = train(settings(device="emu:1", device_fraction=fraction, offload_activations=()), progress)
    assert staying.stats is None
    assert staying.losses == pytest.approx(losses, abs=1e-5)
    if fraction == 0:
        assert staying.losses == losses


def test_a_share_of_the_state_on_a_device_that_is_the_cpu_is_told(settings: Settings, progress: Progress):
    train(settings(device_fraction=0.5, steps=1), progress)
    assert progress.notes[0] == "--device-fraction: the device is the CPU, so all state is in host memory"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device_fraction": 2.0}, "--device-fraction is 2.0; give 0 to 1, or auto"),
        ({"device_fraction": 0.5, "resident": ("a",)}, "weights that stay on the device, so --resident does not apply"),
        ({"device_fraction": 0.5, "overlap": "forward"}, "so --overlap does not apply"),
        ({"device_fraction": 0.5, "compare_plain": 1}, "--compare-plain is for updates in host memory"),
        ({"optimizer_tier": "disk"}, "--optimizer-tier disk needs a directory; name one with --disk"),
        ({"overlap": "backward"}, "give --max-grad-norm 0, or --overlap forward"),
        ({"overlap": "backward", "max_grad_norm": 0.0, "accumulate": 2}, "leave --accumulate out"),
        ({"state_dtype": "8bit", "optimizer": "muon"}, "--state-dtype is float32 with --optimizer muon"),
        ({"optimizer": "adam2"}, "--optimizer is 'adam2'; give one of adamw, adam"),
        ({"offload_activations": ("layers",)}, "--offload-activations layers: give NAME=VALUE"),
        (
            {"offload_activations": ("layer=2",)},
            "--offload-activations: activations has no setting 'layer'; it has layers",
        ),
        ({"offload_activations": ("fraction=2",)}, "--offload-activations: fraction=2; give a number from 0 to 1"),
        ({"offload_activations": ("tier=disk",)}, "--offload-activations tier=disk needs a directory"),
        ({"param_dtype": "bfloat16", "compare_plain": 1}, "--compare-plain is for weights in their own dtype"),
        ({"lora_dropout": 1.0}, "--lora-dropout is 1.0"),
        ({"save_every": 0}, "--save-every is 0; give 1 or more"),
        ({"keep": 0}, "--keep is 0; give 1 or more"),
        ({"schedule": "square"}, "--schedule is 'square'; give one of constant, linear, cosine"),
    ],
)
def test_values_that_no_run_could_use_are_named(settings: Settings, changes: dict[str, Any], says: str):
    with pytest.raises(TrainInputError) as raised:
        settings(**changes)
    assert says in str(raised.value)


def test_a_directory_among_the_activations_settings_is_told_of_once(settings: Settings):
    with pytest.raises(TrainInputError) as raised:
        settings(offload_activations=("disk=here",))
    assert str(raised.value) == "--offload-activations has no setting 'disk'; name the directory with --disk"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--model m --layers 2 --hidden-size 64", "so --layers, --hidden-size do not apply to it; leave"),
        ("--model m --layers 12", "--model names a model that has its own sizes, so --layers does not apply"),
        ("--lora-alpha 16", "--lora-alpha does nothing without --lora-rank, which adds the adapters; give that too"),
        ("--lora-dropout 0.1 --lora-targets q_proj", "--lora-dropout, --lora-targets do nothing without --lora-rank"),
        (
            "--device-fraction 0 --blocks 1MiB --prefetch 2",
            "so --blocks, --prefetch do not apply; leave either side out",
        ),
        (
            "--micro-batches-together 2",
            "does nothing for one micro-batch in a step; give --accumulate, too, or leave it",
        ),
        ("--device-fraction 0 --accumulate 2 --micro-batches-together 2", "so --micro-batches-together does not apply"),
        ("--steps 3 --epochs 1", "--steps and --epochs both say how long the run is; leave one of them out"),
        ("--eval-every 2", "--eval-every needs something to measure on; name it with --eval-text"),
        ("--config {}/a.yaml --config={}/b.yaml", "--config is given more than once; put both into one file"),
        ("--text c", "--text is given more than once; give all its values together: --text ONE TWO"),
        ("--eval_text=c --eval-text d", "--eval-text is given more than once"),
        ("--config {}/a.yaml --steps 3", "--steps and --epochs both say how long the run is"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, says: str
):
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("epochs: 1\n")
    try:
        code = main(["train", "--text", "a", "--output", "b", *flags.format(tmp_path, tmp_path).split()])
    except SystemExit as left:  # argparse
        code = left.code
    assert code == 2
    error = capsys.readouterr().err
    assert says.format(tmp_path, tmp_path) in error
    assert len(error.splitlines()) == 1


# optimizers -----------------------------------------------------------------------------------------------------------
@pytest.mark.core(rule=["adamw", "muon"])
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_each_optimizer_equals_the_plain_run(settings: Settings, progress: Progress, rule: str):
    result = train(settings(optimizer=rule, compare_plain=3, device_memory="70%", learning_rate=1e-2), progress)
    assert result.losses == result.plain_losses
    assert len(set(result.losses)) == 3


@pytest.mark.extended
@pytest.mark.parametrize(
    "changes",
    [
        {"state_dtype": "bfloat16"},
        {"state_dtype": "8bit"},
        {"overlap": "forward"},
        {"overlap": "forward", "accumulate": 3, "micro_batches_together": "all"},
        {"disk": "disk", "accumulate": 3, "micro_batches_together": "all"},
        {"overlap": "backward", "max_grad_norm": 0.0},
        {"overlap": "backward", "max_grad_norm": 0.0, "optimizer": "muon"},
        {"optimizer_tier": "disk", "disk": "disk"},
        {"optimizer_tier": "disk", "disk": "disk", "optimizer": "muon"},
        {"max_grad_norm": 0.0},
        {"dtype": "bfloat16", "disk": "disk"},
    ],
    ids=lambda changes: "-".join(map(str, changes)),
)
def test_where_and_how_state_is_kept_changes_nothing_to_a_plain_run(
    settings: Settings, progress: Progress, tmp_path: Path, changes: Mapping[str, Any]
):
    changes = {**changes, **({"disk": tmp_path / "disk"} if "disk" in changes else {})}
    result = train(settings(compare_plain=3, device_memory="70%", learning_rate=1e-2, **changes), progress)
    assert result.losses == result.plain_losses
    assert len(set(result.losses)) == 3


def made(settings: Settings, *, plain: bool = False, **changes: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    config = settings(**changes)
    from headrace.train.model import load_model

    return make_optimizer(load_model(config).model, config, plain=plain)


def test_settings_reach_the_optimizer(settings: Settings, tmp_path: Path):
    lion = made(settings, optimizer="lion", weight_decay=0.5)
    assert type(lion) is headrace.optim.Lion
    assert lion.defaults["weight_decay"] == 0.5
    for plain in (False, True):
        muon = made(settings, optimizer="muon", plain=plain)
        assert type(muon) is headrace.optim.Muon
        matrices, others = muon.param_groups
        assert len(matrices["params"]) == 4 * 7  # of four layers; not of embedding and head
        assert others["use_muon"] is False
    assert type(made(settings, plain=True)) is torch.optim.AdamW
    assert type(made(settings, plain=True, dtype="bfloat16")) is headrace.optim.AdamW


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0, 0.5, 1, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0, 0.5, 1, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_schedules_rise_and_fall(settings: Settings, schedule: str, rates: list[float]):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    follows = make_schedule(optimizer, settings(schedule=schedule, warmup_steps=2), steps=6)
    seen = []
    for _ in rates:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        follows.step()
    assert seen == pytest.approx(rates, abs=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 9), (3, 11), (7, 5)])
def test_schedules_are_those_of_transformers(settings: Settings, schedule: str, warmup: int, steps: int):
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3) for _ in range(2)]
    name = "constant_with_warmup" if schedule == "constant" else schedule
    theirs = transformers.get_scheduler(name, optimizers[0], num_warmup_steps=warmup, num_training_steps=steps)
    ours = make_schedule(optimizers[1], settings(schedule=schedule, warmup_steps=warmup), steps=steps)
    for _ in range(steps + 2):
        assert ours.get_last_lr() == theirs.get_last_lr()
        for optimizer, follows in zip(optimizers, (theirs, ours), strict=True):
            optimizer.step()
            follows.step()


def test_the_gradient_is_that_of_all_tokens_however_they_are_cut_into_micro_batches(
    settings: Settings, progress: Progress, tmp_path: Path
):
    """Examples of unequal length: a mean of means would weigh the tokens of short ones more."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f'{{"text": "{"x" * (3 * n + 1)}"}}\n' for n in range(8)))
    common = {"text": (path,), "packing": False, "steps": 3, "learning_rate": 1e-2}
    one = train(settings(batch_size=4, output=tmp_path / "one", **common), progress)
    four = train(settings(batch_size=1, accumulate=4, output=tmp_path / "four", **common), progress)
    assert four.losses == pytest.approx(one.losses, rel=1e-5)


def test_a_command_without_the_libraries_names_what_to_install(monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasets.utils.logging", None)
    arguments = argparse.Namespace(text=[Path("a")], output=Path("b"))
    with pytest.raises(TrainInputError, match=r"datasets.* is not installed; run: pip install (.*)") as raised:
        run(arguments)
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert shlex.split(str(raised.value).partition("pip install ")[2]) == extras["train"]
