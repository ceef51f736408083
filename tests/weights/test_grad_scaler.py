"""Does a GradScaler whose scale is on the device unscale gradients that are on the host?"""

import copy

import pytest
import torch

import headrace
from tests.support.compare import assert_same_models
from tests.support.held import weight_bytes
from tests.support.loops import loss_of


@pytest.mark.emu("lazy", "random:0", "threads")
def test_gradients_are_unscaled_by_the_scale(emu_device, decoder, tokens):
    plain = copy.deepcopy(decoder).to("emu")
    scalers = [torch.amp.GradScaler("emu", init_scale=1024.0) for _ in range(2)]
    with headrace.offload(decoder, device="emu", device_memory=weight_bytes(decoder) // 2):
        for model, scaler in zip((plain, decoder), scalers, strict=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, tokens.to("emu"))).backward()
                scaler.step(optimizer)
                scaler.update()
        torch.accelerator.synchronize()
        assert_same_models(decoder, plain)
