"""Are devices that would block each other refused?"""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import headrace
from headrace.runtime.device_group import DeviceGroup


def test_one_queue_for_all_collectives_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def group(backend: str) -> DeviceGroup:
        borrowed = SimpleNamespace(group=None)
        node: Any = SimpleNamespace(backend_of=lambda device: backend, borrow_group=lambda device, user: borrowed)
        return DeviceGroup(cast(Any, node), torch.device("cuda"))

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(headrace.StateError, match="CUDA_DEVICE_MAX_CONNECTIONS=1"):
        group("nccl")
    assert group("gloo").bounces  # by host memory: no collective is in a queue of the device
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert not group("nccl").bounces
