"""Does a process that is forked from one with an offloaded model end, and see what it may see? As DataLoader's do."""

import subprocess
import sys
from pathlib import Path

import pytest

LOADER = """
import sys, torch, headrace
device, disk = sys.argv[1:]
if device == "emu":
    import emulator.emu
from tests.support.held import weight_bytes
from tests.support.loops import loss_of
from tests.support.models import Decoder

class Data(torch.utils.data.Dataset):
    def __init__(self, model):
        self.model = model
    def __len__(self):
        return 8
    def __getitem__(self, index):
        assert self.model.head.weight.data.isfinite().all()  # while the parent's threads read or write it
        assert len(list(self.model.parameters())) and self.model.state_dict()["head.weight"].isfinite().all()
        return (torch.arange(8) + index) % 128

def main():
    model = Decoder(layers=6, width=64, vocabulary=128)
    rest = {"host_memory": "256KiB", "disk": disk} if disk else {}
    headrace.offload(model, device=device, device_memory=weight_bytes(model) // 3, **rest)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Data(model), batch_size=2, num_workers=2, multiprocessing_context="fork")
    batch = torch.zeros(2, 8, dtype=torch.long)
    for _ in range(3):
        loss = loss_of(model, batch)  # blocks are on their way while workers are forked
        batches = list(loader)
        loss.backward()
        for batch in batches:
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    globals()["left"] = iter(loader)  # workers that are alive at exit
    print("left")

if __name__ == "__main__":
    main()
"""

CHILD = """
import os, sys, torch, headrace
device, disk = sys.argv[1:]
if device == "emu":
    import emulator.emu
from tests.support.held import weight_bytes
from tests.support.loops import loss_of
from tests.support.models import Decoder

model = Decoder(layers=6, width=64, vocabulary=128)
rest = {"host_memory": "256KiB", "disk": disk} if disk else {}
handle = headrace.offload(model, device=device, device_memory=weight_bytes(model) // 3, **rest)
tokens = torch.arange(16).view(2, 8)
loss = loss_of(model, tokens)
before = [parameter.detach().clone() for parameter in model.parameters()]

def child():
    assert all(map(torch.equal, model.parameters(), before))
    for refused in (lambda: model(tokens), handle.remove):
        try:
            refused()
        except headrace.StateError as error:
            assert str(os.getppid()) in str(error), error
        else:
            raise AssertionError("computed in a process without lanes")
    for parameter in model.parameters():
        parameter.data.zero_()
    leave = os._exit if device == "emu" else sys.exit  # the emulator would wait for its threads
    globals().clear()  # and with the names the model: its memory goes without a device
    leave(0)

process = os.fork()
if not process:
    child()
assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
assert all(map(torch.equal, model.parameters(), before))  # what the child wrote is the child's
loss.backward()
assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
assert torch.equal(loss_of(model, tokens), loss)
print("left")
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("program", "tier", "device"),
    [(LOADER, "host", "cpu"), (LOADER, "disk", "emu"), (CHILD, "disk", "cpu"), (CHILD, "host", "emu")],
    ids=["loader-host-cpu", "loader-disk-emu", "child-disk-cpu", "child-host-emu"],
)
def test_a_forked_process_ends_well(program: str, tier: str, device: str, tmp_path: Path):
    disk = str(tmp_path) if tier == "disk" else ""
    command = [sys.executable, "-W", "ignore", "-c", program, device, disk]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "left"), done.stderr
