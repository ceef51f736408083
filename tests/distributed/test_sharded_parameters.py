"""Do optimizers of headrace train models under fully_shard, and with DTensor weights of any kind, as stock ones do?"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.nursery import Nursery, run_ranks

pytestmark = pytest.mark.core(world_size=2)


@pytest.mark.core(offload=True)
@pytest.mark.parametrize("offload", [False, True], ids=["plain", "offload_policy"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_steps_are_those_of_the_stock_optimizer(
    nursery: Nursery, tmp_path: Path, world_size: int, offload: bool
) -> None:
    run_ranks(nursery, tmp_path, world_size, f"programs.optimizer_equals_stock, ({world_size},), {offload}, {{}}, 1")


@pytest.mark.extended
@pytest.mark.parametrize("shape", [(2, 2), (1, 2)])
def test_replicated_shards(nursery: Nursery, tmp_path: Path, shape: tuple[int, int]) -> None:
    run_ranks(nursery, tmp_path, shape[0] * shape[1], f"programs.optimizer_equals_stock, {shape}, False, {{}}, 1")


@pytest.mark.extended
def test_accumulation_without_synchronisation(nursery: Nursery, tmp_path: Path) -> None:
    run_ranks(nursery, tmp_path, 2, "programs.optimizer_equals_stock, (2,), False, {}, 3")


@pytest.mark.extended
def test_state_on_disk(nursery: Nursery, tmp_path: Path) -> None:
    settings = {"tier": "disk", "disk": str(tmp_path / "disk")}
    (tmp_path / "disk").mkdir()
    run_ranks(nursery, tmp_path, 2, f"programs.optimizer_equals_stock, (2,), True, {settings}, 1")


@pytest.mark.extended
def test_state_is_sharded_as_the_stock_one(nursery: Nursery, tmp_path: Path) -> None:
    run_ranks(nursery, tmp_path, 2, "programs.state_is_sharded")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        ("float32", {}),
        ("bfloat16", {}),
        ("bfloat16", {"master_form": "full"}),
        ("float32", {"state_dtype": "torch.bfloat16"}),
    ],
)
def test_checkpoints(nursery: Nursery, tmp_path: Path, dtype: str, settings: dict[str, Any]) -> None:
    """Saved by four ranks, resumed by these, by two, and by the stock optimizer."""
    given = "{" + ", ".join(f"{k!r}: {v if 'torch' in v else repr(v)}" for k, v in settings.items()) + "}"
    saved = tmp_path / "saved"
    run_ranks(nursery, tmp_path, 4, f"programs.saved_and_resumed, Path({str(saved)!r}), (4,), torch.{dtype}, {given}")
    run_ranks(nursery, tmp_path, 2, f"programs.resumed_elsewhere, Path({str(saved)!r}), torch.{dtype}, {given}")


def test_tensor_parallel(nursery: Nursery, tmp_path: Path) -> None:
    run_ranks(nursery, tmp_path, 2, "programs.tensor_parallel")


@pytest.mark.extended
@pytest.mark.parametrize(
    "program", ["writes_are_noticed", "agreement", "states_that_lie_otherwise", "refusals", "eight_bits"]
)
def test_what_is_noticed_and_what_cannot_be(nursery: Nursery, tmp_path: Path, program: str) -> None:
    run_ranks(nursery, tmp_path, 2, f"programs.{program}")


@pytest.mark.extended
@pytest.mark.parametrize("how", ["ddp", "fully_shard"])
def test_activations(nursery: Nursery, tmp_path: Path, how: str) -> None:
    run_ranks(nursery, tmp_path, 2, f"programs.activations, {how!r}")
