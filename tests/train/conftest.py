"""What do the tests of training share? A text, a small model on the disk, and the smallest useful settings."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from headrace.train.byte_tokenizer import END_ID, PAD_ID, VOCABULARY_SIZE, byte_tokenizer
from headrace.train.config import TrainConfig
from headrace.train.data import Batches, read_sequences
from headrace.train.evaluation import Evaluation
from headrace.train.model import load_model, tokenizer_of
from headrace.train.progress import Progress, StepRecord
from headrace.train.ranks import World
from headrace.train.run import PlainRun, set_seed


class Recorder(Progress):
    """Keeps everything it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.records: list[StepRecord] = []
        self.evaluations: list[Evaluation] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, record: StepRecord) -> None:
        self.records.append(record)

    def evaluation(self, measured: Evaluation) -> None:
        self.evaluations.append(measured)


def train_plainly(config: TrainConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of all steps of a run without headrace, and the weights that it comes to."""
    sequences = read_sequences(config, tokenizer_of(config), "text", print)
    batches = Batches(sequences, batch_size=config.batch_size, accumulate=config.accumulate, seed=config.seed)
    model = load_model(config).model
    set_seed(config.seed)
    run = PlainRun(model, config, World(config.compute_device()), steps=config.steps)
    losses = [run.step(micro_batches) for micro_batches in itertools.islice(batches, config.steps)]
    return losses, model.state_dict()


@pytest.fixture(autouse=True)
def data_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `datasets` keeps for later runs is kept for this test; processes that it starts find it, too."""
    cache = tmp_path_factory.mktemp("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    datasets.disable_progress_bars()


@pytest.fixture
def progress() -> Recorder:
    return Recorder()


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} times {number} is {number * number}.\n" for number in range(400)))
    return path


@pytest.fixture
def settings(text_file: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Makes a config of a run of two seconds; keyword arguments change it."""

    def make(**changes: Any) -> TrainConfig:
        small = {"device": "cpu", "batch_size": 2, "sequence_length": 32, "steps": 3}
        if "model" not in changes:
            small |= {"layers": 4, "hidden_size": 64}
        return TrainConfig(**{"text": (text_file,), "output": tmp_path / "out", **small, **changes})

    return make


@pytest.fixture
def arguments(text_file: Path, tmp_path: Path) -> list[str]:
    """The same run, as arguments of the command line."""
    line = f"train --text {text_file} --output {tmp_path / 'out'} --device cpu --layers 4 --hidden-size 64"
    return [*line.split(), "--batch-size", "2", "--sequence-length", "32", "--steps", "3"]


@pytest.fixture(params=["llama", "gpt2"])
def model_directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A causal model with its tokenizer; GPT-2 has tied embeddings and dropout."""
    torch.manual_seed(0)
    ids = {"vocab_size": VOCABULARY_SIZE, "bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    model = {
        "llama": lambda: LlamaForCausalLM(
            LlamaConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=4,
                num_attention_heads=4,
                max_position_embeddings=64,
                **ids,
            )
        ),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=64, **ids)),
    }[request.param]()
    directory = tmp_path / "model"
    model.save_pretrained(directory)
    byte_tokenizer(longest=64).save_pretrained(directory)
    return directory
