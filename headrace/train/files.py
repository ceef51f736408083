"""Which files does a run read, and of which kind is each: text, JSON with texts, or conversations?"""

import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from headrace.errors import TrainInputError
from headrace.train.config import TrainConfig, flag

Kind = Literal["text", "jsonl", "chat"]  # what a file holds

CHAT_KEYS = ("messages", "conversations")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_START_CHARACTERS = 1 << 16  # read to tell what a file holds


def find_files(config: TrainConfig, name: str) -> list[Path]:
    """The files of the setting `name`: files named there, and files in directories that match `include`, not `exclude`.

    Raises TrainInputError for a path that does not exist, and if all paths together yield no file.
    """
    files: dict[Path, None] = {}
    paths = getattr(config, name)
    for path in paths:
        if path.is_file():
            files[path] = None
        elif path.is_dir():
            files.update(dict.fromkeys(_matching(path, config.include, config.exclude)))
        else:
            raise TrainInputError(f"{flag(name)} {path} does not exist; name a file or a directory")
    if not files:
        places = ", ".join(str(path) for path in paths)
        patterns = " ".join(config.include)
        raise TrainInputError(f"no text file in {places} matches {patterns}; choose others with --include")
    return list(files)


def _matching(directory: Path, include: Sequence[str], exclude: Sequence[str]) -> Iterator[Path]:
    """Files under `directory`; patterns are matched against the name and the path relative to `directory`."""

    def matches(relative: Path, patterns: Sequence[str]) -> bool:
        return any(fnmatch(relative.name, pattern) or fnmatch(str(relative), pattern) for pattern in patterns)

    for relative in sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file()):
        if matches(relative, include) and not matches(relative, exclude):
            yield directory / relative


def kind_of(path: Path) -> Kind:
    """The kind of content in `path`, by its name and its first example. JSON is never taken for text.

    Raises TrainInputError for a file that cannot be read, and for JSON without texts or conversations.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            start = file.read(_START_CHARACTERS)
    except OSError as error:
        raise TrainInputError(f"text file {path} cannot be read: {error.strerror}; leave it out") from error
    keys = list(_first_example(start))
    if any(key in keys for key in CHAT_KEYS):
        return "chat"
    if "text" in keys:
        return "jsonl"
    if path.suffix.lower() not in _JSON_SUFFIXES:
        return "text"
    if start.strip():
        held = f"JSON with {', '.join(map(repr, keys))}" if keys else "no JSON object"
        raise TrainInputError(
            f'{path} holds {held} in its first example; training needs "text", "messages" or "conversations" there:'
            " rename its keys, or leave it out with --exclude"
        )
    return "jsonl"  # the file is empty


def _first_example(start: str) -> dict[str, Any]:
    """The first object of JSON lines, or of a JSON list of objects, as far as it was read; empty if there is none."""
    text = start.lstrip("\ufeff \t\r\n[")
    if not text.startswith("{"):
        return {}
    try:
        example, _ = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError:
        # Longer than what was read, or not JSON: if there are few keys, those that matter come first.
        return {key: None for key in (*CHAT_KEYS, "text") if text[1:].lstrip().startswith(f'"{key}"')}
    return example if isinstance(example, dict) else {}
