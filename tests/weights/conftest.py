"""Which fixtures do the engine's tests share?"""

import pytest
import torch

from headrace.planning import search
from tests.support.models import Decoder, seeded, some_tokens


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second for each plan is more than a test of right results takes for anything else."""
    monkeypatch.setattr(search, "TRIALS", 20)


@pytest.fixture
def decoder() -> Decoder:
    return seeded(Decoder)


@pytest.fixture
def tokens() -> torch.Tensor:
    return some_tokens()
