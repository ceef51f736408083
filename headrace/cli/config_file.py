"""How do flags come from a file? Each key of a YAML file becomes the flag of that name, before those given."""

import difflib
from pathlib import Path
from typing import Any

from headrace.errors import TrainInputError
from headrace.train.config import TrainConfig
from headrace.train.settings import declared, flag

__all__ = ["nearest", "with_config_file"]


def with_config_file(arguments: list[str]) -> list[str]:
    """The arguments, behind those of the file that --config names. Raises TrainInputError for an unknown key."""
    files: list[str] = []
    others: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if name != "--config" or not (equals or rest):  # argparse says that a file is missing
            others.append(argument)
        else:
            files.append(value if equals else rest.pop(0))
    if len(files) > 1:
        raise TrainInputError(f"--config is given for {' and for '.join(files)}; put the flags of both into one file")
    return [*_flags_of(Path(files[0])), *others] if files else others


def nearest(name: str, known: list[str]) -> str:
    """Words that name the known flag that is most like `name`, if any is."""
    found = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def _flags_of(file: Path) -> list[str]:
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
    known = {setting.name: setting for setting in declared(TrainConfig)}
    flags: list[str] = []
    for key, value in (content or {}).items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name not in known:
            raise TrainInputError(
                f"--config {file}: {key!r} is no flag of headrace train{nearest(name, list(known))}; see headrace train"
                " --help"
            )
        flags += _flag(name, value, known[name].several)
    return flags


def _flag(name: str, value: Any, several: str | None) -> list[str]:
    """One key as arguments. null is as if it were not there; so is false, but for flags that --no- takes back."""
    if value is None or (value is False and name not in ("packing", "overlap_d2h_h2d")):
        return []
    if value is False:
        return [flag(name).replace("--", "--no-", 1)]
    if value is True:
        return [flag(name)]
    if isinstance(value, dict):  # settings by name
        return [flag(name), *(f"{key}={each}" for key, each in value.items())]
    values = value if isinstance(value, list) else [value]
    if several in ("+", "*"):
        return [flag(name), *map(str, values)]
    return [f"{flag(name)}={each}" for each in values]
