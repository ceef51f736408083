"""Which fixtures do the unit tests share?"""

from collections.abc import Iterator

import pytest
import torch

from headrace.memory.ledger import Ledger
from headrace.runtime.lanes import Lanes, open_lanes


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(frozenset({"weights", "buffers"}))


@pytest.fixture
def lanes(compute_device: torch.device) -> Iterator[Lanes]:
    lanes = open_lanes(compute_device)
    yield lanes
    lanes.close()
