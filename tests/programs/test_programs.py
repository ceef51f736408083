"""Do random programs give the same bits offloaded as plain, within budgets? For more: `python -m tests.programs`."""

import pytest

from tests.programs.modes import MODES
from tests.programs.programs import judge, random_program

COUNT = 15  # of each mode
# Kinds of layers, checkpoints and actions of which some programs fail as yet.
UNMENDED = ("write_unnoticed",)


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "emulated"])
def test_program(mode: str, seed: int) -> None:
    check(mode, seed)


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("seed", range(COUNT))
def test_program_on_the_emulated_device(emu_device: object, seed: int) -> None:
    check("emulated", seed)


def check(mode: str, seed: int) -> None:
    program = random_program(mode, seed, UNMENDED)
    failure = judge(program)
    assert failure is None, f"{mode} {seed}: {failure}\n{program}\n{failure.traceback}"
