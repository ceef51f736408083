"""Do Trainer, TRL, accelerate and Lightning train an offloaded model on several ranks as their own wrappers would?"""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.frameworks import SETUP
from tests.support.nursery import Nursery, run_ranks


@pytest.fixture(autouse=True)
def frameworks(nursery: Nursery) -> None:
    """Each of the many processes would import them for seconds."""
    nursery.prepare(*(f"tests.integrations.test_{one}" for one in ("lightning", "trainer", "trl")))


def run(nursery: Nursery, directory: Path, program: str, *arguments: Any) -> None:
    given = "".join(f", {one!r}" for one in (str(directory / "runs"), *arguments))
    run_ranks(nursery, directory, 2, f"frameworks.{program}{given}", SETUP)


ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
BEST = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "greater_is_better": True}


TRAINED: dict[str, dict[str, Any]] = {
    "accumulated": {**ACCUMULATED, "max_steps": 2, "save_strategy": "no"},
    "best": {**ACCUMULATED, **BEST, "overlap": "forward"},
    "bfloat16": {**BEST, "bf16": True},
}


@pytest.mark.parametrize("way", TRAINED)
@pytest.mark.core(way="accumulated")
def test_trainer(nursery: Nursery, tmp_path: Path, way: str) -> None:
    run(nursery, tmp_path, "trainer", TRAINED[way])


@pytest.mark.extended
@pytest.mark.parametrize(
    "changes",
    [{}, {"overlap": "forward", "saves": True}, {"saves": True, "save_only_model": True}],
    ids=["the Trainer's", "both", "headrace's alone"],
)
def test_trainer_resumes(nursery: Nursery, tmp_path: Path, changes: dict[str, Any]) -> None:
    run(nursery, tmp_path, "trainer_resumes", changes)


@pytest.mark.core(place="headrace's")
@pytest.mark.parametrize("place", ["headrace's", "weights", "optimizer"])
def test_where_the_first_rank_cannot_save_all_raise(nursery: Nursery, tmp_path: Path, place: str) -> None:
    run(nursery, tmp_path, "trainer_cannot_save", place)


@pytest.mark.core(precision="no")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(nursery: Nursery, tmp_path: Path, precision: str) -> None:
    run(nursery, tmp_path, "accelerate", precision)


@pytest.mark.extended
def test_refusals(nursery: Nursery, tmp_path: Path) -> None:
    run_ranks(nursery, tmp_path, 2, "frameworks.refused", SETUP)


def test_lightning(nursery: Nursery, tmp_path: Path) -> None:
    run(nursery, tmp_path, "lightning_trainer")


@pytest.mark.extended
def test_fabric(nursery: Nursery, tmp_path: Path) -> None:
    run(nursery, tmp_path, "fabric")


@pytest.mark.extended
def test_where_lightnings_first_rank_cannot_save_all_raise(nursery: Nursery, tmp_path: Path) -> None:
    run(nursery, tmp_path, "lightning_cannot_save")


@pytest.mark.extended
@pytest.mark.parametrize("script", ["tuned", "synchronised", "grpo"])
def test_trl(nursery: Nursery, tmp_path: Path, script: str) -> None:
    """SFT; DPO, whose reference follows the model; GRPO."""
    run(nursery, tmp_path, "trl", script)


@pytest.mark.extended
def test_the_guide(nursery: Nursery, tmp_path: Path) -> None:
    run(nursery, tmp_path, "guide")
