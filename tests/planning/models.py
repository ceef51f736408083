"""Which models do the planner's tests plan for?"""

from __future__ import annotations

import random

from headrace.planning import Phase, Problem, Visit


def decoder(
    *,
    blocks: int = 24,
    ratio: float,
    budget_blocks: int,
    backward: float = 0.0,
    frozen: bool = False,
    uneven: bool = False,
    max_ahead: int | None = None,
) -> Problem:
    """A decoder with a forward of 1 s per block and loads of `ratio` s; `backward` times that in a backward pass.

    Uneven: bytes and compute of block i vary by the same fixed pattern, as an embedding, wide and narrow layers would.
    """
    scale = [(7 + 3 * (block % 3) - 2 * (block % 5 == 0)) / 9 for block in range(blocks)] if uneven else [1.0] * blocks
    size = tuple(round(900 * s) for s in scale)
    visits = [Visit(blocks=(block,), compute_seconds=scale[block]) for block in range(blocks)]
    if backward:
        visits += [
            Visit(blocks=(block,), phase=Phase.BACKWARD, compute_seconds=backward * scale[block])
            for block in reversed(range(blocks))
        ]
    return Problem(
        block_bytes=size,
        load_seconds=tuple(ratio * s for s in scale),
        visits=tuple(visits),
        budget_bytes=budget_blocks * max(size),
        changing=frozenset(range(blocks)) if backward and not frozen else frozenset(),
        max_ahead=max_ahead,
    )


def random_model(seed: int, *, low: int = 24, high: int = 120) -> Problem:
    """An uneven model: sizes differ by 10, compute by 7; inference, training or training with frozen weights."""
    rng = random.Random(seed)
    count = rng.randint(low, high)
    sizes = tuple(rng.randint(20, 200) for _ in range(count))
    pace = rng.choice([60, 110, 200]) * rng.uniform(0.8, 1.3)
    compute = [rng.uniform(0.3, 2) for _ in range(count)]
    visits = [Visit(blocks=(block,), compute_seconds=compute[block]) for block in range(count)]
    kind = rng.choice(["inference", "training", "frozen"])
    if kind != "inference":
        factor = rng.choice([2, 3])
        visits += [
            Visit(blocks=(block,), phase=Phase.BACKWARD, compute_seconds=factor * compute[block])
            for block in reversed(range(count))
        ]
    return Problem(
        block_bytes=sizes,
        load_seconds=tuple(size / pace for size in sizes),
        visits=tuple(visits),
        budget_bytes=max(2 * max(sizes), int(sum(sizes) * rng.uniform(0.05, 0.8))),
        changing=frozenset(range(count)) if kind == "training" else frozenset(),
    )
