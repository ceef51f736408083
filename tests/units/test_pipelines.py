"""Is what refuses a split backward of pipelines there while a model is offloaded, and not longer?"""

import subprocess
import sys

import pytest

# In a process of its own: here a test before may have left a model offloaded.
PROGRAM = """
import torch
import torch.distributed.pipelining
from torch import nn
import headrace

stage = torch.distributed.pipelining.stage
before = stage.stage_backward_input
models = [nn.Linear(4, 4), nn.Linear(4, 4)]
handles = [headrace.offload(model, device="cpu") for model in models]
for model in models:
    model(torch.ones(1, 4))
seen = [stage.stage_backward_input is before]
for handle in handles:
    handle.remove()
    seen.append(stage.stage_backward_input is before)
print(seen)
"""


@pytest.mark.extended
def test_the_change_goes_with_the_last_model() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ended.stdout == "[False, False, True]\n", ended.stderr
