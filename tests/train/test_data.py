"""Which files, tokens and sequences does a run read, and in which order?"""

import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer, Trainer, TrainingArguments

from headrace.errors import TrainInputError
from headrace.train.byte_tokenizer import END_ID, VOCABULARY_SIZE, byte_tokenizer, encode_bytes
from headrace.train.chat import IGNORED
from headrace.train.config import TrainConfig
from headrace.train.data import Batches, Sequences, read_sequences
from headrace.train.files import find_files, kind_of
from headrace.train.model import tokenizer_of

Settings = Callable[..., TrainConfig]

TOKENIZER = byte_tokenizer(longest=64)


def read(config: TrainConfig, notes: list[str] | None = None) -> Sequences:
    say = [].append if notes is None else notes.append
    return read_sequences(config, tokenizer_of(config), "text", say)


def lines(path: Path, *examples: Any) -> Path:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return path


@given(st.text())
@example("the names of special tokens: <|end|><|pad|>")
def test_a_token_is_a_byte_of_the_text_whatever_it_says(text: str):
    ids = TOKENIZER(text)["input_ids"]
    assert ids == [*text.encode()] == encode_bytes(text).tolist()
    assert TOKENIZER.decode(ids) == text


def test_the_tokenizer_that_is_saved_with_the_model_reads_the_same(tmp_path: Path):
    TOKENIZER.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("a<|end|>\u00e9")["input_ids"] == [*"a<|end|>\u00e9".encode()]


def test_the_vocabulary_has_the_bytes_and_two_special_tokens():
    assert len(TOKENIZER) == VOCABULARY_SIZE
    assert TOKENIZER.eos_token_id == END_ID


def test_directories_are_searched_by_pattern_and_files_are_taken_as_named(settings: Settings, tmp_path: Path):
    for name in ("a/one.py", "a/deep/two.py", "a/skip/three.py", "a/notes.txt", "b.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    config = settings(text=(tmp_path / "a", tmp_path / "b.bin"), include=("*.py",), exclude=("skip/*",))
    found = [str(path.relative_to(tmp_path)) for path in find_files(config, "text")]
    assert found == ["a/deep/two.py", "a/one.py", "b.bin"]


@pytest.mark.parametrize("name", ["two.txt", "odd [name]*.txt"])
def test_files_are_joined_by_the_end_token(settings: Settings, tmp_path: Path, name: str):
    paths = [tmp_path / "one", tmp_path / "blank", tmp_path / name]
    for path, content in zip(paths, (b"ab", b" \n", b"\xff"), strict=True):
        path.write_bytes(content)
    sequences = read(settings(text=tuple(paths), sequence_length=6))
    replacement = list("\ufffd".encode())  # for the byte that is not UTF-8
    assert sequences[0]["input_ids"].tolist() == [97, 98, END_ID, *replacement]
    assert sequences.tokens == 7
    assert len(sequences) == 1


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.txt", "{not json}", "text"),
        ("a.py", "{'text': 1}", "text"),
        ("a.jsonl", '\n{"id": 1, "text": "x"}\n', "jsonl"),
        ("a.jsonl", '{"text": "' + "x" * 100_000 + '"}', "jsonl"),
        ("a.txt", '{"text": "x"}\n{"text": "y"}\n', "jsonl"),
        ("a.json", '[{"messages": []}]', "chat"),
        ("a", '{"conversations": []}', "chat"),
    ],
)
def test_the_kind_of_a_file_is_found(tmp_path: Path, name: str, content: str, kind: str):
    (tmp_path / name).write_text(content)
    assert kind_of(tmp_path / name) == kind


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            '{"prompt": "x"}',
            "holds JSON with 'prompt' in its first example; training needs .*leave it out with --exclude",
        ),
        ("no json", "holds no JSON object in its first example"),
    ],
)
def test_json_is_never_taken_for_text(tmp_path: Path, content: str, says: str):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(TrainInputError, match=says):
        kind_of(tmp_path / "a.jsonl")


def test_json_lines_are_texts_one_after_another(settings: Settings, tmp_path: Path):
    path = lines(
        tmp_path / "a.jsonl", {"text": "ab", "id": 1}, {"text": None}, {"text": "cd"}, {"text": "e", "id": "x"}
    )
    sequences = read(settings(text=(path,), sequence_length=4))
    assert [sequences[at]["input_ids"].tolist() for at in range(2)] == [
        [97, 98, END_ID, 99],
        [100, END_ID, 101, END_ID],
    ]


def test_without_packing_each_example_is_padded_in_its_batch(settings: Settings, tmp_path: Path):
    path = lines(tmp_path / "a.jsonl", {"text": "ab"}, {"text": "cdefgh"})
    sequences = read(settings(text=(path,), sequence_length=4, packing=False))
    batch = sequences.collate([sequences[0], sequences[1]])
    assert batch["labels"].tolist() == [[97, 98, END_ID, IGNORED], [99, 100, 101, 102]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["input_ids"][0, :3].tolist() == [97, 98, END_ID]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"text": "a"}\nno json\n', "a.jsonl cannot be read as jsonl: JSON parse error"),
        ('{"text": "a"}\n{"text": 5}\n', 'a.jsonl, example 2: "text" is a int; give text'),
        ('{"text": " "}\n', "the text is empty: there is nothing in"),
        ('{"text": "a"}\n', "has 2 tokens, fewer than one sequence of 32"),
    ],
)
def test_what_cannot_be_read_is_named(settings: Settings, tmp_path: Path, content: str, says: str):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(TrainInputError, match=says):
        read(settings(text=(tmp_path / "a.jsonl",)))


def counted(tokens: int, length: int) -> Sequences:
    """Windows of the numbers from 0 on."""
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    thirds = [list(range(start, min(start + 3, tokens))) for start in range(0, tokens, 3)]
    examples = datasets.Dataset.from_dict({"input_ids": thirds}, features=features)
    return Sequences(datasets.concatenate_datasets([examples, examples.select([])]), files=1, pad=0).pack(length)


def firsts(batches: Batches, number: int) -> list[int]:
    """The first tokens of the sequences in the next so many steps."""
    return [int(first) for step in islice(batches, number) for batch in step for first in batch["input_ids"][:, 0]]


def batches(tokens: int = 40, *, batch_size: int = 2, accumulate: int = 1, seed: int = 0) -> Batches:
    """Of windows of 4 tokens."""
    return Batches(counted(tokens, 4), batch_size=batch_size, accumulate=accumulate, seed=seed)


def test_an_epoch_visits_every_window_once_and_the_seed_decides_the_order():
    def epochs(seed: int) -> tuple[list[int], list[int]]:
        both = firsts(batches(seed=seed), 10)
        return both[:10], both[10:]

    first, second = epochs(seed=1)
    assert sorted(first) == sorted(second) == list(range(0, 40, 4))
    assert first != second
    assert first == epochs(seed=1)[0]
    assert first != epochs(seed=2)[0]
    assert next(iter(batches()))[0]["labels"].dtype == torch.int64


@pytest.mark.parametrize(
    ("windows", "batch_size", "accumulate", "shapes"),
    [
        (2, 4, 1, [[2]]),  # fewer examples than in a micro-batch: each is seen once
        (10, 4, 1, [[4], [4], [2]]),
        (10, 2, 3, [[2, 2, 2], [2, 2]]),
        (11, 2, 3, [[2, 2, 2], [2, 2, 1]]),
        (13, 2, 3, [[2, 2, 2], [2, 2, 2], [1]]),
    ],
)
def test_no_step_goes_on_into_the_next_epoch(windows: int, batch_size: int, accumulate: int, shapes: list[list[int]]):
    made = batches(4 * windows, batch_size=batch_size, accumulate=accumulate)
    assert made.steps(1.0) == len(shapes)
    assert [[len(batch["labels"]) for batch in step] for step in islice(made, 2 * len(shapes))] == shapes * 2
    made = batches(4 * windows, batch_size=batch_size, accumulate=accumulate)
    assert sorted(firsts(made, len(shapes))) == list(range(0, 4 * windows, 4))


@pytest.mark.parametrize(("windows", "batch_size", "accumulate"), [(2, 4, 1), (10, 2, 3), (13, 3, 2), (7, 8, 4)])
@pytest.mark.parametrize("epochs", [0.3, 1.0, 2.5])
def test_epochs_have_as_many_steps_as_in_transformers_trainer(
    tmp_path: Path, windows: int, batch_size: int, accumulate: int, epochs: float
):
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        num_train_epochs=epochs,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulate,
    )
    windowed = counted(4 * windows, 4)
    theirs = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=windowed, data_collator=windowed.collate)
    *_, steps = theirs.set_initial_training_values(arguments, theirs.get_train_dataloader())
    assert batches(4 * windows, batch_size=batch_size, accumulate=accumulate).steps(epochs) == steps


@pytest.mark.parametrize("taken", [0, 1, 3, 11])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_from_its_state_the_same_batches_follow(taken: int, accumulate: int):
    def made() -> Batches:
        return batches(batch_size=3, accumulate=accumulate, seed=5)

    whole = made()
    before = firsts(whole, taken)
    state = whole.state_dict()
    resumed = made()
    resumed.load_state_dict(state)
    assert firsts(resumed, 6) == firsts(made(), taken + 6)[len(before) :]


def test_reading_batches_draws_no_random_number_of_training():
    before = torch.get_rng_state()
    firsts(batches(batch_size=3, seed=5), 20)
    assert torch.equal(torch.get_rng_state(), before)


def test_examples_of_one_token_are_left_out_where_each_is_a_sequence(settings: Settings, tmp_path: Path):
    path = lines(tmp_path / "a.jsonl", {"text": "ab"}, {"text": "c"})
    config = settings(text=(path,), sequence_length=4, packing=False)
    tokenizer = tokenizer_of(config)
    tokenizer.eos_token = None
    sequences = read_sequences(config, tokenizer, "text", print)
    assert [sequences[at]["input_ids"].tolist() for at in range(len(sequences))] == [[97, 98]]


def test_equal_data_has_an_equal_digest_wherever_it_lies(settings: Settings, tmp_path: Path):
    def digest(name: str, *texts: str) -> str:
        return read(
            settings(text=(lines(tmp_path / name, *({"text": text} for text in texts)),), packing=False)
        ).digest()

    assert digest("a.jsonl", "ab", "c") == digest("b.jsonl", "ab", "c")
    assert len({digest(f"{at}.jsonl", *texts) for at, texts in enumerate([("ab", "c"), ("a", "bc"), ("ab", "d")])}) == 3


def test_the_second_run_finds_the_tokens_of_the_first(settings: Settings):
    first = read(settings())
    made = {path: path.stat().st_mtime_ns for path in Path(datasets.config.HF_DATASETS_CACHE).rglob("*.arrow")}
    assert len(made) == 2  # the texts, and their tokens
    assert read(settings()).digest() == first.digest()
    assert made == {path: path.stat().st_mtime_ns for path in Path(datasets.config.HF_DATASETS_CACHE).rglob("*.arrow")}


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_that_changed_is_read_anew(settings: Settings, tmp_path: Path, name: str):
    digests = set()
    for word in ("one", "two"):
        lines(tmp_path / name, {"text": word}) if name == "a.jsonl" else (tmp_path / name).write_text(word)
        digests.add(read(settings(text=(tmp_path / name,), sequence_length=2)).digest())
    assert len(digests) == 2


def test_windows_without_anything_to_learn_are_left_out(settings: Settings, tmp_path: Path):
    asked = {"role": "user", "content": "x" * 41}
    path = lines(tmp_path / "a.jsonl", {"messages": [asked, {"role": "assistant", "content": "yes"}]})
    config = settings(text=(path,), packing=True, sequence_length=16)
    tokenizer = tokenizer_of(config)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] + ':' + m.content }}{% endfor %}"
    sequences = read_sequences(config, tokenizer, "text", print)
    assert sequences.tokens == 41 + 2 + 2 + 3
    learned: Sequence[int] = [token for window in sequences for token in window["labels"].tolist() if token != IGNORED]
    assert bytes(learned).decode() in "a:yes"
    assert len(sequences) == 1
