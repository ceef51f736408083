"""What does an optimizer that overlaps do in a process that was forked?"""

import subprocess
import sys

import pytest

FORKED = """
import os, signal, sys, threading, torch, headrace
from headrace.optim import AdamW
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
handle = headrace.offload(model, device="cpu", device_memory="1GiB")
optimizer = AdamW(model.parameters(), overlap="forward")
for _ in range(3):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
gate = threading.Event()
if sys.argv[1] == "under_way":
    optimizer._updates.updater.run(gate.wait)  # the updates of the next step stay behind it
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
else:
    optimizer.synchronize()
child = os.fork()
if child == 0:
    signal.alarm(60)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(parameter.shape)
    try:
        optimizer.step()
        optimizer.synchronize()
    except headrace.errors.StateError as error:
        os._exit(7 if "forked" in str(error) else 1)
    os._exit(0)
gate.set()
handle.remove()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.extended
@pytest.mark.parametrize(("moment", "code"), [("at_rest", 0), ("under_way", 7)])
def test_a_forked_process_steps_or_says_why_not(moment: str, code: int) -> None:
    run = subprocess.run([sys.executable, "-c", FORKED, moment], timeout=120, check=False, capture_output=True)
    assert run.returncode == code, run.stderr.decode()
