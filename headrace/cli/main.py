"""What does `headrace` on the command line do? It reads the arguments, runs one command, and says what went wrong."""

import argparse
import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import headrace
from headrace.cli.config_file import nearest
from headrace.cli.doctor import add_doctor_command
from headrace.cli.generate import add_generate_command
from headrace.cli.noise import without_noise
from headrace.cli.plan import add_plan_command
from headrace.cli.probe import add_probe_command
from headrace.cli.report import add_report_command
from headrace.cli.train import add_train_command, rewrite
from headrace.errors import HeadraceError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """argparse, with an error in one line."""

    commands: Mapping[str, argparse.ArgumentParser]

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser() -> Parser:
    parser = Parser(prog="headrace", description="Train and run PyTorch models that are larger than device memory.")
    parser.add_argument("--version", action="version", version=f"headrace {headrace.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_train_command(commands)
    add_generate_command(commands)
    add_plan_command(commands)
    add_probe_command(commands)
    add_report_command(commands)
    add_doctor_command(commands)
    parser.commands = commands.choices
    return parser


def _parse(parser: Parser, arguments: list[str]) -> argparse.Namespace:
    """Ends the process with a line that names the nearest command or flag where one is unknown."""
    command = arguments[0] if arguments else ""
    if command and not command.startswith("-") and command not in parser.commands:
        parser.error(f"there is no command {command}{nearest(command, list(parser.commands))}")
    reader = parser.commands.get(command, parser)
    known = [option for action in reader._actions for option in action.option_strings]
    # Before argparse looks, which names what is missing first, such as the flag that was misspelt.
    ours: list[str | None] = list(arguments)
    for index, argument in enumerate(itertools.takewhile(lambda argument: argument != "--", arguments)):
        name, equals, value = argument.partition("=")
        if re.match(r"-\d", argument) and index and ours[index - 1] in known:  # argparse would take it for a flag
            ours[index - 1 : index + 1] = [None, f"{ours[index - 1]}={argument}"]
        if name.startswith("--") and name not in known:
            dashed = name.replace("_", "-")
            if dashed not in known:
                reader.error(f"there is no flag {name}{nearest(dashed, known)}")
            ours[index] = f"{dashed}{equals}{value}"
    return parser.parse_args([argument for argument in ours if argument is not None])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 when it failed, 2 for input that cannot be used."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        build_parser().print_help(sys.stderr)
        return BAD_INPUT
    try:
        if given[:1] == ["train"]:
            given = ["train", *rewrite(given[1:])]
        parsed = _parse(build_parser(), given)
    except HeadraceError as error:
        print(f"headrace {given[0]}: {error}", file=sys.stderr)
        return BAD_INPUT
    try:
        with without_noise():
            code: int = parsed.run(parsed)
    except HeadraceError as error:
        # Errors that are also ValueErrors or TypeErrors are about what the user gave; the others happened on the way.
        print(f"headrace {parsed.command}: {error}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, ValueError | TypeError) else FAILED
    except KeyboardInterrupt:
        print(f"headrace {parsed.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output is gone; flushing it at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code


if __name__ == "__main__":
    sys.exit(main())
