"""Do ranks that keep one copy of an offloaded model for their node train it as one process would, and fail together?"""

from pathlib import Path
from typing import Any

import pytest

from tests.nursery import Nursery

pytestmark = pytest.mark.core(world_size=2, device="cpu")

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "adapters": {"adapters": True},
    "tied": {"tied": True},
    "experts": {"experts": 5},
    "recomputed": {"recomputes": True},
    "activations": {"activations": True},
}


def started(nursery: Nursery, directory: Path, world_size: int, call: str, module: str = "meshed") -> list[Any]:
    """Every rank runs that call of tests/distributed/meshed.py (`m`), or of another module there; `d` is on_disk.py."""
    code = f"import torch\nfrom tests.distributed import {module} as m, on_disk as d, programs as p\np.run({call})"
    file = directory / f"store-{len(list(directory.iterdir()))}"
    return [nursery.start(code, file, world_size, rank) for rank in range(world_size)]


def run(nursery: Nursery, directory: Path, world_size: int, call: str) -> None:
    ranks = started(nursery, directory, world_size, call)
    said = [one.read_rest() for one in ranks]
    ended = [one.wait() for one in ranks]
    assert (said, ended) == (["done\n"] * world_size, [0] * world_size), "\n".join(one.errors for one in ranks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "device"), [(2, "cpu"), (4, "cpu"), (2, "emu")])
def test_gradients(nursery: Nursery, tmp_path: Path, kind: str, world_size: int, device: str) -> None:
    run(nursery, tmp_path, world_size, f"m.gradients_are_those_of_one_process, {KINDS[kind]!r}, {device!r}")


@pytest.mark.core(kind=["full", "tied", "experts"])
@pytest.mark.parametrize(
    ("world_size", "device", "kind", "name", "settings", "dtype"),
    [
        (2, "cpu", "full", "AdamW", {}, "float32"),
        (4, "cpu", "full", "AdamW", {}, "float32"),
        (2, "emu", "full", "AdamW", {"overlap": "forward"}, "float32"),
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
    run(nursery, tmp_path, world_size, f"m.steps_are_those_of_one_process, {arguments}")


@pytest.mark.core(world_size=3)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_run_goes_on_elsewhere(nursery: Nursery, tmp_path: Path, world_size: int) -> None:
    """Saved by four ranks; on as many as there are then, on two, on one, and without headrace."""
    (tmp_path / "saved").mkdir()
    run(nursery, tmp_path, 4, f"m.saved, {str(tmp_path / 'saved')!r}, 3")
    for kind in ("headrace", "state_dict", *(["stock"] if world_size == 1 else [])):
        run(nursery, tmp_path, world_size, f"m.resumed, {str(tmp_path / 'saved')!r}, {kind!r}, 3")


@pytest.mark.core(world_size=4)
@pytest.mark.parametrize(("world_size", "nodes"), [(2, 2), (4, 2)])
def test_nodes(nursery: Nursery, tmp_path: Path, world_size: int, nodes: int) -> None:
    run(nursery, tmp_path, world_size, f"m.nodes_add_their_averages, {nodes}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_accumulation(nursery: Nursery, tmp_path: Path, world_size: int) -> None:
    run(nursery, tmp_path, world_size, "m.accumulation")


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_copy_for_a_node(nursery: Nursery, tmp_path: Path, world_size: int) -> None:
    run(nursery, tmp_path, world_size, "m.one_copy_for_a_node")


@pytest.mark.parametrize(
    "program",
    [
        "writes",
        "models_that_differ",
        "refusals",
        "few_descriptors",
        "groups_have_one_user",
        "what_hooks_and_closures_write_counts",
        "what_layers_write_counts",
        "no_sync_is_forgotten_with_its_gradients",
        "what_no_sync_kept_is_averaged_once",
    ],
)
def test_what_users_do(nursery: Nursery, tmp_path: Path, program: str) -> None:
    run(nursery, tmp_path, 2, f"m.{program}")


@pytest.mark.core(how=["dies", "raises in forward"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "how", ["dies", "raises in forward", "raises in backward", "cleans up first", "ends early", "goes on"]
)
def test_a_rank_fails(nursery: Nursery, tmp_path: Path, how: str, world_size: int) -> None:
    *others, last = started(nursery, tmp_path, world_size, f"m.a_rank_fails, {how!r}")
    for one in others:
        assert one.read_rest() == "done\n", one.errors
        assert one.wait() == 0, one.errors
    last.wait()


@pytest.mark.parametrize("settings", [{}, {"onload": "gather"}, {"disk": True, "host_memory": "200KiB"}])
def test_descriptors_are_given_back(nursery: Nursery, tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = settings | ({"disk": str(tmp_path / "weights")} if "disk" in settings else {})
    run(nursery, tmp_path, 2, f"m.descriptors_are_given_back, {settings!r}")
