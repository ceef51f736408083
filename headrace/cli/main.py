"""What does `headrace` on the command line do? It reads the arguments, runs one command, and says what went wrong."""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import headrace
from headrace.cli import nearest
from headrace.cli.noise import without_noise
from headrace.errors import HeadraceError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

COMMANDS = {
    "train": "train a causal language model within memory budgets",
    "generate": "write text with a model that is larger than memory",
    "plan": "what a model will hold and how fast it will be, before it runs",
    "probe": "measure this machine: links, disk, memory, update, matrix products",
    "report": "show a run: where its time and memory went",
    "doctor": "what is wrong with this machine for offloading, and the fix",
}


class Parser(argparse.ArgumentParser):
    """argparse's parser, with errors in one line. For an unknown flag, the error names the nearest known one."""

    commands: Mapping[str, "Parser"]

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")

    def known(self, arguments: Sequence[str]) -> list[str]:
        """The arguments in the form that argparse takes. Ends the process if a flag is unknown to this parser.

        argparse itself would first complain of a missing flag, such as the one that was misspelt.
        """
        flags = [option for action in self._actions for option in action.option_strings]
        ours: list[str] = []
        for index, argument in enumerate(arguments):
            name, equals, value = argument.partition("=")
            dashed = name.replace("_", "-")
            if argument == "--":
                return [*ours, *arguments[index:]]
            if re.match(r"-\d", argument) and ours and ours[-1] in flags:  # a number, which argparse takes for a flag
                ours[-1] += f"={argument}"
            elif not name.startswith("--") or name in flags:
                ours.append(argument)
            elif dashed in flags:
                ours.append(f"{dashed}{equals}{value}")
            else:
                self.error(f"there is no flag {name}{nearest(dashed, flags)}")
        return ours


def build_parser(commands: Iterable[str] = COMMANDS) -> Parser:
    """The parser of all commands by name. Only those in `commands` get their arguments."""
    parser = Parser(prog="headrace", description="Train and run PyTorch models that are larger than device memory.")
    parser.add_argument("--version", action="version", version=f"headrace {headrace.__version__}")
    choices = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in COMMANDS.items():
        own = choices.add_parser(
            name, help=about, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name in commands:
            command = importlib.import_module(f"headrace.cli.{name}")
            command.add_arguments(own)
            own.set_defaults(run=command.run)
    parser.commands = choices.choices
    return parser


def _parse(arguments: list[str]) -> argparse.Namespace:
    """The parsed arguments. Ends the process with one line if they cannot be used."""
    command = arguments[0]
    parser = build_parser([command])
    if not command.startswith("-") and command not in COMMANDS:
        parser.error(f"there is no command {command}{nearest(command, COMMANDS)}")
    reader = parser.commands.get(command, parser)
    return parser.parse_args(reader.known(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, or 1 if it failed, or 2 for input that cannot be used."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        build_parser([]).print_help(sys.stderr)
        return BAD_INPUT
    parsed = _parse(given)
    try:
        with without_noise():
            code: int = parsed.run(parsed)
    except HeadraceError as error:
        # Errors that are also ValueErrors or TypeErrors are about the user's input; the others happened on the way.
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
