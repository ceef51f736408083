"""Do gradients of some rows add up as whole ones do that are zero elsewhere, to the sign of every zero?"""

import itertools
from concurrent.futures import Future

import pytest
import torch

from headrace.memory.disk import Request
from headrace.memory.ledger import Ledger
from headrace.weights.movement import batch_sums
from headrace.weights.movement.gradients import sum_of_rows
from headrace.weights.movement.staging import Additions, Remainder, Staged, Staging, add_up, remainders_of
from tests.support.compare import same

ROWS, WIDTH = 5, 3
VALUES = torch.tensor([-0.0, 0.0, 1.5, -1.5])


def gradient_of(rows: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(rows), VALUES[torch.randint(len(VALUES), (len(rows), WIDTH, 2), generator=generator)]


def whole(rows: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.new_zeros(ROWS, *gradient.shape[1:]).index_copy_(0, rows, gradient)


PARTS = [[[1, 3]], [[1], [3], [0]], [[0, 1], [1, 2]], [[2, 4], [2, 4]], [[1], [1, 2], [0, 1]]]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rows", PARTS)
def test_parts_of_one_backward(rows: list[list[int]], seed: int) -> None:
    parts = [gradient_of(own, 10 * seed + number) for number, own in enumerate(rows)]
    wanted = whole(*parts[0])
    for part in parts[1:]:
        wanted = wanted + whole(*part)
    own_rows, pieces = sum_of_rows([(own, gradient.clone()) for own, gradient in parts])
    found = own_rows, torch.cat(pieces)
    named = set(itertools.chain(*rows))
    assert sorted(found[0].tolist()) == sorted(named)
    assert same(whole(*found), wanted)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rows", PARTS)
def test_several_blocks_of_one_micro_batch(rows: list[list[int]], seed: int) -> None:
    """One of them gives the whole weight a gradient: the first block, the last one, or one in between."""
    rounded = torch.Generator().manual_seed(seed)
    for place in range(len(rows) + 1):
        parts: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for number, own in enumerate([*rows[:place], list(range(ROWS)), *rows[place:]]):
            numbers, gradient = gradient_of(own, 10 * seed + number)
            gradient = torch.where(gradient > 0, torch.randn(gradient.shape, generator=rounded), gradient)
            parts.append((gradient, None if number == place else numbers))
        wanted, *others = [one if own is None else whole(own, one) for one, own in parts]
        for other in others:
            wanted = wanted + other
        ((found, found_rows),) = batch_sums._added_up([(one.clone(), own) for one, own in parts])
        assert found_rows is None
        assert same(found, wanted)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rows", PARTS)
def test_backwards_one_after_the_other(rows: list[list[int]], seed: int) -> None:
    parts = [gradient_of(own, 10 * seed + number) for number, own in enumerate(rows)]
    wanted = whole(*parts[0])
    target = torch.full_like(wanted, 7)
    for number, (own, gradient) in enumerate(parts):
        if number:
            wanted.add_(whole(own, gradient))
        staged: list[Staged | Remainder] = [*remainders_of(target, own, None, adds=number > 0, large=True)]
        staged.append(Staged(gradient, gradient, target, number > 0, None, own))
        add_up(staged, [])
        assert same(target, wanted)


def test_zeros_that_need_no_staging_memory_are_waited_for() -> None:
    staging = Staging(torch.device("cpu"), Ledger(), None)
    jobs: list[Future[list[Request]]] = [Future() for _ in range(3)]
    for job in jobs:
        staging.sent(Additions(job))
    assert len(staging.under_way()) == len(jobs)
    for job in jobs[1:]:
        job.set_result([])
    jobs[0].set_exception(OSError("lost"))
    with pytest.raises(OSError, match="lost"):
        staging.wait()
    staging.wait()
