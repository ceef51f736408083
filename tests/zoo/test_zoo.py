"""Does the zoo tell a model that was not built from one that failed, and count each in one place?"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.zoo import __main__ as command
from tests.zoo import of_diffusers, zoo
from tests.zoo.diffusers_configs import CONFIGS
from tests.zoo.diffusers_inputs import INPUTS


def killed() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


ENDS: dict[str, tuple[Callable[[], object], str]] = {
    "killed": (killed, "the process ended with -9"),
    "hangs": (lambda: time.sleep(60), "no answer in 1 s"),
    "raises": (lambda: sys.exit("no more"), "SystemExit: no more"),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("after_plain", "result"), [(False, "not built"), (True, "failed")])
def test_a_process_without_a_result(end: str, after_plain: bool, result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "SECONDS", 1)
    ending, reason = ENDS[end]

    def work(plain_is_done: Callable[[], None]) -> dict[str, Any]:
        if after_plain:
            plain_is_done()
        ending()
        return {"result": "equal"}

    found = zoo.in_a_process(work)
    assert found["result"] == result
    assert reason in found["reason"]


def test_a_result_is_given_as_it_is() -> None:
    def work(plain_is_done: Callable[[], None]) -> dict[str, Any]:
        plain_is_done()
        return {"result": "equal", "blocks": 3}

    assert zoo.in_a_process(work) == {"result": "equal", "blocks": 3}


def written(path: Path, *lines: tuple[str, str, str]) -> Path:
    found = [dict(zip(("name", "place", "result"), line, strict=True)) for line in lines]
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
    return path


def test_each_kind_counts_once_in_each_place(tmp_path: Path) -> None:
    kinds = {
        "never": ["not built"],
        "fine": ["equal", "equal", "equal"],
        "half": ["equal", "not built", "wrong"],
        "poor": ["refused", "failed", "equal"],
    }
    lines = [(name, place, found) for name in kinds for place, found in zip(zoo.PLACES, kinds[name], strict=False)]
    text = zoo.page(written(tmp_path / "results", ("fine", "cpu", "failed"), *lines))
    rows = {row[0]: row[1:] for row in (re.split(r" ?\| ?", line)[1:-1] for line in text.splitlines() if "|" in line)}
    assert rows["4 architectures"] == ["equal", "refused", "failed", "wrong", "not built"]
    assert rows["CPU"] == ["2", "1", "0", "0", "1"]
    assert rows["all of it at once"] == ["1", "0", "1", "0", "2"]
    assert rows["emulated accelerator"] == ["2", "0", "0", "1", "1"]
    assert rows["half"] == ["equal", "not built", "wrong"]
    assert "never" not in rows
    assert "built nowhere say nothing here: never." in text
    assert all(f"*{name}*: " in text for name in (*zoo.PLACES.values(), *zoo.OUTCOMES))


def test_a_page_of_half_the_results_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no result of some: run --only some --where everything emu"):
        zoo.page(written(tmp_path / "results", ("some", "cpu", "equal")))


def test_a_page_needs_results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["zoo.py", "--write", "models.md"])
    with pytest.raises(SystemExit):
        command.main()
    assert "name their file with --results" in capsys.readouterr().err


def test_the_tables_of_diffusers_name_what_it_exports() -> None:
    import diffusers

    assert {*CONFIGS, *INPUTS} <= set(dir(diffusers))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("place", ["cpu", "everything"])
def test_a_model_of_diffusers_is_compared(place: str) -> None:
    from diffusers import ZImageTransformer2DModel  # which takes lists of tensors

    done: list[bool] = []
    found = zoo.compare(of_diffusers, of_diffusers.maker(ZImageTransformer2DModel), place, lambda: done.append(True))
    assert found["result"] == "equal", found
    assert done == [True]
    assert found["blocks"] > 3
    assert found["moved"] > found["weights"]
