"""How does the command line look for what is wrong? The arguments of `headrace doctor`, and how findings read."""

import argparse
import tempfile
import tomllib
from importlib.resources import files
from pathlib import Path

from headrace.checkpoint.directory import newest
from headrace.checkpoint.manifest import MANIFEST, read_manifest
from headrace.cli import InputError, about_input, path_argument
from headrace.cli.checks import Machine, findings
from headrace.config import format_bytes
from headrace.memory.disk.saved_file import SavedFile, read_all, reading_memory
from headrace.runtime.device import resolve_device

Symptom = dict[str, str]  # what is seen, how headrace names it, why, and what to do: `symptoms.toml` has them
SYMPTOMS: list[Symptom] = tomllib.loads(files("headrace.cli").joinpath("symptoms.toml").read_text())["symptom"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Look for what makes offloading fail or slow here. Exit code 1 when something severe is found."
    parser.add_argument("--device", metavar="DEVICE", help="compute device (default: the accelerator, else cpu)")
    parser.add_argument(
        "--disk", type=path_argument, metavar="DIR", help="where a run would spill (default: temporary files)"
    )
    parser.add_argument(
        "--checkpoint",
        type=path_argument,
        metavar="DIR",
        help="read all of a checkpoint, or of the newest one in DIR, and say if it is whole",
    )
    parser.add_argument(
        "--symptoms",
        nargs="*",
        metavar="WORD",
        help="what usually goes wrong with a run, how headrace names it, why, and what to do; those with all WORDs",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.symptoms is not None:
        print(_symptoms(arguments.symptoms))
        return 0
    if arguments.checkpoint is not None:
        print(_checked(arguments.checkpoint))
        return 0
    disk = arguments.disk or Path(tempfile.gettempdir())
    if not disk.is_dir():
        raise InputError(f"--disk {disk} is no directory; make it, or name another")
    with about_input(ValueError):
        device = resolve_device(arguments.device)
    found = findings(Machine(device=device, disk=disk))
    for finding in found:
        print(f"{'SEVERE' if finding.severe else 'note'}: {finding.problem}\n  fix: {finding.fix}")
    if not found:
        print("nothing wrong was found; headrace probe measures how fast it is")
    return 1 if any(finding.severe for finding in found) else 0


def _symptoms(words: list[str]) -> str:
    """The symptoms in which every word occurs, in upper or lower case; all of them if there are no words."""
    texts = [_text_of(row) for row in SYMPTOMS]
    found = [text for text in texts if all(word.lower() in text.lower() for word in words)]
    if not found:
        raise InputError(
            f"no symptom has {' and '.join(map(repr, words))}; give fewer or other words, or none to see all"
            f" {len(SYMPTOMS)}"
        )
    return "\n\n".join(found)


def _text_of(row: Symptom) -> str:
    rows = (("named", f'"{row["says"]}"'), *((name, row[name]) for name in ("cause", "confirm", "fix")))
    return "\n".join([row["symptom"], *(f"  {name:<8} {text}" for name, text in rows)])


def _checked(directory: Path) -> str:
    """Checks a checkpoint. Raises CheckpointError, naming the file, if a byte of it has changed since it was written.

    If the directory is not a checkpoint itself but holds some, the newest is checked.
    """
    if not (directory / MANIFEST).is_file():
        directory = newest(directory) or directory
    manifest = read_manifest(directory)
    for name, record in manifest.files.items():
        file = SavedFile(directory / name, record.checksums)
        read_all([(file, ())], reading_memory())
        file.close()
    nbytes = sum(record.nbytes for record in manifest.files.values())
    return f"{directory} is whole: {len(manifest.files)} files, {format_bytes(nbytes)}, as they were written"
