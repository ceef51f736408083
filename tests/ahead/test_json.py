"""Is what `--json` prints what its page says, no more and no less, and JSON that every reader takes?"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.main import main
from millrace.planning.cost import MACHINES
from tests.cost.conftest import LLAMA_8B, LLAMA_70B

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
NO_RUN = {"step_seconds", "tokens_per_second", "efficiency", "resident_fraction", "floors_seconds", "busy_seconds"}


def documented(table: int) -> set[str]:
    """The keys in the first column of a table of the page."""
    rows = PAGE.split("|---|---|\n")[table].split("\n\n")[0].splitlines()
    return {key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def described(key: str) -> set[str]:
    """All names within a key's row."""
    row = next(row for row in PAGE.splitlines() if row.startswith(f"| `{key}` |"))
    return set(re.findall(r"`(\w+)`", row))


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["4090", "--batch-size", "4"],
        ["4090", "--training", "inference"],
        ["4090", "--host-memory", "40GiB"],
        ["8xh200", "--devices", "8", "--zero-stage", "3"],
    ],
)
def test_a_plan_has_the_documented_keys(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main(["plan", str(tmp_path), "--json", "--hardware", *arguments]) == 0
    printed = strict(capsys.readouterr().out)
    assert set(printed) == documented(1)
    assert printed["version"] == 1
    for key in ("model", "work", "spread", "method", "floors_seconds", "busy_seconds"):
        assert set(printed[key]) <= described(key), key
    assert set(printed["moved_bytes"]) == set(printed["busy_seconds"])
    assert set(printed["hardware"]) == documented(2) | {"duplex_share", "update_bytes_per_second"}
    for key in ("tiers", "helps", "options"):
        assert all(set(entry) <= described(key) for entry in printed[key]), key
    assert printed["tokens_per_second"] > 0


def test_a_plan_that_does_not_fit_has_the_same_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    assert main(["plan", str(tmp_path), "--json", "--no-disk", "--hardware", "4090", "h100"]) == 1
    one, other = strict(capsys.readouterr().out)
    assert set(one) == set(other) == documented(1)
    assert not one["fits"]
    assert {key for key, value in one.items() if value is None} >= NO_RUN
    assert one["fixes"]


def test_a_machine_has_the_documented_keys() -> None:
    for machine in MACHINES.values():
        assert set(strict(machine.to_json())) == documented(2) | {"duplex_share", "update_bytes_per_second"}
