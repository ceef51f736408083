"""Is a model whole whose trained weights stay on the device: refused, moved and copied as any offloaded one?"""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import headrace
from headrace.compat import OffloadTrainingManager

INPUTS = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))  # (batch, width)


def tied_pair() -> nn.Module:
    """Trained layers with one weight, and a frozen one between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    return model


def test_a_second_manager_is_refused_and_the_first_one_goes_on(device: torch.device):
    model = tied_pair()
    manager = OffloadTrainingManager(model, device)
    with pytest.raises(headrace.StateError, match="is offloaded already"):
        OffloadTrainingManager(model, device)
    model.to(torch.bfloat16)  # for which it is offloaded anew
    model(INPUTS.to(device, torch.bfloat16)).sum().backward()
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter or not parameter.requires_grad
        assert parameter.device.type == (device.type if parameter.requires_grad else "cpu")
    manager.remove()


def test_what_is_trained_stays_on_the_device_when_the_model_is_moved(device: torch.device):
    model = tied_pair()
    OffloadTrainingManager(model, device)
    expected = model(INPUTS.to(device))
    for move in (nn.Module.cpu, lambda model: model.to(device), nn.Module.float):
        assert move(model) is model
        assert {p.device.type for p in model.parameters() if p.requires_grad} == {device.type}
        assert torch.equal(model(INPUTS.to(device)), expected)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_a_plain_model_on_the_cpu(device: torch.device, copied_by: Callable[[nn.Module], nn.Module]):
    model = tied_pair()
    manager = OffloadTrainingManager(model, device)
    copied = copied_by(model)
    assert {parameter.device.type for parameter in copied.parameters()} == {"cpu"}
    assert copied[0].weight is copied[2].weight
    assert copied[0].weight is not model[0].weight
    with torch.no_grad():
        model[0].weight.add_(1)
    again = copied_by(model)  # has what was written since
    assert torch.equal(again[0].weight, model[0].weight.cpu())
    assert not torch.equal(again[0].weight, copied[0].weight)
    handle = headrace.offload(again, device=device)
    assert torch.equal(again(INPUTS.to(device)), model(INPUTS.to(device)))
    assert {parameter.device.type for parameter in again.parameters()} == {"cpu"}  # nothing is left to the user there
    handle.remove()
    manager.remove()
