"""Do random programs give the same bits offloaded as plain, within budgets? For more: `python -m tests.programs`."""

import pytest

from tests.programs.modes import MODES
from tests.programs.programs import judge, random_program

COUNT = 15  # of each mode
# Of each mode, what is left out: memory that is kept (`p.data`) cannot come free, so the least budgets are too small.
LEFT_OUT = {"disk": ("write_unnoticed",), "emulated": ("write_unnoticed",)}


@pytest.mark.core(seed=list(range(4)))
@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "emulated"])
def test_program(mode: str, seed: int) -> None:
    check(mode, seed)


@pytest.mark.parametrize("seed", [52, 700_060, 700_205, 700_241, 700_282, 700_291])
def test_what_is_kept_of_a_parameter_stays_its_memory(seed: int) -> None:
    """`p.data` was kept, later arrivals want room, and what is kept is written to."""
    program = random_program("disk", seed)
    assert "write_unnoticed" in str(program)
    assert judge(program) is None


@pytest.mark.core(seed=list(range(4)))
@pytest.mark.emu("random:0")
@pytest.mark.parametrize("seed", range(COUNT))
def test_program_on_the_emulated_device(emu_device: object, seed: int) -> None:
    check("emulated", seed)


@pytest.mark.core(seed=list(range(2)))
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["cpu", "disk", "activations", "overlap", "at home"])
def test_program_that_calls_another_method(mode: str, seed: int) -> None:
    check(mode, seed, encodes=True)


def check(mode: str, seed: int, *, encodes: bool = False) -> None:
    program = random_program(mode, seed, LEFT_OUT.get(mode, ()), encodes=encodes)
    failure = judge(program)
    assert failure is None, f"{mode} {seed}: {failure}\n{program}\n{failure.traceback}"
