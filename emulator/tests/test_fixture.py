"""Does the fixture judge? A race and a late error must each fail a test that checks nothing itself."""

from pathlib import Path

import pytest

from ..build import cache_directory

ROOT = Path(__file__).parents[2]
CACHE = cache_directory()  # before pytester gives its runs a home of their own, where no build is cached

TESTS = """
    import threading

    import pytest
    import torch

    def test_right(emu_device):
        assert (torch.ones(2, device="emu") + 1).tolist() == [2, 2]

    def test_race(emu_device):
        tensor = torch.ones(4, device="emu")
        with torch.Stream("emu"):
            tensor.mul_(2)

    def test_on_both(compute_device):
        assert (torch.ones(2, device=compute_device) + 1).tolist() == [2, 2]

    def test_spin_on_both(compute_device):
        if compute_device.type == "emu":
            done = (torch.ones(2, device=compute_device) + 1, torch.accelerator.current_stream().record_event())[1]
            thread = threading.Thread(target=done.synchronize, name="headrace-worker")
            thread.start()
            thread.join()

    def test_race_on_both(compute_device):
        tensor = torch.ones(4, device=compute_device)
        if compute_device.type == "emu":
            with torch.Stream("emu"):
                tensor.mul_(2)

    @pytest.mark.emu("lazy", "random:7", device_memory=1 << 20)
    def test_marked(compute_device):
        if compute_device.type == "emu":
            from emulator import emu
            settings = emu.settings()
            chosen = {"lazy": 0, "random": 7}[settings["scheduler"]]
            assert (settings["seed"], settings["device_memory"]) == (chosen, 1 << 20)
            assert settings["allocator"] == "exact"

    def test_late_error(emu_device):
        torch.nn.functional.embedding(torch.tensor([9]).to("emu"), torch.ones(3, 2, device="emu"))
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HEADRACE_EMULATOR_CACHE", str(CACHE))
    pytester.makeconftest('pytest_plugins = ["emulator.fixtures"]')
    return pytester


@pytest.mark.extended
def test_verdicts(project: pytest.Pytester) -> None:
    project.makepyfile(TESTS)
    result = project.runpytest_subprocess("--emu-seeds=1", "-p", "no:cacheprovider")
    # Three schedules of three tests, then cpu and emu of three, and three of one. The bodies of all tests pass: it is
    # the teardown that fails.
    result.assert_outcomes(passed=3 * 3 + 3 * 2 + 3, errors=3 + 3 + 2)
    result.stdout.fnmatch_lines(["*RACE write-after-write: aten::mul on stream 1*"])
    result.stdout.fnmatch_lines(["*SPIN: *"])
    result.stdout.fnmatch_lines(["*asynchronous error in aten::index_select*"])


@pytest.mark.extended
def test_registration_waits_for_a_test_that_asks(project: pytest.Pytester) -> None:
    module = project.makepyfile("""
        import sys

        def test_registration(compute_device):
            assert compute_device.type == "cpu"
            assert "emulator.emu" not in sys.modules
    """)
    result = project.runpytest_subprocess(f"{module}::test_registration[cpu]", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
