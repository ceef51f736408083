"""Which tokens does a run train on? The text files a user names, in windows of one length, in a shuffled order."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import torch

from millrace.train.config import TrainConfig, TrainInputError
from millrace.train.model import Tokens


def find_text_files(config: TrainConfig) -> list[Path]:
    """The files to train on: those named, and those of the directories named that match `include` and not `exclude`.

    Raises TrainInputError for a path that does not exist, and when all of them together name no file.
    """
    files: dict[Path, None] = {}
    for path in config.text:
        if path.is_file():
            files[path] = None
        elif path.is_dir():
            files.update(dict.fromkeys(_matching(path, config.include, config.exclude)))
        else:
            raise TrainInputError(f"--text {path} does not exist; name a file or a directory")
    if not files:
        places = ", ".join(str(path) for path in config.text)
        patterns = " ".join(config.include)
        raise TrainInputError(f"no text file in {places} matches {patterns}; choose others with --include")
    return list(files)


def _matching(directory: Path, include: Sequence[str], exclude: Sequence[str]) -> list[Path]:
    """Files under `directory`; patterns are matched against the name and the path relative to `directory`."""

    def matches(relative: Path, patterns: Sequence[str]) -> bool:
        return any(fnmatch(relative.name, pattern) or fnmatch(str(relative), pattern) for pattern in patterns)

    relatives = sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return [directory / path for path in relatives if matches(path, include) and not matches(path, exclude)]


def read_tokens(files: Sequence[Path], tokens: Tokens) -> torch.Tensor:
    """The text of all files as token ids, each file followed by the end token: (tokens,) int32.

    Bytes that are not UTF-8 are replaced. Raises TrainInputError when a file cannot be read or all are empty.
    """
    parts = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise TrainInputError(f"text file {path} cannot be read: {error.strerror}; leave it out") from error
        if text.strip():
            parts.append(tokens.encode(text))
    if not parts:
        raise TrainInputError(f"the text is empty: {len(files)} files, starting with {files[0]}, hold no characters")
    return torch.cat(parts)


class Windows:
    """Windows of `length` tokens that do not overlap; each epoch visits all of them in an order of its own."""

    def __init__(self, tokens: torch.Tensor, *, length: int, seed: int) -> None:
        if len(tokens) < length:
            raise TrainInputError(
                f"the text has {len(tokens)} tokens, fewer than one sequence of {length}; "
                "give more text or a smaller --sequence-length"
            )
        self._windows = tokens[: len(tokens) // length * length].view(-1, length)  # (windows, length)
        self._seed = seed

    def __len__(self) -> int:
        return len(self._windows)

    def batches(self, batch_size: int) -> Iterator[torch.Tensor]:
        """Batches (batch_size, length) int64 without end; the same ones for the same seed."""
        generator = torch.Generator().manual_seed(self._seed)
        order = torch.empty(0, dtype=torch.int64)
        while True:
            while len(order) < batch_size:
                order = torch.cat([order, torch.randperm(len(self._windows), generator=generator)])
            yield self._windows[order[:batch_size]].to(torch.int64)
            order = order[batch_size:]
