"""How does the command line show a finished run? The arguments of `headrace report`."""

import argparse
from pathlib import Path

from headrace.cli import InputError, about_input, path_argument
from headrace.report import Report, RunRecord

RECORD = "headrace-run.json"  # in the output directory of a run
_WHAT_TO_GIVE = "give the --output of a headrace train that has ended, or what handle.report().save(path) has written"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show a run that handle.report().save(path), or headrace train, has written."
    parser.epilog = (
        "A block of layers visits the device: its weights are there while it computes. A stall is the time in which a\n"
        "visit waited for a copy; the report names both."
    )
    parser.add_argument(
        "record", type=path_argument, metavar="RUN", help="the record, or a directory with headrace-run.json"
    )
    parser.add_argument("--html", type=path_argument, metavar="FILE", help="one page for a browser, without network")
    parser.add_argument("--png", type=path_argument, metavar="FILE", help="time line and memory as a picture")
    parser.add_argument("--trace", type=path_argument, metavar="FILE", help="a Chrome trace, for Perfetto")
    parser.add_argument(
        "--with-profiler", type=path_argument, metavar="FILE", help="a trace of torch.profiler for --trace"
    )


def run(arguments: argparse.Namespace) -> int:
    path: Path = arguments.record
    if not path.exists():
        raise InputError(f"there is no run at {path}; {_WHAT_TO_GIVE}")
    if path.is_dir() and not (path / RECORD).is_file():
        raise InputError(f"directory {path} has no {RECORD}; {_WHAT_TO_GIVE}")
    path = path / RECORD if path.is_dir() else path
    with about_input(ValueError, OSError, ModuleNotFoundError, where=f"{path}: "):
        report = Report(RunRecord.from_json(path.read_text()))
        if arguments.html:
            report.to_html(arguments.html)
        if arguments.png:
            report.to_png(arguments.png)
        if arguments.trace:
            report.to_trace(arguments.trace, profiler_trace=arguments.with_profiler)
    print(report, end="")
    return 0
