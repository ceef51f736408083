"""How does the command line measure a machine? The arguments of `headrace probe`."""

import argparse

from headrace.cli import about_input, path_argument
from headrace.probing import probe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure this machine, in under a minute; the result is kept for headrace plan."
    parser.add_argument("--device", metavar="DEVICE", help="compute device (default: the accelerator, else cpu)")
    parser.add_argument(
        "--disk", type=path_argument, metavar="DIR", help="whose disk is measured (default: temporary files')"
    )
    parser.add_argument("--no-cache", action="store_true", help="do not keep the result")
    parser.add_argument("--json", action="store_true", help="the machine as JSON")


def run(arguments: argparse.Namespace) -> int:
    with about_input(ValueError, OSError):
        found = probe(arguments.device, disk=arguments.disk, cache=not arguments.no_cache)
    print(found.hardware.to_json() if arguments.json else found.to_text(), end="")
    return 0
