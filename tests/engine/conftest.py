"""Which fixtures do the engine's tests share?"""

import pytest
import torch

from tests.engine.models import Decoder


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.arange(16).reshape(2, 8) % 32
