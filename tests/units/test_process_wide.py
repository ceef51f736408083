"""Does what changes for the whole process go with its last user?"""

import gc
import subprocess
import sys
from collections.abc import Callable

import pytest

from headrace.runtime.process_wide import ProcessWide


class User:
    pass


@pytest.fixture
def log() -> list[str]:
    return []


def change(log: list[str], *, anywhere: bool = True) -> ProcessWide:
    def begin() -> Callable[[], None]:
        log.append("begin")
        return lambda: log.append("undo")

    return ProcessWide(begin, anywhere=anywhere)


def test_it_is_there_from_the_first_user_to_the_last(log: list[str]) -> None:
    wide = change(log)
    users = User(), User()
    first, second = (wide.use(user) for user in users)
    first()
    first()  # once for all
    assert (log, wide.is_there) == (["begin"], True)
    second()
    assert (log, wide.is_there) == (["begin", "undo"], False)
    wide.use(users[0])()
    assert log == ["begin", "undo"] * 2


def test_one_user_several_times(log: list[str]) -> None:
    wide, user = change(log), User()
    first, second = wide.use(user), wide.use(user)
    first()
    assert wide.is_there
    second()
    assert not wide.is_there


def test_a_user_that_is_dropped_leaves(log: list[str]) -> None:
    wide, user = change(log), User()
    wide.use(user)
    del user
    gc.collect()
    assert log == ["begin", "undo"]


def test_hooks_are_not_taken_off_amid_anything(log: list[str]) -> None:
    """Whoever iterates over them would find that they changed."""
    wide, user, other = change(log, anywhere=False), User(), User()
    wide.use(user)
    del user
    gc.collect()
    assert (log, wide.is_there) == (["begin"], True)
    leave = wide.use(other)
    assert log == ["begin"]
    leave()
    assert (log, wide.is_there) == (["begin", "undo"], False)


WHOLE_PROCESS = """
import gc
import sys
import torch
from torch.amp import grad_scaler

def everything():
    places = [grad_scaler.GradScaler, grad_scaler._MultiDeviceReplicator, torch.nn.Module, torch.nn.Parameter,
              torch.Tensor, torch.optim.Optimizer, torch.autograd.graph, torch.utils.checkpoint]
    modules = [sys.modules[name] for name in ("torch.optim.optimizer", "torch.nn.modules.module")]
    hooks = [module.__dict__[name] for module in modules for name in sorted(module.__dict__) if name[:7] == "_global"]
    return [dict(place.__dict__) for place in places], [dict(one) if isinstance(one, dict) else one for one in hooks]

import headrace
import emulator.emu
from headrace.weights.model.home import Home

torch.optim.SGD([torch.zeros(1)]).step()  # optimizers change their class when the first is made
torch.optim.AdamW([torch.zeros(1)]).step()
before = everything()
for overlap, max_grad_norm in (("forward", 1.0), ("backward", None)):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    with headrace.offload(model, device="emu", device_memory=40_000, activations=True) as handle:
        optimizer = headrace.optim.AdamW(model.parameters(), overlap=overlap, max_grad_norm=max_grad_norm)
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        changed = everything()
        assert changed[0][0] != before[0][0] and changed[0][1] != before[0][1] and changed[1] != before[1]
    del optimizer
    gc.collect()
    assert everything() == before
    assert "__torch_function__" not in Home.__dict__
"""


@pytest.mark.extended
def test_nothing_is_left_of_an_offloaded_model() -> None:
    result = subprocess.run([sys.executable, "-c", WHOLE_PROCESS], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
