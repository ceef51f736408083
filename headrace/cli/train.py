"""How does the command line ask for a training run? The arguments of `headrace train`, and what it prints."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.config_file import with_config_file
from headrace.cli.progress import BarProgress, LineProgress, NoProgress, describe_evaluation
from headrace.config import counted, format_bytes
from headrace.errors import TrainInputError
from headrace.train.config import TrainConfig
from headrace.train.idle import refuse_idle
from headrace.train.progress import Progress
from headrace.train.settings import Declared, declared, flag

if TYPE_CHECKING:
    from headrace.train.trainer import TrainResult

STOPPED = 3
LIBRARIES = "datasets peft PyYAML 'transformers>=5'"  # those of the extra `train`

EPILOG = """\
Memory is bytes, text such as 8GiB, or a share of the model's weights such as 25%.
Ctrl-C or SIGTERM ends the run after the current step and saves a checkpoint; the same command goes on from there, as
if nothing had happened. A second Ctrl-C ends it at once.
On several devices: torchrun --nproc-per-node N -m headrace train ..., with --accumulate a multiple of N. A step is of
--batch-size times --accumulate sequences on any number of ranks; --host-memory and --disk are for all ranks of a
machine.
Exit codes: 0 trained and saved, 1 the training failed or memory ran out, 2 the input cannot be used,
3 stopped on request after a checkpoint was saved, 130 stopped at once.
"""


def add_train_command(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "train",
        help="train a causal language model within memory budgets",
        description="Train a causal language model on texts or conversations, within memory budgets.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file with any of these flags; those given here win")
    groups: dict[str, Any] = {}
    for setting in declared(TrainConfig):
        group = groups.setdefault(setting.group, None) or parser.add_argument_group(setting.group)
        groups[setting.group] = group
        group.add_argument(flag(setting.name), help=setting.help.replace("%", "%%"), **_form(setting))
    parser.set_defaults(run=run_train)


def _form(setting: Declared) -> dict[str, Any]:
    """What argparse is told beside name and help."""
    if setting.default is False:
        return {"action": "store_true"}
    if setting.default is True or setting.name == "packing":
        return {"action": argparse.BooleanOptionalAction}
    form: dict[str, Any] = {"type": setting.kind, "nargs": setting.several}
    if setting.several == "?":
        form["const"] = True
    if setting.choices is None:
        return {**form, "metavar": setting.metavar}
    return {**form, "choices": setting.choices}


def rewrite(arguments: list[str]) -> list[str]:
    """The arguments of `headrace train` with those of a config file."""
    _refuse_twice(arguments)
    return with_config_file(arguments)


def _refuse_twice(arguments: list[str]) -> None:
    """Of lists, the second would silently take the place of the first."""
    names = [argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")]
    for setting in declared(TrainConfig):
        if setting.several in ("+", "*") and names.count(flag(setting.name)) > 1:
            name = flag(setting.name)
            raise TrainInputError(f"{name} is given more than once; give all its values together: {name} ONE TWO")


def run_train(arguments: argparse.Namespace) -> int:
    known = {setting.name for setting in declared(TrainConfig)}
    given = {name: value for name, value in vars(arguments).items() if name in known}
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    config = TrainConfig(**settings)
    refuse_idle(config, given)  # those that are given as they are by themselves, too
    try:
        # Here and not above: they take seconds to import, and `headrace --help` does not need them.
        from datasets.utils.logging import CRITICAL, disable_progress_bar, set_verbosity
        from transformers.utils import logging

        from headrace.train.ranks import is_first_rank
        from headrace.train.trainer import prepare, train
    except ModuleNotFoundError as error:
        raise TrainInputError(f"{error.name} is not installed; run: pip install {LIBRARIES}") from error
    logging.disable_progress_bar()  # ours is enough
    disable_progress_bar()
    set_verbosity(CRITICAL)  # what fails there is told as an error of ours
    first = is_first_rank()
    progress: Progress = NoProgress() if not first else BarProgress() if sys.stderr.isatty() else LineProgress()
    if config.data_only:
        if first:
            prepare(config, progress)
        return 0
    if config.tensorboard is not None and first:
        from headrace.train.scalars import ScalarProgress

        progress = ScalarProgress(progress, config.tensorboard)
    result = train(config, progress)
    if first:
        print(summary(result, config.output_directory))
    return 0 if result.checkpoint is None else STOPPED


def summary(result: "TrainResult", output: Path) -> str:
    """What a run that is over prints: the comparison, the report, and where the model is."""
    lines = [*_comparison(result)]
    if result.stats is not None and result.report is not None:
        peak_bytes = result.stats.device_peak_bytes
        lines += [
            f"weights: {format_bytes(result.weight_bytes)}, of which at most {format_bytes(peak_bytes)} "
            f"({peak_bytes / result.weight_bytes:.0%}) were on the device at once",
            str(result.report).rstrip(),
            "",
        ]
    if result.losses:
        lines += [
            f"{counted(len(result.losses), 'step')}{' (stopped on request)' if result.checkpoint else ''}: "
            f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}, "
            f"{result.tokens / max(result.seconds, 1e-9):,.0f} tokens/s, {result.seconds:.1f} s"
        ]
    if result.evaluations:
        last, best = result.evaluations[-1], min(result.evaluations, key=lambda measured: measured.loss)
        lines += [
            f"last {describe_evaluation(last)}",
            f"best, in {output / 'best'}: {describe_evaluation(best)}",
        ]
    if result.checkpoint is not None:
        lines += [f"checkpoint in {result.checkpoint}; the same command goes on from there"]
    else:
        lines += [f"saved in {output}; load it with AutoModelForCausalLM.from_pretrained({str(output)!r})"]
    return "\n".join(lines)


def _comparison(result: "TrainResult") -> Iterable[str]:
    compared = min(len(result.plain_losses), len(result.losses))
    if not compared:
        return
    yield f"{'step':>6}  {'loss, plain':<22}{'loss, headrace':<22}equal, bit for bit"
    for step in range(compared):
        plain, offloaded = result.plain_losses[step], result.losses[step]
        yield f"{step + 1:>6}  {plain!r:<22}{offloaded!r:<22}{'yes' if plain.hex() == offloaded.hex() else 'NO'}"
    yield ""
