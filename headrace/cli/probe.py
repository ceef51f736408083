"""How does the command line measure a machine? The arguments of `headrace probe`."""

import argparse
from pathlib import Path
from typing import Any

from headrace.ahead import probe
from headrace.errors import HeadraceError


class ProbeInputError(HeadraceError, ValueError):
    """What was given cannot be measured."""


def add_probe_command(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "probe",
        help="measure this machine: links, disk, memory, update, matrix products",
        description="Measure this machine, in under a minute; the result is kept for headrace plan.",
        allow_abbrev=False,
    )
    parser.add_argument("--device", metavar="DEVICE", help="compute device (default: the accelerator, else cpu)")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="whose disk is measured (default: temporary files')")
    parser.add_argument("--no-cache", action="store_true", help="do not keep the result")
    parser.add_argument("--json", action="store_true", help="the machine as JSON")
    parser.set_defaults(run=run_probe)


def run_probe(arguments: argparse.Namespace) -> int:
    try:
        found = probe(arguments.device, disk=arguments.disk, cache=not arguments.no_cache)
    except HeadraceError:
        raise
    except (ValueError, OSError) as error:
        raise ProbeInputError(str(error)) from error
    print(found.hardware.to_json() if arguments.json else found.to_text(), end="")
    return 0
