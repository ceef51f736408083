"""Do ranks that have one copy of weights, which travel in another dtype, train them as one process does?"""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_mesh import KINDS
from tests.support.nursery import Nursery, run_ranks

pytestmark = pytest.mark.core(world_size=2, device="cpu")


@pytest.mark.core(dtypes=[("float32", "bfloat16"), ("bfloat16", "bfloat16")], kind="full", way="own")
@pytest.mark.parametrize(
    ("world_size", "device", "kind", "dtypes", "settings", "way"),
    [
        (2, "cpu", "full", ("float32", "bfloat16"), {}, "own"),
        (4, "cpu", "full", ("float32", "bfloat16"), {"overlap": "forward"}, "own"),
        (2, "cpu", "full", ("float32", "float64"), {}, "own"),
        (2, "cpu", "full", ("bfloat16", "float32"), {"master_form": "full"}, "own"),
        (2, "cpu", "full", ("bfloat16", "float32"), {"overlap": "forward"}, "own"),
        (2, "cpu", "full", ("bfloat16", "bfloat16"), {}, "own"),
        (2, "cpu", "tied", ("float32", "bfloat16"), {}, "own"),
        (2, "cpu", "adapters", ("float32", "bfloat16"), {"overlap": "forward"}, "own"),
        (2, "cpu", "experts", ("float32", "bfloat16"), {}, "own"),
        (2, "emu", "full", ("float32", "bfloat16"), {"overlap": "forward"}, "own"),
        (2, "cpu", "full", ("float32", "bfloat16"), {}, "gather"),
        (2, "emu", "full", ("float32", "bfloat16"), {"overlap": "forward"}, "gather"),
        (2, "cpu", "full", ("float32", "bfloat16"), {"tier": "disk"}, "disk"),
        (2, "emu", "full", ("float32", "bfloat16"), {"tier": "disk", "overlap": "forward"}, "disk"),
    ],
)
def test_steps(
    nursery: Nursery,
    tmp_path: Path,
    world_size: int,
    device: str,
    kind: str,
    dtypes: tuple[str, str],
    settings: dict[str, Any],
    way: str,
) -> None:
    arguments = f"{str(tmp_path)!r}, {KINDS[kind]!r}, {device!r}, {dtypes!r}, {settings!r}, {way!r}"
    run_ranks(nursery, tmp_path, world_size, f"narrow.steps_are_those_of_one_process, {arguments}")


def test_policies_are_those_of_fsdp(nursery: Nursery, tmp_path: Path) -> None:
    run_ranks(nursery, tmp_path, 2, f"narrow.policies_are_those_of_fsdp, {str(tmp_path)!r}")


@pytest.mark.extended
@pytest.mark.parametrize("world_size", [2, 4])
def test_one_copy_for_a_node(nursery: Nursery, tmp_path: Path, world_size: int) -> None:
    run_ranks(nursery, tmp_path, world_size, "narrow.one_copy_for_a_node")


@pytest.mark.extended
def test_a_budget_is_for_both(nursery: Nursery, tmp_path: Path) -> None:
    run_ranks(nursery, tmp_path, 2, "narrow.a_budget_is_for_both")


@pytest.mark.extended
def test_a_run_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    run_ranks(nursery, tmp_path, 2, f"narrow.goes_on, {str(tmp_path)!r}")
