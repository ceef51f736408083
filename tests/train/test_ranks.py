"""Does `headrace train` end with the same bits on any number of ranks, also when it goes on from another number?"""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file

from headrace.errors import TrainInputError
from headrace.train.config import TrainConfig
from headrace.train.trainer import train
from tests.support.compare import assert_same
from tests.support.nursery import Child, Nursery
from tests.train.conftest import Recorder

STEPS = 6  # two epochs of 17 sequences: steps of 4, 4 and 1 micro-batches


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    """Settings of a run in which an epoch ends with one micro-batch of one sequence."""
    text = tmp_path / "small.txt"
    text.write_text("".join(f"{number} times {number}.\n" for number in range(100))[: 17 * 32])
    line = {"text": (text,), "device": "cpu", "device_memory": "75%", "sequence_length": 32, "save_every": 2}
    return {**line, "batch_size": 2, "accumulate": 4, "steps": STEPS}


@pytest.fixture
def start(nursery: Nursery) -> Callable[..., list[Child]]:
    """Starts ranks, each of which trains with all of these settings, one after the other."""

    def start(world_size: int, *settings: dict[str, Any]) -> list[Child]:
        nursery.prepare("headrace.train.trainer", "peft", "transformers.models.gpt2.modeling_gpt2")
        ports = [free_port() for _ in settings]
        code = "from pathlib import PosixPath\nimport sys\nfrom tests.train.on_ranks import runs\n"
        code += f"runs(int(sys.argv[1]), {world_size}, {str(datasets.config.HF_DATASETS_CACHE)!r}, {ports}, {settings})"
        return [nursery.start(code, rank) for rank in range(world_size)]

    return start


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def end(ranks: Iterable[Child], said: str) -> None:
    for one in ranks:
        assert re.fullmatch(said, one.read_rest()), one.errors
        assert one.wait() == 0, one.errors


def come_to(output: Path) -> dict[str, Any]:
    """What a run has written: losses, evaluations, and each tensor of its model, its best one and its last checkpoint.

    Not random numbers, which no step goes on from.
    """
    found: dict[str, Any] = {}
    checkpoint = max((output / "checkpoints").glob("step-*"))
    for path in (*output.rglob("*.safetensors"), *checkpoint.glob("optimizer*.pt")):
        if path.is_relative_to(output / "checkpoints") and path.parent != checkpoint:
            continue
        tree = load_file(path) if path.suffix == ".safetensors" else torch.load(path)["state"]
        found |= {f"{path.relative_to(output)} {name}": value for name, value in leaves(tree)}
    told = json.loads((output / "training.json").read_text())
    assert len(told["losses"]) == STEPS
    assert len(found) > 8
    return {**dict(sorted(found.items())), "losses": told["losses"], "evaluations": told["evaluations"]}


def leaves(tree: Any) -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        yield from (
            ((f"{name} {inner}", one) for inner, one in leaves(value))
            if isinstance(value, dict)
            else [(str(name), value)]
        )


VARIANTS: dict[str, dict[str, Any]] = {
    "dropout, evaluation, updates beside forward": {"eval_every": 2, "overlap": "forward", "schedule": "cosine"},
    "adapters": {"lora_rank": 2, "lora_dropout": 0.1, "lora_targets": ("c_attn",)},
    "muon": {"optimizer": "muon"},
    "bfloat16, 8 bits, recomputed": {"dtype": "bfloat16", "state_dtype": "8bit", "gradient_checkpointing": True},
    "computed in bfloat16": {"param_dtype": "bfloat16", "overlap": "forward"},
    "activations": {"offload_activations": (), "grad_dtype": "float32"},
    "an accelerator": {"device": "emu", "overlap": "forward"},
    "a drive, evaluation": {"disk": 75, "eval_every": 2, "overlap": "forward"},
    "a drive, adapters": {"disk": 45, "lora_rank": 2, "lora_targets": ("c_attn",)},
    "a drive, muon, an accelerator": {"disk": 75, "optimizer": "muon", "device": "emu"},
}


@pytest.mark.extended
@pytest.mark.parametrize("model_directory", ["gpt2"], indirect=True)
@pytest.mark.timeout(300)  # each process imports what trains for seconds
def test_two_ranks_come_to_the_same_as_one(
    start: Callable[..., list[Child]], small: dict[str, Any], tmp_path: Path, model_directory: Path
) -> None:
    def every(world_size: int) -> list[dict[str, Any]]:
        common = {**small, "model": model_directory}
        found = []
        for number, variant in enumerate(VARIANTS.values()):
            eval_text = {"eval_text": small["text"]} if "eval_every" in variant else {}
            own = {"output": tmp_path / f"{number}-{world_size}"}
            if "disk" in variant:
                own |= {"disk": tmp_path / "disk", "host_memory": f"{variant['disk'] * world_size}%"}  # each has a ring
            found.append({**common, **variant, **eval_text, **own})
        return found

    for world_size in (1, 2):
        end(start(world_size, *every(world_size)), "done\n" * len(VARIANTS))
    for number in range(len(VARIANTS)):
        assert_same(come_to(tmp_path / f"{number}-2"), come_to(tmp_path / f"{number}-1"))
    assert not [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]


@pytest.mark.extended
@pytest.mark.parametrize("model_directory", ["gpt2"], indirect=True)
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_or_stopped_goes_on_with_other_ranks(
    start: Callable[..., list[Child]], small: dict[str, Any], tmp_path: Path, model_directory: Path, tier: str
) -> None:
    """On one rank, killed in step 2; on two, of which one is asked to stop in step 3; on four, killed in 5; on one."""
    common = {**small, "model": model_directory, "save_every": 1, "output": tmp_path / "out"}

    def on(ranks: int, **changes: Any) -> list[Child]:
        where = {"disk": tmp_path / "disk", "host_memory": f"{75 * ranks}%"} if tier == "disk" else {}
        return start(ranks, {**common, **where, **changes})

    end(start(1, {**common, "output": tmp_path / "whole"}), "done\n")
    (alone,) = on(1, ends=("killed", 2))
    assert alone.wait() == -9
    end(on(2, ends=("stopped", 2)), "stopped\n")
    assert (tmp_path / "out" / "checkpoints" / "step-00000003").is_dir()
    *others, last = on(4, ends=("killed", 2))
    end(others, "RankError rank . (has ended|waited for all 4 ranks).*\n")
    assert last.wait() == -9
    assert not (tmp_path / "out" / "training.json").exists()
    end(on(1), "done\n")
    assert_same(come_to(tmp_path / "out"), come_to(tmp_path / "whole"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model_directory", ["gpt2"], indirect=True)
def test_where_the_first_rank_cannot_save_all_end(
    start: Callable[..., list[Child]], small: dict[str, Any], tmp_path: Path, model_directory: Path
) -> None:
    settings = {**small, "model": model_directory, "save_every": 1, "output": tmp_path / "out", "ends": ("full", 2)}
    first, second = start(2, settings)
    end(
        [second], "OutOfMemoryError out of disk: rank 0 could not save .*/step-00000002.*DiskError: .*No space left.*\n"
    )
    end([first], "OutOfMemoryError out of disk: .*No space left.*\n")
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("*step-*")] == ["step-00000001"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"accumulate": 3}, "--accumulate is 3, which 2 ranks cannot share evenly: a step is of 6 sequences"),
        ({"device_fraction": 0.0, "device_memory": None}, "--device-fraction is for one process"),
        (
            {"disk": Path("disk"), "offload_activations": ("tier=disk",)},
            "--offload-activations tier=disk is for one process: .*leave tier=disk out",
        ),
        ({"device_fraction": "auto", "device_memory": None}, "--device-fraction is for one process"),
        (
            {"micro_batches_together": "all"},
            "--micro-batches-together is for one process yet: ranks average.* leave it out",
        ),
        ({"overlap": "backward", "max_grad_norm": 0}, "--overlap backward updates .*--overlap forward"),
        ({}, "WORLD_SIZE is 2 in the environment, and RANK is not set; start the ranks with torchrun"),
    ],
)
def test_what_ranks_cannot_take_is_refused(
    small: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    progress: Recorder,
    changes: dict[str, Any],
    says: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = {**small, "output": tmp_path / "out", "accumulate": 1 if "overlap" in changes else 2, **changes}
    with pytest.raises(TrainInputError, match=says):
        train(TrainConfig(**given), progress)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(TrainInputError, match="--compare-plain compares bits, and averages over 3 ranks round"):
        train(TrainConfig(**{**small, "output": tmp_path / "out", "accumulate": 3, "compare_plain": 1}), progress)


@pytest.mark.parametrize("told", ["abc", "", "-1", "0", "\u00b2"])
def test_a_number_of_ranks_that_is_none_is_refused(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Recorder, told: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", told)
    with pytest.raises(TrainInputError, match=f"WORLD_SIZE is '{told}' in the environment, and no number of ranks"):
        train(TrainConfig(**{**small, "output": tmp_path / "out"}), progress)


def test_a_number_of_a_rank_that_is_none_is_refused(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Recorder
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "abc"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainInputError, match="WORLD_SIZE is 2 in the environment, and LOCAL_RANK is 'abc', no number"):
        train(TrainConfig(**{**small, "output": tmp_path / "out", "accumulate": 2}), progress)


@pytest.mark.usefixtures("emu_device")
def test_each_rank_has_a_device_of_its_own(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Recorder
) -> None:
    environment = {"WORLD_SIZE": 4, "RANK": 2, "LOCAL_RANK": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(TrainInputError, match=r"rank 2 is number 2 .* has 2 devices; give torchrun --nproc-per-node 2"):
        train(TrainConfig(**{**small, "output": tmp_path / "out", "device": None}), progress)
    with pytest.raises(TrainInputError, match=r"--device emu:0 is one device for all ranks; give --device emu$"):
        train(TrainConfig(**{**small, "output": tmp_path / "out", "device": "emu:0"}), progress)


@pytest.mark.extended
def test_torchrun_trains_and_the_first_rank_tells(arguments: list[str], tmp_path: Path) -> None:
    """With the losses of one process without headrace, bit for bit, where one process accumulates micro-batches."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "headrace"]
    flags = ["--accumulate", "2", "--compare-plain", "2", "--device-memory", "70%"]
    done = subprocess.run([*start, *arguments, *flags], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("yes") == 2
    assert "NO" not in done.stdout
    assert done.stdout.count("saved in") == done.stderr.count("step 3/3: loss") == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()
