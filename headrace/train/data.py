"""What does a run train on, and in which order? Sequences of tokens from files, by Hugging Face datasets."""

import glob
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute
import torch
import xxhash
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from headrace.config import counted
from headrace.errors import TrainInputError
from headrace.train.byte_tokenizer import encode_bytes
from headrace.train.chat import IGNORED, Conversations
from headrace.train.config import TrainConfig
from headrace.train.files import Kind, find_files, kind_of

Batch = dict[str, torch.Tensor]
Examples = dict[str, list[Any]]  # lists of values, by column

_EXAMPLES_AT_ONCE = 100


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The sequences of which micro-batches are made. Tokens stay in the mapped files in which `datasets` keeps them."""

    def __init__(self, examples: datasets.Dataset, *, files: int, pad: int) -> None:
        self.files = files
        self._pad = pad
        self._packed = False
        columns = {name: examples.data.column(name).chunks for name in examples.column_names}
        self._flat = {
            name: pyarrow.chunked_array([chunk.flatten() for chunk in chunks], pyarrow.int32())
            for name, chunks in columns.items()
        }
        self.tokens = len(self._flat["input_ids"])
        self.largest_token: int = pyarrow.compute.max(self._flat["input_ids"]).as_py() or 0
        lengths = [chunk.value_lengths().to_numpy() for chunk in columns["input_ids"]]
        self._lengths = np.concatenate([np.empty(0, np.int64), *lengths])
        self._starts = np.cumsum(self._lengths) - self._lengths

    def digest(self) -> str:
        """The digest of all tokens, labels and lengths. It is equal for equal data, wherever the files are."""
        digest = xxhash.xxh3_128(np.ascontiguousarray(self._lengths).tobytes())
        for name, flat in sorted(self._flat.items()):
            digest.update(name.encode())
            for chunk in flat.chunks:
                digest.update(np.ascontiguousarray(chunk.to_numpy()).tobytes())
        return digest.hexdigest()

    def pack(self, length: int) -> "Sequences":
        """Cuts all examples, one after another, into windows of `length`. Windows without a label are left out."""
        self._packed = True
        self._starts = np.arange(0, self.tokens - length + 1, length)
        self._lengths = np.full(len(self._starts), length)
        if "labels" in self._flat:
            learned = np.array([bool((self[at]["labels"][1:] != IGNORED).any()) for at in range(len(self))], dtype=bool)
            self._lengths, self._starts = self._lengths[learned], self._starts[learned]
        return self

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start, length = int(self._starts[index]), int(self._lengths[index])
        sequence = {
            name: torch.from_numpy(flat.slice(start, length).to_numpy().astype(np.int64))
            for name, flat in self._flat.items()
        }
        return {"labels": sequence["input_ids"], **sequence}

    def collate(self, sequences: Iterable[dict[str, torch.Tensor]]) -> Batch:
        """A micro-batch of shape (sequences, length), int64. Labels of padding and of what is not learned are -100."""
        sequences = list(sequences)

        def padded(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
            return pad_sequence(tensors, batch_first=True, padding_value=value)

        ids, labels = ([sequence[name] for sequence in sequences] for name in ("input_ids", "labels"))
        batch = {"input_ids": padded(ids, self._pad), "labels": padded(labels, IGNORED)}
        return batch if self._packed else {**batch, "attention_mask": padded([torch.ones_like(one) for one in ids], 0)}

    def batch(self, indices: Iterable[int]) -> Batch:
        """The micro-batch of the sequences with these indices."""
        return self.collate(self[index] for index in indices)


class Batches:
    """An endless iterator over the micro-batches of each step. Its state is the number of sequences taken so far.

    As in transformers' Trainer, each epoch visits all sequences once, in an order of its own. Its last step takes what
    is left: there may be fewer micro-batches, and the last one may be smaller. The order follows from the seed and the
    epoch alone, so one number is the whole position.
    """

    def __init__(self, sequences: Sequences, *, batch_size: int, accumulate: int, seed: int) -> None:
        self._sequences = sequences
        self._batch_size = batch_size
        self._accumulate = accumulate
        self._seed = seed
        self._taken = 0

    def steps(self, epochs: float) -> int:
        """The number of optimizer steps that this many epochs take."""
        a_step = self._batch_size * self._accumulate
        return math.ceil(epochs * -(-len(self._sequences) // a_step))

    def __iter__(self) -> Iterator[list[Batch]]:
        count, size = len(self._sequences), self._batch_size
        while True:
            epoch, begin = divmod(self._taken, count)
            order = np.random.default_rng([self._seed, epoch]).permutation(count)
            for first in range(begin, count, size * self._accumulate):
                step = order[first : first + size * self._accumulate].tolist()
                self._taken += len(step)
                yield [self._sequences.batch(step[at : at + size]) for at in range(0, len(step), size)]

    def state_dict(self) -> dict[str, int]:
        return {"taken": self._taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._taken = state["taken"]


def read_sequences(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, name: str, note: Callable[[str], None]
) -> Sequences:
    """The sequences of all files of the setting `name`, tokenized. Raises TrainInputError for what cannot be used."""
    files = find_files(config, name)
    kinds = [kind_of(path) for path in files]
    chat = "chat" in kinds
    packing = not chat if config.packing is None else config.packing
    longest = None if packing else config.sequence_length
    columns = ["input_ids", "labels"] if chat else ["input_ids"]
    features = datasets.Features({name: datasets.List(datasets.Value("int32")) for name in columns})
    parts, dropped = [], 0
    for kind, group in groupby(zip(files, kinds, strict=True), key=lambda pair: pair[1]):
        same = [path for path, _ in group]
        # Errors name a file and its example; a text file is one example.
        encode: Callable[..., dict[str, Any]] = partial(
            _encode_text, tokenizer=tokenizer, by_bytes=config.model is None
        )
        if kind == "chat":
            encode = Conversations(tokenizer).encode
        for some in [same] if kind == "text" else [[path] for path in same]:
            examples = _load(kind, some)
            encoded = examples.map(
                partial(_encoded, encode=encode, columns=columns, longest=longest, file=str(some[0])),
                batched=True,
                batch_size=_EXAMPLES_AT_ONCE,
                with_indices=True,
                remove_columns=examples.column_names,
                features=features,
            )
            dropped += (len(examples) - len(encoded)) * (kind == "chat")
            parts.append(encoded)
    if dropped:
        left_out = counted(dropped, "conversation")
        note(f"{left_out} without the assistant in the first {config.sequence_length} tokens: left out")
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    sequences = Sequences(datasets.concatenate_datasets(parts), files=len(files), pad=pad)
    if sequences.tokens == 0 and dropped:
        raise TrainInputError(
            f"no conversation in {files[0]} has a turn of the assistant within {config.sequence_length} tokens;"
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
    if kind == "text":
        how = {"path": "text", "sample_by": "document", "encoding_errors": "replace"}
    try:
        return datasets.load_dataset(**how, data_files=names, split="train")
    except datasets.exceptions.DatasetGenerationError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise TrainInputError(f"{files[0]} cannot be read as {kind}: {reason}") from error


def _encode_text(
    example: Mapping[str, Any], where: str, *, tokenizer: PreTrainedTokenizerBase, by_bytes: bool
) -> dict[str, Any]:
    """Token ids of one text, which are its labels, too; white space alone gives none. `where` names it in errors.

    `by_bytes`: the tokenizer is the built-in one.
    """
    text = example["text"]
    if not isinstance(text, str | None):
        raise TrainInputError(f'{where}: "text" is a {type(text).__name__}; give text')
    ids: Any = []
    if text is not None and text.strip():
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        if by_bytes:
            ids = np.append(encode_bytes(text), np.array(end, dtype=np.int32))
        else:  # a whole file is longer than the model reads at once, but is cut into windows: no warning is due
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end
    return {"input_ids": ids, "labels": ids}


def _encoded(
    examples: Examples,
    numbers: list[int],
    *,
    encode: Callable[..., dict[str, list[int]]],
    columns: Sequence[str],
    longest: int | None,
    file: str,
) -> Examples:
    """The columns of the encoded examples, cut to `longest` tokens. Examples without a token to learn are left out."""
    encoded: Examples = {name: [] for name in columns}
    first = 0 if longest is None else 1  # nothing comes before the first token of an example that is not packed
    for row, number in enumerate(numbers):
        example = {name: values[row] for name, values in examples.items()}
        both = encode(example, where=f"{file}, example {number + 1}")
        if any(label != IGNORED for label in both["labels"][first:longest]):
            for name in columns:
                encoded[name].append(both[name][:longest])
    return encoded
