"""Does `python -m benchmarks.gpu` measure what it says? Each case, tiny, on the emulated accelerator."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.__main__ import rows_of
from benchmarks.gpu.cases import CASES, GIB, Job, is_headrace, meta_model
from benchmarks.gpu.floor import floor_of, must_of
from benchmarks.gpu.page import cells, is_bad
from benchmarks.gpu.table import judged
from benchmarks.gpu.ways import no_room
from headrace.planning.cost import MACHINES
from tests.support.nursery import Nursery

ROOT = Path(__file__).parents[2]
STAGES = {"decode": ["prefill", "decode"], "moe": ["prefill", "decode"], "dit": ["forward"]}
JOB = Job(case="train", kind="train", way="plain", size="8b", loads=(8192,), steps=4, device="")


def command(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    line = [sys.executable, "-m", "benchmarks.gpu", *flags]
    return subprocess.run(line, capture_output=True, text=True, env=environment, cwd=ROOT)


@pytest.fixture
def forked(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's many processes begin with what each would import for seconds."""
    models = ("llama", "qwen3_moe")
    nursery.prepare("benchmarks.gpu.child", "peft", *(f"transformers.models.{one}.modeling_{one}" for one in models))

    def said(module: str, *arguments: object) -> str:
        child = nursery.start(f"import runpy\nrunpy.run_module({module!r}, run_name='__main__')", *arguments)
        text = child.read_rest()
        assert child.wait() == 0, child.errors
        return text

    def machine(device: str, directory: str) -> Any:
        return json.loads(said("benchmarks.gpu.machine", device, directory).splitlines()[-1])

    def rows_of(job: Job, hardware: str, limit: float) -> Any:
        file = Path(job.directory, "rows")
        said("benchmarks.gpu.child", job.to_json(), hardware, file)
        return [json.loads(line) for line in file.read_text().splitlines()]

    monkeypatch.setattr(program, "machine", machine)
    monkeypatch.setattr(program, "rows_of", rows_of)


def exit_code(monkeypatch: pytest.MonkeyPatch, *flags: str) -> object:
    """The exit code of the program, here."""
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *flags])
    with pytest.raises(SystemExit) as ended:
        program.main()
    return ended.value.code


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_a_case(name: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """headrace gives plain's results in less device memory, within its budget, and no fewer bytes than have to cross.

    diffusers refuses this device: its row says so, and the others come all the same.
    """
    own = [way for way in CASES[name][0].ways if way == "plain" or is_headrace(way)]
    ways = ",".join([*own, "diffusers"] if name == "dit" else own)
    flags = ("--size", "tiny", "--device", "emu", "--steps", "2", "--ways", ways, "--directory", str(tmp_path))
    flags = (name, *flags, "--output", str(tmp_path / "rows.jsonl"))
    if name == "lora":  # as it is called
        done = command(*flags)
        assert done.returncode == 0, done.stderr
    else:
        request.getfixturevalue("forked")
        assert not exit_code(monkeypatch, *flags)
    heading, *rows = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert heading["versions"]["torch"]
    assert [row["way"] for row in rows if "skipped" in row] == ["diffusers"] * (name == "dit")
    rows = [row for row in rows if "skipped" not in row]
    assert {row["kind"] for row in rows} == {case.kind for case in CASES[name]}
    for row in (row for row in rows if is_headrace(row["way"])):
        assert row["stage"] in STAGES.get(row["kind"], ["step"])
        assert row["compared_with"] == "plain"
        assert row["results_equal"] == len(row["results"]) > 2
        assert row["kind"] in STAGES or math.isfinite(sum_of(row["results"]))
        assert row["host_cpu_seconds"] > 0
        assert row["reserved_over_allocated"] >= 1
        plain = next(other for other in rows if all(other[key] == row[key] for key in ("kind", "load", "stage")))
        assert row["device_peak_bytes"] < plain["device_peak_bytes"]
        assert row["offload_bytes"] > 0 or row["kind"] in STAGES
        if row["kind"] != "activations":
            check_weights(row)
    assert sum(row["way"] == "headrace" for row in rows) == expected_rows(name)


def sum_of(results: Any) -> float:
    return sum(map(sum_of, results)) if isinstance(results, list) else results


def expected_rows(name: str) -> int:
    """Two loads of two stages when decoding, for each budget."""
    return sum((4 if "decode" in STAGES.get(case.kind, ()) else 1) * len(case.shares) for case in CASES[name])


def check_weights(row: dict[str, Any]) -> None:
    assert row["device_weights_peak_bytes"] <= row["device_budget_bytes"] == row["device_memory"]
    assert row["onload_bytes"] >= row["must_onload_bytes"]
    assert (row["must_onload_bytes"] > 0) == (row["kind"] != "moe")  # nobody knows which experts a token needs
    assert row["offload_bytes"] >= row["must_offload_bytes"]
    assert row["fetch_bytes"] >= row["must_fetch_bytes"]
    assert row["spill_bytes"] >= row["must_spill_bytes"]
    assert (row["must_fetch_bytes"] > 0) == row["disk"]
    assert row["floor_by"] in row["floors"]
    assert row["share_of_floor"] == row["floors"][row["floor_by"]] / row["seconds"]
    assert row["forecast_over_measured"] > 0
    assert row["planned_over_measured"] > 0
    assert row["lanes"]["onload"]["probed_bytes_per_second"] > 0
    assert row["host_bytes_per_parameter"] > 0


@pytest.mark.extended
def test_without_an_accelerator() -> None:
    done = command("train", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "nothing was measured" in done.stdout


@pytest.mark.extended
def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    job = replace(JOB, size="tiny", device="nowhere", directory=str(tmp_path))
    (row,) = rows_of(job, MACHINES["h100"].to_json(), 100)
    assert row["failed"].startswith("ended with 1")
    assert "nowhere" in row["failed"]
    (row,) = rows_of(job, MACHINES["h100"].to_json(), 0.01)
    assert row["failed"].startswith("no answer")


def test_what_has_no_room_is_not_tried() -> None:
    parameters = 8 * 10**9
    assert no_room(JOB, parameters, 0, 64 * GIB) == ""
    assert "needs 60 GiB of device memory (8 bytes" in no_room(JOB, parameters, 0, 59 * GIB)
    assert "needs 104 GiB of host memory (14 bytes" in no_room(replace(JOB, way="headrace"), parameters, GIB, GIB)
    assert no_room(replace(JOB, way="headrace", disk=True), parameters, GIB, GIB) == ""


def test_bytes_that_have_to_cross() -> None:
    """Of 8B weights and a budget of 8 GB: all anew and what cannot stay; nothing of the table but rows."""
    model = meta_model("train", "8b")
    table = 2 * 128256 * 4096
    weights = 2 * 8_030_261_248 - table
    job = replace(JOB, way="headrace", device_memory=8 * 10**9)
    must = must_of(job, model)
    assert must.must_onload_bytes == 2 * weights - 8 * 10**9
    assert must.must_offload_bytes == weights
    assert must.must_update_bytes == 26 * 8_030_261_248
    assert must.must_fetch_bytes == must.must_spill_bytes == must.must_state_bytes == 0
    there = must_of(replace(job, way="headrace-device"), model)
    assert (there.must_update_bytes, there.must_state_bytes) == (0, 10 * 8_030_261_248)
    link = MACHINES["h100"].onload_bytes_per_second
    assert floor_of(vars(there), 0.5, MACHINES["h100"])["state"] == there.must_state_bytes / link
    frozen = must_of(replace(job, kind="decode", disk=True, host_memory=2 * 10**9), model)
    assert frozen.must_onload_bytes == weights - 8 * 10**9
    assert frozen.must_fetch_bytes == weights - 10 * 10**9
    assert frozen.must_update_bytes == frozen.must_offload_bytes == 0
    floors = floor_of(vars(must), 0.5, MACHINES["h100"])
    assert floors["compute"] == 0.5
    assert floors["onload"] == must.must_onload_bytes / MACHINES["h100"].onload_bytes_per_second


def test_other_results_are_told() -> None:
    row = {"kind": "dit", "size": "tiny", "load": 1, "stage": "forward", "way": "plain", "parameters": 1}
    row |= {"seconds": 1.0, "host_resident_peak_bytes": 1, "host_taken_peak_bytes": 2, "results": ["a", "b", "c"]}
    plain = judged(row, [], MACHINES["h100"])
    assert "compared_with" not in plain
    other = judged(row | {"way": "accelerate", "results": ["a", "x", "c"], "seconds": 2.0}, [plain], MACHINES["h100"])
    assert (other["results_equal"], other["differing"], other["share_of_plain"]) == (1, "x, not b", 0.5)
    assert other["host_bytes_per_parameter"] == 2


def test_what_the_page_shows_in_red() -> None:
    row = {"way": "plain", "case": "moe", "size": "tiny", "load": 1, "stage": "decode", "results": [1, 2]}
    assert not is_bad(row)  # it is what others are compared with
    assert not is_bad(row | {"way": "headrace-device", "results_equal": 2})
    assert is_bad(row | {"way": "headrace-device", "results_equal": 1})
    assert not is_bad(row | {"way": "accelerate", "results_equal": 1})
    assert is_bad(row | {"way": "headrace", "failed": "ended with 1"})
    assert cells(row | {"skipped": "no room"}) == ["plain", "moe tiny 1 decode", "skipped: no room"]


@pytest.mark.extended
def test_first_contact_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Also elsewhere, by the list of steps that have ended."""

    def call(directory: Path) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"SECONDS_LEFT": "0", "PYTHON": sys.executable}
        line = ["benchmarks/gpu/first_contact.sh", str(directory)]
        return subprocess.run(line, capture_output=True, text=True, env=environment, cwd=ROOT)

    steps = set(re.findall(r"\b(?:step|measure) (\w+) \d+", Path(ROOT, "benchmarks/gpu/first_contact.sh").read_text()))
    done = call(tmp_path / "new")
    kept = "kernel" if Path(ROOT, "headrace/optim/_kernel.abi3.so").exists() else ""
    said = f"{len(steps - {kept})} steps are left: call it again"
    assert (done.returncode, done.stdout.splitlines()[-1]) == (75, said)
    lines = [{"step": name, "code": 0, "seconds": 1, "command": "python"} for name in steps]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = call(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "first contact" in (tmp_path / "page.html").read_text()
