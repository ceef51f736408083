"""How does the command line ask for a training run? The arguments of `millrace train`, and what it prints."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.cli.progress import BarProgress, LineProgress
from millrace.config import format_bytes
from millrace.train.config import TrainConfig, TrainInputError
from millrace.train.progress import Progress

if TYPE_CHECKING:
    from millrace.train.trainer import TrainResult

EPILOG = """\
Memory is bytes, text such as 8GiB, or a share of the model's weights such as 25%.
Ctrl-C ends the run after the current step and saves; a second Ctrl-C ends it at once.
Exit codes: 0 trained and saved, 1 the training failed, 2 the input cannot be used.
"""


def add_train_command(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "train",
        help="train a causal language model on text files within memory budgets",
        description="Train a causal language model on text files, within memory budgets.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}

    data = parser.add_argument_group("text")
    data.add_argument("--text", type=Path, nargs="+", required=True, metavar="PATH", help="files and directories")
    data.add_argument(
        "--include", nargs="+", metavar="PATTERN", help="files to take from directories (default: *.txt *.md)"
    )
    data.add_argument("--exclude", nargs="+", metavar="PATTERN", help="files to leave out, such as 'tests/*'")

    model = parser.add_argument_group("model")
    model.add_argument("--model", type=Path, metavar="DIR", help="a transformers model (default: a small Llama)")
    model.add_argument("--layers", type=int, metavar="N", help="layers of the small Llama (default: 12)")
    model.add_argument("--hidden-size", type=int, metavar="N", help="hidden size of the small Llama (default: 192)")
    model.add_argument("--dtype", metavar="DTYPE", help="of the weights: float32 or bfloat16 (default: as saved)")
    model.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the trained model is saved")

    memory = parser.add_argument_group("memory")
    memory.add_argument("--device", metavar="DEVICE", help="compute device (default: the accelerator, else cpu)")
    memory.add_argument("--device-memory", metavar="SIZE", help="for weights on the device (default: what is free)")
    memory.add_argument("--host-memory", metavar="SIZE", help="for weights in host RAM (default: what is free)")
    memory.add_argument(
        "--disk",
        type=Path,
        metavar="DIR",
        help="for weights that fit in neither, and all optimizer state (default: none)",
    )
    memory.add_argument("--gradient-checkpointing", action="store_true", help="recompute activations in backward")

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, metavar="N", help="optimizer steps (default: from --epochs)")
    training.add_argument("--epochs", type=float, metavar="X", help="times through the text (default: 1)")
    for option, kind, text in (
        ("batch-size", int, "sequences in a micro-batch"),
        ("accumulate", int, "micro-batches in a step"),
        ("sequence-length", int, "tokens in a sequence"),
        ("learning-rate", float, "of AdamW"),
        ("warmup-steps", int, "steps over which the learning rate rises"),
        ("weight-decay", float, "of AdamW"),
        ("max-grad-norm", float, "gradients are clipped to this norm"),
        ("seed", int, "of the weights, the order of the text and dropout"),
    ):
        default = defaults[option.replace("-", "_")]
        training.add_argument(f"--{option}", type=kind, metavar="N", help=f"{text} (default: {default})")
    training.add_argument(
        "--compare-plain",
        type=int,
        metavar="N",
        help="first run N steps without millrace, and fail when a loss differs in a single bit",
    )
    training.add_argument(
        "--tensorboard", type=Path, metavar="DIR", help="write loss, speed and bytes of each step there"
    )
    training.add_argument("--plain", action="store_true", help="train without millrace, for comparison")
    parser.set_defaults(run=run_train)


def run_train(arguments: argparse.Namespace) -> int:
    given = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(TrainConfig)
        if getattr(arguments, field.name) is not None
    }
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    config = TrainConfig(**given)
    try:
        # Here and not above: transformers takes seconds to import, and `millrace --help` does not need it.
        from transformers.utils.logging import disable_progress_bar

        from millrace.train.trainer import train
    except ModuleNotFoundError as error:
        raise TrainInputError(f"{error.name} is not installed; run: pip install 'millrace[transformers]'") from error
    disable_progress_bar()  # ours is enough
    progress: Progress = BarProgress() if sys.stderr.isatty() else LineProgress()
    if arguments.tensorboard is not None:
        from millrace.train.scalars import ScalarProgress

        progress = ScalarProgress(progress, arguments.tensorboard)
    result = train(config, progress)
    print(summary(result, config.output))
    return 0


def summary(result: "TrainResult", output: Path) -> str:
    """What a finished run prints: the comparison, the report, and where the model is."""
    lines = []
    if result.plain_losses and result.losses:
        compared = min(len(result.plain_losses), len(result.losses))
        lines += [f"{'step':>6}  {'loss, plain':<22}{'loss, millrace':<22}equal, bit for bit"]
        for step in range(compared):
            plain, offloaded = result.plain_losses[step], result.losses[step]
            equal = "yes" if plain.hex() == offloaded.hex() else "NO"
            lines += [f"{step + 1:>6}  {plain!r:<22}{offloaded!r:<22}{equal}"]
        lines += [""]
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
            f"{len(result.losses)} steps{' (stopped on request)' if result.stopped else ''}: "
            f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}, "
            f"{result.tokens / result.seconds:,.0f} tokens/s, {result.seconds:.1f} s"
        ]
    lines += [f"saved in {output}; load it with AutoModelForCausalLM.from_pretrained({str(output)!r})"]
    return "\n".join(lines)
