"""How does the command line run a recipe like Megatron-Bridge? `headrace run-recipe --recipe NAME key=value ...`"""

import argparse
import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import Any

from headrace.config import format_bytes
from headrace.errors import TrainInputError

EPILOG = """\
Recipes: qwen3_30b_a3b_pretrain_config, or your own as MODULE:NAME or FILE.py:NAME, a function that returns a
headrace.compat.megatron.ConfigContainer. An override is NAMESPACE.NAME=VALUE, as in
optimizer.optimizer_offload_fraction=0.5; the namespaces are model, optimizer and train.
"""


def add_run_recipe_command(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "run-recipe",
        help="train as a recipe of Megatron-Bridge's kind says",
        description="Train a model as a recipe says, with overrides.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", required=True, metavar="NAME", help="which recipe")
    parser.add_argument("--compare", action="store_true", help="also run it without offloading, and compare losses")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings that differ from the recipe's")
    parser.set_defaults(run=run_run_recipe)


def run_run_recipe(arguments: argparse.Namespace) -> int:
    from headrace.compat.megatron import find_recipe, override

    with _input_errors():
        recipe = find_recipe(arguments.recipe)
    config = recipe()
    with _input_errors():
        override(config, arguments.overrides)
        config.validate()
    stages = config.model.pipeline_model_parallel_size
    if stages != 1:
        print(
            f"model.pipeline_model_parallel_size={stages}: no effect: one process trains on one device", file=sys.stderr
        )
    losses = _run(config)
    if arguments.compare:
        plain = copy.deepcopy(config)
        plain.optimizer.optimizer_cpu_offload = plain.model.cpu_offloading = False
        print("without offloading:")
        delta = max(abs(one - other) for one, other in zip(losses, _run(plain), strict=True))
        print(f"largest difference of a loss: {delta:g}")
    return 0


@contextlib.contextmanager
def _input_errors() -> Iterator[None]:
    """What these calls raise is about the command line; what training raises is not."""
    try:
        yield
    except (ValueError, AttributeError) as error:
        raise TrainInputError(str(error)) from error


def _run(config: Any) -> list[float]:
    from headrace.compat.megatron import run_recipe

    with _input_errors():
        steps = run_recipe(config)
    losses = []
    for step in steps:
        peak = "" if step.device_peak_bytes is None else f", device peak {format_bytes(step.device_peak_bytes)}"
        print(f"iteration {step.number}/{config.train.train_iters}: loss {step.loss:.6f}, {step.seconds:.2f} s{peak}")
        losses.append(step.loss)
    return losses
