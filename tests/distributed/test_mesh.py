"""Do ranks that keep one copy of an offloaded model for their node train it as one process would, and fail together?"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.nursery import Nursery, run_ranks, start_ranks

pytestmark = pytest.mark.core(world_size=2, device="cpu")

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "adapters": {"adapters": True},
    "tied": {"tied": True},
    "experts": {"experts": 5},
    "recomputed": {"recomputes": True},
    "activations": {"activations": True},
}


@pytest.mark.core(kind="experts")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "device"), [(2, "cpu"), (4, "cpu"), (2, "emu")])
def test_gradients(nursery: Nursery, tmp_path: Path, kind: str, world_size: int, device: str) -> None:
    run_ranks(nursery, tmp_path, world_size, f"meshed.gradients_are_those_of_one_process, {KINDS[kind]!r}, {device!r}")


@pytest.mark.core(kind="full", name="AdamW", dtype="bfloat16", settings={"overlap": "forward"})
@pytest.mark.parametrize(
    ("world_size", "device", "kind", "name", "settings", "dtype"),
    [
        (2, "cpu", "full", "AdamW", {}, "float32"),
        (4, "cpu", "full", "AdamW", {}, "float32"),
        (2, "emu", "full", "AdamW", {"overlap": "forward"}, "float32"),
        (2, "emu", "full", "AdamW", {"update": "device"}, "float32"),
        (2, "cpu", "full", "AdamW", {"overlap": "forward"}, "bfloat16"),
        (4, "cpu", "full", "AdamW", {"overlap": "forward"}, "float32"),
        (2, "cpu", "adapters", "AdamW", {}, "float32"),
        (2, "cpu", "tied", "AdamW", {}, "float32"),
        (2, "cpu", "experts", "AdamW", {}, "float32"),
        (2, "cpu", "recomputed", "AdamW", {"overlap": "forward"}, "float32"),
        (2, "cpu", "full", "AdamW", {}, "bfloat16"),
        (2, "cpu", "full", "AdamW", {"master_form": "full"}, "bfloat16"),
        (2, "cpu", "full", "SGD", {"momentum": 0.9, "dampening": 0.1}, "float32"),
        (2, "cpu", "full", "Adam", {"state_dtype": "8bit"}, "float32"),
        (2, "cpu", "full", "Adafactor", {}, "float32"),
    ],
)
def test_steps(
    nursery: Nursery,
    tmp_path: Path,
    world_size: int,
    device: str,
    kind: str,
    name: str,
    settings: dict[str, Any],
    dtype: str,
) -> None:
    arguments = f"{KINDS[kind]!r}, {device!r}, {name!r}, {settings!r}, {dtype!r}"
    run_ranks(nursery, tmp_path, world_size, f"meshed.steps_are_those_of_one_process, {arguments}")


@pytest.mark.extended
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_run_goes_on_elsewhere(nursery: Nursery, tmp_path: Path, world_size: int) -> None:
    """Saved by four ranks; on as many as there are then, on two, on one, and without headrace."""
    (tmp_path / "saved").mkdir()
    run_ranks(nursery, tmp_path, 4, f"meshed.saved, {str(tmp_path / 'saved')!r}, 3")
    for kind in ("headrace", "state_dict", *(["stock"] if world_size == 1 else [])):
        run_ranks(nursery, tmp_path, world_size, f"meshed.resumed, {str(tmp_path / 'saved')!r}, {kind!r}, 3")


@pytest.mark.core(overlap="none")
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_no_rank_writes_what_another_is_saving(nursery: Nursery, tmp_path: Path, overlap: str) -> None:
    (tmp_path / "saved").mkdir()
    run_ranks(nursery, tmp_path, 2, f"meshed.saved_beside, {str(tmp_path / 'saved')!r}, {overlap!r}")


@pytest.mark.core(name="Muon", tier="disk")
@pytest.mark.parametrize("name", ["AdamW", "Muon"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_loaded_state(nursery: Nursery, tmp_path: Path, name: str, tier: str) -> None:
    run_ranks(nursery, tmp_path, 2, f"meshed.loaded_state_is_kept, {str(tmp_path)!r}, {name!r}, {tier!r}")


@pytest.mark.extended
@pytest.mark.parametrize(("world_size", "nodes"), [(2, 2), (4, 2)])
def test_nodes(nursery: Nursery, tmp_path: Path, world_size: int, nodes: int) -> None:
    run_ranks(nursery, tmp_path, world_size, f"meshed.nodes_add_their_averages, {nodes}")


@pytest.mark.extended
@pytest.mark.parametrize("world_size", [2, 4])
def test_accumulation(nursery: Nursery, tmp_path: Path, world_size: int) -> None:
    run_ranks(nursery, tmp_path, world_size, "meshed.accumulation")


@pytest.mark.extended
@pytest.mark.parametrize("world_size", [2, 4])
def test_one_copy_for_a_node(nursery: Nursery, tmp_path: Path, world_size: int) -> None:
    run_ranks(nursery, tmp_path, world_size, "meshed.one_copy_for_a_node")


@pytest.mark.core(
    program=["writes", "buffers_are_the_first_ranks", "settings_that_differ", "nodes_that_differ", "ranks_that_differ"]
)
@pytest.mark.parametrize(
    "program",
    [
        "writes",
        "models_that_differ",
        "buffers_are_the_first_ranks",
        "buffers_follow_the_first_rank",
        "settings_that_differ",
        "nodes_that_differ",
        "ranks_that_differ",
        "refusals",
        "what_the_first_rank_hands_out",
        "few_descriptors",
        "groups_have_one_user",
        "what_hooks_and_closures_write_counts",
        "what_layers_write_counts",
        "no_sync_is_forgotten_with_its_gradients",
        "what_no_sync_kept_is_averaged_once",
    ],
)
def test_what_users_do(nursery: Nursery, tmp_path: Path, program: str) -> None:
    run_ranks(nursery, tmp_path, 2, f"meshed.{program}")


@pytest.mark.core(how="dies")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "how", ["dies", "raises in forward", "raises in backward", "cleans up first", "ends early", "goes on"]
)
def test_a_rank_fails(nursery: Nursery, tmp_path: Path, how: str, world_size: int) -> None:
    *others, last = start_ranks(nursery, tmp_path, world_size, f"meshed.a_rank_fails, {how!r}")
    for one in others:
        assert one.read_rest() == "done\n", one.errors
        assert one.wait() == 0, one.errors
    last.wait()


def test_ranks_that_wait_for_each_other(nursery: Nursery, tmp_path: Path) -> None:
    *others, _ = start_ranks(nursery, tmp_path, 3, "meshed.ranks_that_wait_for_each_other_see_that_another_has_ended")
    for one in others:
        assert one.read_rest() == "done\n", one.errors


@pytest.mark.extended
def test_a_node_dies(nursery: Nursery, tmp_path: Path) -> None:
    first, last = start_ranks(nursery, tmp_path, 2, "meshed.a_node_dies")
    assert first.read_rest() == "done\n", first.errors
    assert first.wait() == 0, first.errors
    last.wait()


@pytest.mark.extended
@pytest.mark.parametrize("settings", [{}, {"onload": "gather"}, {"disk": True, "host_memory": "200KiB"}])
def test_descriptors_are_given_back(nursery: Nursery, tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = settings | ({"disk": str(tmp_path / "weights")} if "disk" in settings else {})
    run_ranks(nursery, tmp_path, 2, f"meshed.descriptors_are_given_back, {settings!r}")


def test_a_rank_may_reach_no_trained_parameter(nursery: Nursery, tmp_path: Path) -> None:
    run_ranks(nursery, tmp_path, 2, "meshed.a_rank_may_reach_no_trained_parameter")


def test_an_order_is_kept_once(nursery: Nursery, tmp_path: Path) -> None:
    run_ranks(nursery, tmp_path, 2, f"meshed.an_order_is_kept_once, {str(tmp_path)!r}")
