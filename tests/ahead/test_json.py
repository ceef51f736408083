"""Is what `--json` prints what its page says, no more and no less, and JSON that every reader takes?"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.cli.main import main
from headrace.planning.cost import MACHINES
from tests.cost.conftest import LLAMA_8B, LLAMA_70B, QWEN3_30B_A3B

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
NO_RUN = {
    "step_seconds",
    "tokens_per_second",
    "efficiency",
    "resident_fraction",
    "floors_seconds",
    "busy_seconds",
    "in_use",
    "sharing",
    "latency_share",
}


def documented(table: int) -> set[str]:
    """The keys in the first column of a table of the page."""
    rows = PAGE.split("|---|---|\n")[table].split("\n\n")[0].splitlines()
    return {key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def described(key: str) -> set[str]:
    """The keys within what a key has, by the second column of its row."""
    (row,) = [row for row in PAGE.splitlines() if re.match(rf"\|[^|]*`{key}`[^|]*\|", row)]
    return set(re.findall(r"`([a-z_ ]+)`", row.split("|")[2])) - {"null"}


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def check(plan: dict[str, Any], hiding: set[str]) -> None:
    """Every key of a plan is on the page, and every key there is in the plan: nested ones too. Bytes are integers."""
    assert set(plan) == documented(1)
    check_machine(plan["hardware"])
    for key, value in plan.items():
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if key == "hiding_tokens":
                assert set(entry) == hiding <= described(key)
            elif isinstance(entry, dict) and key != "hardware":
                assert set(entry) == described(key), key
            elif key not in ("hardware", *NO_RUN):
                assert value is None or not described(key), key
    for option in plan["options"]:
        assert set(option["lacks_bytes"]) <= {"device", "host", "disk"}
    assert not [name for name, value in bytes_in(plan) if not isinstance(value, int)]
    assert plan["version"] == 1


def check_machine(machine: dict[str, Any]) -> None:
    assert set(machine) == documented(2)
    assert set(machine["sources"]) <= documented(2) - {"name", "sources"}
    assert not [name for name, value in bytes_in(machine) if not isinstance(value, int)]


def bytes_in(entry: Any, name: str = "") -> list[tuple[str, Any]]:
    """All that are called bytes, but for those of a parameter's state, which may be a fraction."""
    if isinstance(entry, list):
        return [found for each in entry for found in bytes_in(each, name)]
    if isinstance(entry, dict):
        inherited = name if name.endswith("bytes") else ""
        items = [(key, value) for key, value in entry.items() if key != "sources"]
        return [found for key, value in items for found in bytes_in(value, inherited or key)]
    is_bytes = name.endswith(("bytes", "bytes_per_step")) and name != "state_bytes"
    return [(name, entry)] if is_bytes and entry is not None else []


@pytest.mark.parametrize(
    ("arguments", "hiding"),
    [
        (["4090", "--batch-size", "4"], {"onload", "update"}),
        (["4090", "--training", "inference"], set()),
        (["4090", "--training", "inference", "--method", "cache=disk"], {"onload"}),
        pytest.param(
            ["4090", "--host-memory", "40GiB"],
            {"onload", "fetch of weights", "update", "state on disk"},
            marks=pytest.mark.extended,
        ),
        (["8xh200", "--devices", "8", "--zero-stage", "2"], set()),
        (["8xh200", "--nodes", "2", "--method", "stream-weights"], {"onload", "update"}),
    ],
)
def test_a_plan_has_the_documented_keys(
    arguments: list[str], hiding: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main(["plan", str(tmp_path), "--json", "--hardware", *arguments]) == 0
    printed = strict(capsys.readouterr().out)
    check(printed, hiding)
    assert printed["tokens_per_second"] > 0


def test_a_plan_that_does_not_fit_has_the_same_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    assert main(["plan", str(tmp_path), "--json", "--no-disk", "--hardware", "4090", "h100"]) == 1
    one, other = strict(capsys.readouterr().out)
    for plan in (one, other):
        check(plan, {"update"} if plan["method"]["weights"] == "device" else {"onload", "update"})
    assert not one["fits"]
    assert {key for key, value in one.items() if value is None} == {*NO_RUN, "moved_bytes", "wear_steps", "decoding"}
    assert one["fixes"]
    assert all(isinstance(fix, str) for fix in one["fixes"])


@pytest.mark.extended
def test_state_in_8_bits_is_a_fraction_of_a_byte_more() -> None:
    plans = [headrace.plan(LLAMA_8B, hardware="h100", state_dtype=dtype).to_dict() for dtype in ("float32", "8bit")]
    assert [plan["work"]["state_bytes"] for plan in plans] == [8.0, 2.0625]


def test_a_machine_has_the_documented_keys() -> None:
    for machine in MACHINES.values():
        check_machine(strict(machine.to_json()))


def test_decoding_with_experts_has_the_documented_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    arguments = ["--training", "inference", "--hardware", "4090", "--expert-hit-rate", "0.8"]
    assert main(["plan", str(tmp_path), "--json", *arguments]) == 0
    plan = strict(capsys.readouterr().out)
    check(plan, {"onload"})
    decoding = plan["decoding"]
    rates = [decoding["whole"], decoding["even"], decoding["given"], *decoding["rates"]]
    assert all({*decoding["experts"], *rate} == documented(-1) for rate in rates)
    assert decoding["given"]["hit_rate"] == 0.8
