"""Does the fixture judge? A race and a late error must each fail a test that checks nothing itself."""

from pathlib import Path

import pytest

from ..build import cache_directory

ROOT = Path(__file__).parents[2]

TESTS = """
    import torch

    def test_right(emu_device):
        assert (torch.ones(2, device="emu") + 1).tolist() == [2, 2]

    def test_race(emu_device):
        tensor = torch.ones(4, device="emu")
        with torch.Stream("emu"):
            tensor.mul_(2)

    def test_late_error(emu_device):
        torch.nn.functional.embedding(torch.tensor([9]).to("emu"), torch.ones(3, 2, device="emu"))
"""


def test_verdicts(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MILLRACE_EMULATOR_CACHE", str(cache_directory()))  # pytester gives its runs a home of their own
    pytester.makeconftest('pytest_plugins = ["emulator.fixtures"]')
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("--emu-seeds=1", "-p", "no:cacheprovider")
    # Three schedules each. The bodies of all tests pass: it is the teardown that fails.
    result.assert_outcomes(passed=9, errors=6)
    result.stdout.fnmatch_lines(["*RACE write-after-write: aten::mul on stream 1*"])
    result.stdout.fnmatch_lines(["*asynchronous error in aten::index_select*"])
