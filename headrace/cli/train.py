"""How does the command line ask for a training run? The arguments of `headrace train`, and what it prints."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from headrace.cli import nearest, path_argument
from headrace.config import counted, format_bytes
from headrace.errors import TrainInputError
from headrace.train.config import TrainConfig, flag, idle, kinds_of, words_of
from headrace.train.progress import BarProgress, LineProgress, Progress, ScalarProgress

if TYPE_CHECKING:
    from headrace.train.trainer import TrainResult

STOPPED = 3
LIBRARIES = "datasets peft PyYAML 'transformers>=5'"  # the dependencies of the extra `train`

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
_METAVARS = {int: "N", float: "X", Path: "DIR"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train a causal language model on texts or conversations, within memory budgets."
    parser.epilog = EPILOG
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument(
        "--config", action=_Once, metavar="FILE", help="a YAML file with any of these flags; those given here win"
    )
    hints, group = get_type_hints(TrainConfig), parser.add_argument_group("data")
    for field in dataclasses.fields(TrainConfig):
        about = field.metadata
        if about["group"] not in (None, group.title):
            group = parser.add_argument_group(about["group"])
        form = _form(hints[field.name], field.default, about["metavar"])
        group.add_argument(flag(field.name), help=about["help"].replace("%", "%%"), **form)
    parser.set_defaults(parse=parser.parse_args)


def _form(hint: Any, default: Any, metavar: str | None) -> dict[str, Any]:
    """The arguments of `add_argument` for a setting of this type, besides name and help."""
    first, *others = kinds_of(hint)
    if first is bool:
        return {"action": "store_true" if default is False else argparse.BooleanOptionalAction}
    if get_origin(first) is Literal:
        return {"choices": get_args(first)}
    if get_origin(first) is tuple:
        several = "*" if default is None else "+"
        return {"action": _Once, "type": _type(get_args(first)[0]), "nargs": several, "metavar": metavar}
    form = {"type": _type(str if str in others else first), "metavar": metavar or _METAVARS.get(first)}
    words = words_of(hint)
    if words == (True,):  # the flag without a value means True
        return {**form, "nargs": "?", "const": True}
    return {**form, "type": _number_or_word(first, words)} if words else form


def _type(kind: Any) -> Callable[[str], Any]:
    return path_argument if kind is Path else kind


def _number_or_word(number: Callable[[str], Any], words: Iterable[str]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return text if text in words else number(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number, nor {' or '.join(words)}") from None

    return read


class _Once(argparse.Action):
    """Refuses a flag that is given twice, because the second list would silently replace the first."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if hasattr(namespace, self.dest):
            how = f"give all its values together: {option_string} ONE TWO" if self.nargs else "put both into one file"
            parser.error(f"{option_string} is given more than once; {how}")
        setattr(namespace, self.dest, values)


def flags_of(file: Path) -> list[str]:
    """The keys of a YAML file as flags and their values. Raises TrainInputError for a key that is not a flag."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise TrainInputError(f"{error.name} is not installed; run: pip install PyYAML") from error

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainInputError(f"--config {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TrainInputError(f"--config {file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict | None):
        raise TrainInputError(f"--config {file} holds a {type(content).__name__}; write a flag and its value in a line")
    hints = get_type_hints(TrainConfig)
    flags: list[str] = []
    for key, value in (content or {}).items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name not in hints:
            raise TrainInputError(
                f"--config {file}: {key!r} is no flag of headrace train{nearest(name, hints)}; see headrace train"
                " --help"
            )
        flags += _flag_of(name, value, several=get_origin(kinds_of(hints[name])[0]) is tuple)
    return flags


def _flag_of(name: str, value: Any, *, several: bool) -> list[str]:
    """One key as arguments. null counts as not given; so does false, except for a flag that has a --no- form."""
    if value is None or (value is False and name != "packing"):
        return []
    if isinstance(value, bool):
        return [flag(name) if value else flag(name).replace("--", "--no-", 1)]
    if isinstance(value, dict):  # a flag whose values are settings by name
        value = [f"{key}={each}" for key, each in value.items()]
    values = value if isinstance(value, list) else [value]
    return [flag(name), *map(str, values)] if several else [f"{flag(name)}={each}" for each in values]


def run(arguments: argparse.Namespace) -> int:
    config = _config(vars(arguments))
    try:
        # Imported here because they take seconds, and `headrace train --help` does not need them.
        from datasets.utils.logging import CRITICAL, disable_progress_bar, set_verbosity
        from transformers.utils import logging

        from headrace.train.ranks import is_first_rank
        from headrace.train.trainer import train
    except ModuleNotFoundError as error:
        raise TrainInputError(f"{error.name} is not installed; run: pip install {LIBRARIES}") from error
    logging.disable_progress_bar()  # headrace shows its own
    disable_progress_bar()
    set_verbosity(CRITICAL)  # failures there are raised as errors of headrace
    first = is_first_rank()
    progress = Progress() if not first else BarProgress() if sys.stderr.isatty() else LineProgress()
    if config.tensorboard is not None and first:
        progress = ScalarProgress(progress, config.tensorboard)
    result = train(config, progress)
    if first:
        print(summary(result, config.output))
    return 0 if result.checkpoint is None else STOPPED


def _config(given: Mapping[str, Any]) -> TrainConfig:
    """The config of the given flags, which go before those of the file that --config names."""
    if "config" in given:
        given = {**vars(given["parse"](flags_of(Path(given["config"])))), **given}
    settings: dict[str, Any] = {
        field.name: tuple(given[field.name]) if isinstance(given[field.name], list) else given[field.name]
        for field in dataclasses.fields(TrainConfig)
        if field.name in given
    }
    config = TrainConfig(**settings)
    for problem in idle(config, settings):  # flags that are given their default count, too
        raise TrainInputError(problem)
    return config


def summary(result: "TrainResult", output: Path) -> str:
    """The text that is printed after a run: the comparison, the report, and where the model is."""
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
            f"last {last}",
            f"best, in {output / 'best'}: {best}",
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
