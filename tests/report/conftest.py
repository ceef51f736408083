"""Which runs do the tests of reports show?"""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import headrace
from headrace.report import Report
from tests.support.models import Stack


def stack() -> Stack:
    """Six layers of 257 KiB."""
    return Stack((nn.Linear(256, 256) for _ in range(6)), between=torch.relu)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def slow_link(emu_device) -> None:
    """For weights; gradients leave so fast that compute does not wait for them, which a plan does not count."""
    emu_device.configure(h2d_bytes_per_second=1e9, d2h_bytes_per_second=8e9, flops_per_second=1e12)


@pytest.fixture(scope="session")
def made() -> dict[str, Report]:
    """Reports that a test has made: they are values, and the same for all."""
    return {}


@pytest.fixture
def report(emu_device, slow_link, made) -> Report:
    """A run on the emulated accelerator over a link that is too slow, so that compute waits."""
    if "slow link" not in made:
        torch.manual_seed(0)
        model = stack()
        with headrace.offload(model, device="emu", device_memory="900KiB", blocks=[model.layers]) as handle:
            for _ in range(4):
                model(torch.randn(64, 256)).sum().backward()
            made["slow link"] = handle.report()
    return made["slow link"]


@pytest.fixture
def disk_report(tmp_path) -> Iterator[Report]:
    """A run on the CPU, half of whose weights, and the gradients of these, rest on disk."""
    torch.manual_seed(0)
    model = stack()
    budgets = {"device_memory": "900KiB", "host_memory": "1MiB", "disk": tmp_path / "disk"}
    with (
        warnings.catch_warnings(action="ignore"),  # where the directory refuses direct I/O
        headrace.offload(model, device="cpu", blocks=[model.layers], **budgets) as handle,
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            handle.synchronize()  # a write counts when it is submitted, and is on its lane when it is carried out
            handle.reset_stats()
            model(torch.randn(64, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield handle.report()
