"""Do ranks that share an optimizer's work (ZeRO-1, and matrices of which each has a shard) keep every bit, and 1/N?"""

from pathlib import Path

import pytest

from tests.support.nursery import Nursery, run_ranks

pytestmark = pytest.mark.core(world_size=2)


@pytest.mark.extended
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Lion", "Adafactor"])
def test_replicas_step_as_the_stock_optimizer(nursery: Nursery, tmp_path: Path, name: str, world_size: int) -> None:
    run_ranks(nursery, tmp_path, world_size, f"dealt.steps_are_those_of_stock, {name!r}")


@pytest.mark.core(settings="{'max_grad_norm': 0.01}", name="AdamW", dtype="bfloat16")
@pytest.mark.parametrize(
    ("name", "dtype", "settings", "disk"),
    [
        ("Muon", "float32", "{}", False),
        ("Muon", "bfloat16", "{'max_grad_norm': 0.01}", True),
        ("AdamW", "bfloat16", "{'max_grad_norm': 0.01}", False),
        ("AdamW", "bfloat16", "{'master_form': 'full'}", False),
        ("AdamW", "bfloat16", "{'state_dtype': '8bit'}", False),
        ("AdamW", "float32", "{'max_grad_norm': 0.01}", True),
        ("Adafactor", "bfloat16", "{}", True),
    ],
)
def test_replicas_step_as_one_process(
    nursery: Nursery, tmp_path: Path, name: str, dtype: str, settings: str, disk: bool
) -> None:
    for number in (0, 1):
        (tmp_path / f"disk-{number}").mkdir()
    place = repr(str(tmp_path / "disk")) if disk else None
    run_ranks(nursery, tmp_path, 2, f"dealt.as_in_one_process, {name!r}, torch.{dtype}, {settings}, {place}, 4")


def test_weights_without_masters(nursery: Nursery, tmp_path: Path) -> None:
    run_ranks(nursery, tmp_path, 2, "dealt.rounded_as_in_one_process")


@pytest.mark.core(name="AdamW")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_gradients_are_at_their_owners(nursery: Nursery, tmp_path: Path, name: str, world_size: int) -> None:
    run_ranks(nursery, tmp_path, world_size, f"dealt.gradients_are_at_their_owners, {name!r}")


@pytest.mark.extended
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_leave_together(nursery: Nursery, tmp_path: Path, world_size: int) -> None:
    run_ranks(nursery, tmp_path, world_size, "dealt.neighbours_leave_together")


@pytest.mark.extended
@pytest.mark.parametrize("program", ["more_ranks_than_parameters", "large_tensors"])
def test_four_ranks(nursery: Nursery, tmp_path: Path, program: str) -> None:
    run_ranks(nursery, tmp_path, 4, f"dealt.{program}")


@pytest.mark.core(program=["offloaded", "micro_batches_are_added_up"])
@pytest.mark.parametrize(
    "program",
    [
        "offloaded",
        "skipped_together",
        "writes_are_noticed",
        "other_copies",
        "meshes_of_the_wrong_kind",
        "ranks_disagree",
        "a_rank_fails",
        "micro_batches_are_added_up",
        "micro_batches_are_added_up, 8192",
        "micro_batches_are_added_up, 8192, 8192",
        "ranks_use_different_parameters",
        "optimizers_end_in_one_order",
        "megatrons_distributed_optimizer",
        "another_dtype_comes_later",
        "parameters_that_are_used_again",
        "zero_stage_two_is_misused",
        "grad_scalers",
    ],
)
def test_two_ranks(nursery: Nursery, tmp_path: Path, program: str) -> None:
    run_ranks(nursery, tmp_path, 2, f"dealt.{program}")


@pytest.mark.extended
@pytest.mark.parametrize("program", ["a_rank_stays_away", "a_backward_raises"])
def test_a_rank_that_takes_no_step(nursery: Nursery, tmp_path: Path, program: str) -> None:
    code = f"import sys\nfrom tests.distributed import dealt as p\np.{program}(sys.argv[1], int(sys.argv[2]))"
    ranks = [nursery.start(code, tmp_path / "store", rank) for rank in range(2)]
    for one in reversed(ranks):
        assert one.read_rest() == "done\n", one.errors
        assert one.wait() == 0, one.errors


@pytest.mark.extended
@pytest.mark.parametrize(("name", "dtype"), [("AdamW", "float32"), ("AdamW", "bfloat16"), ("Adafactor", "float32")])
def test_consolidated_states(nursery: Nursery, tmp_path: Path, name: str, dtype: str) -> None:
    path = f"Path({str(tmp_path)!r})"
    run_ranks(nursery, tmp_path, 2, f"dealt.consolidated, {path}, {name!r}, torch.{dtype}")
    for world_size in (1, 3):
        run_ranks(nursery, tmp_path, world_size, f"dealt.continued, {path} / 'saved.pt', {name!r}, torch.{dtype}")


@pytest.mark.core(disk=True, name="AdamW")
@pytest.mark.parametrize(("name", "disk"), [("AdamW", False), ("AdamW", True), ("Muon", True)])
def test_checkpoints(nursery: Nursery, tmp_path: Path, name: str, disk: bool) -> None:
    for rank in range(2):
        (tmp_path / f"disk-{rank}").mkdir()
    run_ranks(nursery, tmp_path, 2, f"dealt.saved_by_headrace, Path({str(tmp_path)!r}), {name!r}, {disk}")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "dtype", "zero_stage"),
    [("AdamW", "float32", 1), ("AdamW", "bfloat16", 2), ("Muon", "float32", 1), ("Muon", "float32", 2)],
)
def test_distributed_checkpoints(nursery: Nursery, tmp_path: Path, name: str, dtype: str, zero_stage: int) -> None:
    """Saved by two ranks, resumed by these, by one and by three, in each stage and without a mesh."""
    path = f"Path({str(tmp_path)!r})"
    run_ranks(nursery, tmp_path, 2, f"dealt.saved_by_dcp, {path}, {name!r}, torch.{dtype}, {zero_stage}")
    for world_size in (1, 3):
        run_ranks(nursery, tmp_path, world_size, f"dealt.resumed_by_dcp, {path}, {name!r}, torch.{dtype}")


@pytest.mark.core(offload=True, name="Muon")
@pytest.mark.parametrize("offload", [False, True], ids=["plain", "offload_policy"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_matrices_step_as_whole_ones(
    nursery: Nursery, tmp_path: Path, name: str, world_size: int, offload: bool
) -> None:
    settings = "{'max_grad_norm': 0.01}" if offload else "{}"
    call = f"dealt.matrices_step_as_whole_ones, {name!r}, ({world_size},), {offload}, torch.float32, {settings}, None"
    run_ranks(nursery, tmp_path, world_size, call)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_narrow_matrices(nursery: Nursery, tmp_path: Path, name: str) -> None:
    """On four ranks in two replicas; with masters; and on disk."""
    for part in ("(2, 2), False, torch.float32, {}, None", "(4,), True, torch.bfloat16, {}, None"):
        run_ranks(nursery, tmp_path, 4, f"dealt.matrices_step_as_whole_ones, {name!r}, {part}")
    places = [tmp_path / f"disk-{number}-{rank}" for number in (0, 1) for rank in (0, 1)]
    for place in places:
        place.mkdir()
    disk = str(tmp_path / "disk")
    part = f"(2,), False, torch.bfloat16, {{}}, {disk!r}"
    run_ranks(nursery, tmp_path, 2, f"dealt.matrices_step_as_whole_ones, {name!r}, {part}")


@pytest.mark.extended
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_matrices_of_a_plain_model_with_overlap(nursery: Nursery, tmp_path: Path, name: str) -> None:
    """Their updates are done when step() returns."""
    call = f"dealt.matrices_step_as_whole_ones, {name!r}, (2,), False, torch.float32, {{'overlap': 'forward'}}, None"
    run_ranks(nursery, tmp_path, 2, call)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_tensor_parallel_matrices(nursery: Nursery, tmp_path: Path, name: str) -> None:
    run_ranks(nursery, tmp_path, 2, f"dealt.tensor_parallel_matrices, {name!r}")


@pytest.mark.extended
@pytest.mark.parametrize(("name", "dtype"), [("Muon", "float32"), ("Adafactor", "bfloat16")])
def test_checkpoints_of_matrices(nursery: Nursery, tmp_path: Path, name: str, dtype: str) -> None:
    path = f"Path({str(tmp_path)!r})"
    run_ranks(nursery, tmp_path, 2, f"dealt.matrices_saved, {path}, {name!r}, torch.{dtype}")
    for world_size in (1, 3):
        run_ranks(nursery, tmp_path, world_size, f"dealt.matrices_resumed, {path}, {name!r}, torch.{dtype}")


@pytest.mark.extended
@pytest.mark.parametrize("program", ["matrices_that_cannot_be", "written_between"])
def test_matrices_between_steps(nursery: Nursery, tmp_path: Path, program: str) -> None:
    run_ranks(nursery, tmp_path, 2, f"dealt.{program}")
