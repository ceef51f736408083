"""What does a run train on, and in which order? Sequences of tokens from files, by Hugging Face datasets."""

import glob
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Sampler

from headrace.config import counted
from headrace.errors import TrainInputError
from headrace.train.chat import IGNORED, Conversations
from headrace.train.config import TrainConfig
from headrace.train.files import Kind, find_files, kind_of
from headrace.train.model import Tokens

__all__ = ["Batch", "Batches", "Sequences", "read_sequences"]

Batch = dict[str, torch.Tensor]

_EXAMPLES_AT_ONCE = 100


class Sequences(torch.utils.data.Dataset[dict[str, Any]]):
    """What micro-batches are made of. Tokens stay in the mapped files in which `datasets` keeps them."""

    def __init__(self, examples: datasets.Dataset, *, files: int, pad: int) -> None:
        self.files = files
        columns = {name: examples.data.column(name).chunks for name in examples.column_names}
        self._flat = {name: [_flat(chunk) for chunk in chunks] for name, chunks in columns.items()}
        self._collate: Callable[[list[dict[str, Any]]], Batch] = partial(_padded, pad)
        self.tokens = sum(map(len, self._flat["input_ids"]))
        self.largest_token = max((int(flat.max()) for flat in self._flat["input_ids"] if len(flat)), default=0)
        self._lengths = np.concatenate(
            [np.empty(0, np.int64), *(chunk.value_lengths().to_numpy() for chunk in columns["input_ids"])]
        )
        self._starts = np.cumsum(self._lengths) - self._lengths

    def digest(self) -> str:
        """Of all tokens, labels and lengths: equal for equal data, wherever its files are."""
        digest = xxhash.xxh3_128(np.ascontiguousarray(self._lengths).tobytes())
        for name, chunks in sorted(self._flat.items()):
            digest.update(name.encode())
            for flat in chunks:
                digest.update(np.ascontiguousarray(flat).tobytes())
        return digest.hexdigest()

    def pack(self, length: int) -> "Sequences":
        """One example after another, in windows of `length` that do not overlap; those without a label are left out."""
        starts = np.arange(0, self.tokens - length + 1, length)
        self._lengths = np.full(len(starts), length)
        self._starts = starts
        self._collate = _stacked
        if "labels" in self._flat:
            learned = np.array([bool((self[at]["labels"][1:] != IGNORED).any()) for at in range(len(self))], dtype=bool)
            self._lengths, self._starts = self._lengths[learned], self._starts[learned]
        return self

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, length = int(self._starts[index]), int(self._lengths[index])
        sequence = {name: _between(chunks, start, start + length) for name, chunks in self._flat.items()}
        return {"labels": sequence["input_ids"], **sequence}

    def collate(self, sequences: list[dict[str, Any]]) -> Batch:
        """A micro-batch (sequences, length) int64; labels are -100 where nothing is learned, padding included."""
        return self._collate(sequences)


class Batches:
    """The micro-batches of each step, without end, and how far they were taken.

    As in transformers' Trainer, each epoch visits all sequences once, in an order of its own, and ends with a step of
    what is left: its micro-batches may be fewer, and the last one smaller. The order follows from the seed and the
    epoch alone, so that the position is one number.
    """

    def __init__(self, sequences: Sequences, *, batch_size: int, accumulate: int, seed: int) -> None:
        self._sequences = sequences
        self._batch_size = batch_size
        self._accumulate = accumulate
        self._seed = seed
        self._taken = 0

    def steps(self, epochs: float) -> int:
        """Optimizer steps in which that many epochs are over."""
        a_step = self._batch_size * self._accumulate
        return math.ceil(epochs * -(-len(self._sequences) // a_step))

    def __iter__(self) -> Iterator[list[Batch]]:
        count = len(self._sequences)
        loader = DataLoader(
            self._sequences,
            batch_sampler=_Order(count, batch_size=self._batch_size, seed=self._seed, start=self._taken),
            collate_fn=self._sequences.collate,
            generator=torch.Generator(),  # else it draws from the one that training draws from
        )
        step: list[Batch] = []
        for batch in loader:
            step.append(batch)
            self._taken += len(batch["input_ids"])
            if len(step) == self._accumulate or self._taken % count == 0:
                yield step
                step = []

    def state_dict(self) -> dict[str, int]:
        return {"taken": self._taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._taken = state["taken"]


class _Order(Sampler[list[int]]):
    """The sequences of each micro-batch."""

    def __init__(self, length: int, *, batch_size: int, seed: int, start: int) -> None:
        self._length = length
        self._batch_size = batch_size
        self._seed = seed
        self._start = start

    def __iter__(self) -> Iterator[list[int]]:
        epoch, start = divmod(self._start, self._length)
        while True:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._length)[start:].tolist()
            yield from (order[at : at + self._batch_size] for at in range(0, len(order), self._batch_size))
            epoch, start = epoch + 1, 0


def read_sequences(
    config: TrainConfig, tokens: Tokens, *, paths: Sequence[Path], option: str, note: Callable[[str], None]
) -> Sequences:
    """The sequences of all files in `paths`, tokenized. Raises TrainInputError for what cannot be read or learned."""
    files = find_files(config, paths, option)
    kinds = [kind_of(path, config.format) for path in files]
    chat = Kind.CHAT in kinds
    packing = not chat if config.packing is None else config.packing
    longest = None if packing else config.sequence_length
    columns = ["input_ids", "labels"] if chat else ["input_ids"]
    features = datasets.Features({name: datasets.List(datasets.Value("int32")) for name in columns})
    parts, dropped = [], 0
    for kind, group in groupby(zip(files, kinds, strict=True), key=lambda pair: pair[1]):
        same = [path for path, _ in group]
        # An error names the example of a file, and a text file is an example.
        for some in [same] if kind is Kind.TEXT else [[path] for path in same]:
            examples = _load(kind, some)
            encode = _encode_chat(tokens, longest) if kind is Kind.CHAT else _encode_texts(tokens, longest, chat)
            encoded = examples.map(
                partial(encode, file=str(some[0])),
                batched=True,
                batch_size=_EXAMPLES_AT_ONCE,
                with_indices=True,
                remove_columns=examples.column_names,
                features=features,
            )
            dropped += (len(examples) - len(encoded)) * (kind is Kind.CHAT)
            parts.append(encoded)
    if dropped:
        left_out = counted(dropped, "conversation")
        note(f"{left_out} without the assistant in the first {config.sequence_length} tokens: left out")
    tokenizer = tokens.tokenizer
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    sequences = Sequences(datasets.concatenate_datasets(parts), files=len(files), pad=pad)
    if sequences.tokens == 0 and dropped:
        raise TrainInputError(
            f"no conversation in {files[0]} says anything of the assistant's within {config.sequence_length} tokens;"
            " give a larger --sequence-length, or --packing"
        )
    if sequences.tokens == 0:
        others = f" nor in {counted(len(files) - 1, 'other file')}" if len(files) > 1 else ""
        raise TrainInputError(f"the text is empty: there is nothing in {files[0]}{others}")
    if packing and sequences.tokens < config.sequence_length:
        raise TrainInputError(
            f"the text has {counted(sequences.tokens, 'token')}, fewer than one sequence of {config.sequence_length}; "
            "give more text or a smaller --sequence-length"
        )
    return sequences.pack(config.sequence_length) if packing else sequences


def _load(kind: Kind, files: Sequence[Path]) -> datasets.Dataset:
    """The examples of files of one kind, as the library reads them."""
    names = [glob.escape(str(path.absolute())) for path in files]
    how: dict[str, Any] = {"path": "json"}
    if kind is Kind.TEXT:
        how = {"path": "text", "sample_by": "document", "encoding_errors": "replace"}
    try:
        return datasets.load_dataset(**how, data_files=names, split="train")
    except datasets.exceptions.DatasetGenerationError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise TrainInputError(f"{files[0]} cannot be read as {kind.value}: {reason}") from error


def _encode_texts(tokens: Tokens, longest: int | None, labels: bool) -> Callable[..., dict[str, list[Any]]]:
    def encode(examples: dict[str, list[Any]], numbers: list[int], *, file: str) -> dict[str, list[Any]]:
        encoded = []
        for number, text in zip(numbers, examples["text"], strict=True):
            if not isinstance(text, str | None):
                raise TrainInputError(f'{file}, example {number + 1}: "text" is a {type(text).__name__}; give text')
            if text is None or not text.strip():
                continue
            ids = tokens.encode(text).numpy()[:longest]
            if longest is None or len(ids) > 1:  # one token alone is no example: nothing follows it
                encoded.append(ids)
        return {"input_ids": encoded, **({"labels": encoded} if labels else {})}

    return encode


def _encode_chat(tokens: Tokens, longest: int | None) -> Callable[..., dict[str, list[Any]]]:
    conversations = Conversations(tokens.tokenizer)

    def encode(examples: dict[str, list[Any]], numbers: list[int], *, file: str) -> dict[str, list[Any]]:
        encoded: dict[str, list[Any]] = {"input_ids": [], "labels": []}
        for row, number in enumerate(numbers):
            example = {name: values[row] for name, values in examples.items()}
            both = conversations.encode(example, where=f"{file}, example {number + 1}")
            if any(label != IGNORED for label in both["labels"][1:longest]):
                for name, values in both.items():
                    encoded[name].append(values[:longest])
        return encoded

    return encode


def _flat(chunk: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The values of all lists of an Arrow array, where they lie."""
    values: np.ndarray[Any, np.dtype[np.int32]] = chunk.flatten().to_numpy(zero_copy_only=True)
    return values


def _between(chunks: Sequence[np.ndarray[Any, Any]], start: int, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Elements of arrays that follow one another."""
    parts = []
    for chunk in chunks:
        if start < len(chunk) and end > 0:
            parts.append(chunk[max(start, 0) : end])
        start, end = start - len(chunk), end - len(chunk)
    return np.concatenate(parts).astype(np.int64)


def _stacked(sequences: list[dict[str, Any]]) -> Batch:
    names = ("input_ids", "labels")
    return {name: torch.from_numpy(np.stack([sequence[name] for sequence in sequences])) for name in names}


def _padded(pad: int, sequences: list[dict[str, Any]]) -> Batch:
    longest = max(len(sequence["input_ids"]) for sequence in sequences)
    shape = (len(sequences), longest)
    batch = {
        "input_ids": torch.full(shape, pad),
        "labels": torch.full(shape, IGNORED),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
    }
    for row, sequence in enumerate(sequences):
        length = len(sequence["input_ids"])
        for name in ("input_ids", "labels"):
            batch[name][row, :length] = torch.from_numpy(sequence[name])
        batch["attention_mask"][row, :length] = 1
    return batch
