"""Are programs exact that nobody thought of? Random ones, with all that they save on its way.

`HEADRACE_PROGRAMS=1000 pytest tests/activations/test_programs.py` runs so many on each device, `HEADRACE_FIRST_PROGRAM`
says from which number on.
"""

import contextlib
import gc
import os
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from headrace.runtime.autograd import top_hooks
from tests.activations.pieces import Made
from tests.activations.programs import Program, plainly
from tests.support.compare import same
from tests.support.held import allocated_bytes, is_counted

PROGRAMS = int(os.environ.get("HEADRACE_PROGRAMS", "10"))
FIRST = int(os.environ.get("HEADRACE_FIRST_PROGRAM", "0"))
DISK_HOST_BYTES = 256 << 10  # more than what is on its way at once


def settings_of(number: int, tier: str, disk: Path) -> dict[str, Any]:
    rng = random.Random(number)
    settings: dict[str, Any] = {
        "min_bytes": rng.choice([0, 0, 0, 64, 1000]),
        "fraction": rng.choice([1.0, 1.0, 1.0, 0.6]),
        "most_in_flight": rng.choice([None, None, None, 1]),
        **rng.choice([{}, {"device_memory": 0}, {"device_memory": 0}, {"device_memory": 10_000}, {"all_leave": True}]),
    }
    if tier == "disk":
        settings |= {"tier": "disk", "disk": disk, "host_memory": DISK_HOST_BYTES}
    return settings


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O
@pytest.mark.timeout(60 + 10 * PROGRAMS)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_random_programs(tier: str, compute_device: torch.device, tmp_path: Path) -> None:
    moved: Counter[str] = Counter()

    @contextlib.contextmanager
    def offloading(model: Made) -> Iterator[headrace.ActivationOffloading]:
        with headrace.offload_activations(model, **settings_of(number, tier, tmp_path / str(number))) as handle:
            yield handle
            stats = handle.stats()
            moved["leaves"] += stats.offload_bytes
            moved["is spilled"] += stats.spill_bytes
            moved["comes back"] += stats.onload_bytes
            moved["is planned"] += stats.planned_forwards
            assert stats.host_held_bytes == 0, f"{stats.host_held_bytes} bytes of the host are kept for nobody"
            assert tier == "host" or stats.host_peak_bytes <= DISK_HOST_BYTES
            handle.reset_stats()  # peaks begin with what is held now
            assert handle.stats().device_peak_bytes == 0
            assert top_hooks(True) is None

    for number in range(FIRST, FIRST + PROGRAMS):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's, of odd things
                expected = Program(number, compute_device).run(plainly)
                gc.collect()
                before_bytes = allocated_bytes(compute_device) if is_counted(compute_device) else 0
                program = Program(number, compute_device)
                notes, spoiled = program.run(offloading), program.scene.spoiled
                del program
                gc.collect()
            if is_counted(compute_device):
                assert allocated_bytes(compute_device) == before_bytes
            assert_same_notes(notes, expected)
        except BaseException as error:
            error.add_note(f"program {number}, {settings_of(number, tier, tmp_path)}")
            raise
        if compute_device.type == "emu" and spoiled:
            from emulator import emu

            emu.take_reports()  # a copy of what was written afterwards may be torn: nobody may use it
    for what in ("leaves", "comes back", "is planned") + (("is spilled",) if tier == "disk" else ()):
        assert moved[what] > 0, f"nothing {what}"


def assert_same_notes(notes: list[Any], expected: list[Any]) -> None:
    for index, (note, wanted) in enumerate(zip(notes, expected, strict=False)):
        if isinstance(wanted, Tensor) and isinstance(note, Tensor):
            assert same(note, wanted), f"note {index} of {len(expected)} differs by {(note - wanted).abs().max()}"
        else:
            assert type(note) is type(wanted), f"note {index}: {note}, and not {wanted}"
            assert note == wanted, f"note {index}"
    assert len(notes) == len(expected)
