"""Which values are kept, where room on the device, the link's time or host memory has an end?"""

import math
from dataclasses import replace

import pytest

from headrace.planning import ActivationProblem, Recomputed, Saved, choose_kept

MB = 10**6
# Ten inputs of 1 MB, each of which the link moves in 1 s; a forward of 95 s, of which 0.95 count, and a long backward.
PROBLEM = ActivationProblem(
    saved=(Saved(nbytes=MB, offload_seconds=1.0, onload_seconds=1.0, alone_at=None),) * 10,
    forward_seconds=(9.5 / 0.95,) * 10,
    uses=tuple(range(10)),
    backward_seconds=(100.0,) * 10,
    freed_at=tuple(range(10)),
)


def kind(mb: int, seconds: float, count: int = 10, **settings: bool) -> Recomputed:
    return Recomputed(
        name="layer", operation="mm", shape="", count=count, nbytes=mb * MB * count, seconds=seconds * count, **settings
    )


def kept(problem: ActivationProblem, *kinds: Recomputed, leaving: float = math.inf, fraction: float = 1.0) -> list[int]:
    return [fate.kept for fate in choose_kept(kinds, problem, most_leaving=leaving, fraction=fraction)]


def test_the_most_seconds_for_a_byte_are_kept_first() -> None:
    """The link moves 95 MB in the forward, 10 of them inputs."""
    cheap, dear, written, free = kind(4, 1.0), kind(5, 4.0), kind(1, 9.0, changes=True), kind(1, 0.0)
    fates = choose_kept([cheap, dear, written, free], PROBLEM, most_leaving=math.inf)
    assert [fate.kept for fate in fates] == [8, 10, 0, 0]
    assert [fate.copy_seconds for fate in fates] == [40.0, 50.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("problem", "limits", "expected"),
    [
        (PROBLEM, {}, 42),
        (PROBLEM, {"leaving": 50 * MB}, 20),
        (PROBLEM, {"fraction": 0.5}, 18),
        (PROBLEM, {"fraction": 0.0}, 0),
        (replace(PROBLEM, budget_bytes=22 * MB), {}, 52),  # two inputs may be on their way
        (replace(PROBLEM, budget_bytes=22 * MB), {"fraction": 0.0}, 5),
        (replace(PROBLEM, other_seconds=(90.0,) * 10), {}, 28),  # 95 s for copies back; less 1 s for what is kept
        (replace(PROBLEM, saved=(replace(PROBLEM.saved[0], onload_seconds=0.0),) * 10), {}, 42),
        (replace(PROBLEM, saved=(replace(PROBLEM.saved[0], onload_seconds=0.0, offload_seconds=0.0),) * 10), {}, 0),
    ],
)
def test_limits(problem: ActivationProblem, limits: dict[str, float], expected: int) -> None:
    assert kept(problem, kind(2, 1.0, count=60), **limits) == [expected]
