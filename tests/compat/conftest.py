"""On which devices do the compatibility tests run? On the CPU, and on the emulated accelerator."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=["cpu", "emu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Each device in turn, as the default device too; on the emulator its reports fail the test."""
    if request.param == "emu":
        request.getfixturevalue("emulator")
    else:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    return torch.device(request.param)


@pytest.fixture
def emulator() -> Iterator[object]:
    """The emulated accelerator in its lazy schedule, where a copy stays in flight until something waits for it."""
    from emulator import emu

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    emu.reset(scheduler="lazy")
    yield emu
    torch.set_num_threads(threads)
    torch.accelerator.synchronize()
    assert emu.take_reports() == []
