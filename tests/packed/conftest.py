"""Which 16-bit words are packed in these tests?"""

import pytest
import torch


def weights(count: int, seed: int = 0) -> torch.Tensor:
    """What weights look like: normal, with a few outliers, zeros and denormal ones."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * 0.02
    values[torch.rand(count, generator=generator) < 0.001] *= 1e6
    values[torch.rand(count, generator=generator) < 0.001] *= 1e-38
    values[torch.rand(count, generator=generator) < 0.01] *= 0.0
    return values.bfloat16()


@pytest.fixture(params=["baseline", "AVX2", "AVX512"])
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each level of vector instructions that this CPU has."""
    from headrace.memory.packed import format as packed_format

    number = ["baseline", "AVX2", "AVX512"].index(request.param)
    if number > packed_format.level():
        pytest.skip(f"this CPU has no {request.param}")
    monkeypatch.setattr(packed_format, "level", lambda: number)
    return str(request.param)
