"""Which files, tokens and windows does a run read?"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.train.byte_tokenizer import END_ID, VOCABULARY_SIZE, byte_tokenizer, encode_bytes
from millrace.train.config import TrainConfig, TrainInputError
from millrace.train.model import load_tokens
from millrace.train.text import Windows, find_text_files, read_tokens

TOKENIZER = byte_tokenizer(longest=64)


@given(st.text())
def test_the_saved_tokenizer_reads_text_as_training_did(text: str):
    ids = encode_bytes(text)
    assert ids.tolist() == [*text.encode(), END_ID]
    if "<|" not in text:  # a tokenizer reads the special tokens' names as special tokens
        assert TOKENIZER(text)["input_ids"] == ids.tolist()[:-1]
        assert TOKENIZER.decode(ids[:-1]) == text


def test_the_vocabulary_has_the_bytes_and_two_special_tokens():
    assert len(TOKENIZER) == VOCABULARY_SIZE
    assert TOKENIZER.eos_token_id == END_ID


def test_directories_are_searched_by_pattern_and_files_are_taken_as_named(
    settings: Callable[..., TrainConfig], tmp_path: Path
):
    for name in ("a/one.py", "a/deep/two.py", "a/skip/three.py", "a/notes.txt", "b.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    config = settings(text=(tmp_path / "a", tmp_path / "b.bin"), include=("*.py",), exclude=("skip/*",))
    found = [str(path.relative_to(tmp_path)) for path in find_text_files(config)]
    assert found == ["a/deep/two.py", "a/one.py", "b.bin"]


def test_files_are_joined_by_the_end_token(settings: Callable[..., TrainConfig], tmp_path: Path):
    paths = [tmp_path / "one", tmp_path / "blank", tmp_path / "two"]
    for path, content in zip(paths, (b"ab", b" \n", b"\xff"), strict=True):
        path.write_bytes(content)
    ids = read_tokens(paths, load_tokens(settings()))
    replacement = list("\ufffd".encode())  # for the byte that is not UTF-8
    assert ids.tolist() == [97, 98, END_ID, *replacement, END_ID]


def test_an_epoch_visits_every_window_once_and_the_seed_decides_the_order():
    def epochs(seed: int) -> list[torch.Tensor]:
        windows = Windows(torch.arange(40, dtype=torch.int32), length=4, seed=seed)
        batches = windows.batches(2)
        return [torch.cat([next(batches) for _ in range(5)]) for _ in range(2)]

    first, second = epochs(seed=1)
    assert first.dtype == torch.int64
    assert sorted(first[:, 0].tolist()) == list(range(0, 40, 4))
    assert sorted(second[:, 0].tolist()) == list(range(0, 40, 4))
    assert not torch.equal(first, second)
    assert torch.equal(first, epochs(seed=1)[0])
    assert not torch.equal(first, epochs(seed=2)[0])


def test_a_batch_larger_than_the_text_goes_on_into_the_next_epoch():
    windows = Windows(torch.arange(8, dtype=torch.int32), length=4, seed=0)
    assert next(windows.batches(5)).shape == (5, 4)


def test_a_text_shorter_than_one_window_is_refused():
    with pytest.raises(TrainInputError, match="has 3 tokens, fewer than one sequence of 4"):
        Windows(torch.arange(3, dtype=torch.int32), length=4, seed=0)
