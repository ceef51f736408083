"""Does a table that travels by rows compute, train and change as a plain one, however it is used?"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import headrace
from headrace.weights.meter import Meter
from tests.support.compare import assert_same_gradients, assert_same_weights
from tests.weights.test_tables import BUDGET, Encoder, ids_of, train

Use = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def twice_backward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss = model(ids).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def two_forwards(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    losses = [model(batch).square().mean() for batch in (ids, ids.flip(0) // 2)]
    (losses[1] + losses[0]).backward()
    losses = [model(batch).square().mean() for batch in (ids, ids.flip(0) // 3)]
    for loss in losses:
        loss.backward()
    return losses[0]


def reentrant(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    hidden = torch.zeros(1, device=ids.device, requires_grad=True)
    for batch in (ids, ids // 2):
        hidden = checkpoint(lambda given, batch=batch: model.begin(batch) + given, hidden, use_reentrant=True)
    for _ in range(2):
        hidden.square().mean().backward(retain_graph=True)
    return hidden


def narrow_ids(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    found = model(ids.int())
    found.square().mean().backward()
    return found


def thawed(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model.table.weight.requires_grad_(step % 2 == 0)
        found = model(ids // (step + 1))
        found.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step > 1)
    return found


def written(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    found = []
    with torch.no_grad():
        model.table.weight.data.mul_(2)
        found.append(model(ids))
        model.table.weight.data = model.table.weight.data.clone() * 3
        found.append(model(ids))
        model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
        found.append(model(ids))
        model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()}, assign=True)
        found.append(model(ids))
        model.table.weight = nn.Parameter(model.table.weight.detach() * 2)
        found.append(model(ids))
    return torch.stack(found)


def with_module_hooks(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    model.table.register_forward_hook(lambda _, given, found: seen.append(given[0].unsqueeze(-1) + found.detach()))
    model(ids)
    return seen[0]


@pytest.mark.parametrize(
    "use", [twice_backward, two_forwards, reentrant, narrow_ids, thawed, written, with_module_hooks]
)
def test_as_in_a_plain_run(compute_device: torch.device, use: Use) -> None:
    torch.manual_seed(0)
    model = Encoder(calls=2)
    plain = copy.deepcopy(model).to(compute_device)
    ids = ids_of(0).to(compute_device)
    with headrace.offload(model, device=compute_device, device_memory=BUDGET) as handle:
        found = use(model, ids)
        assert handle.stats().device_peak_bytes <= BUDGET
        assert handle.stats().row_bytes > 0
    assert torch.equal(found.cpu(), use(plain, ids).cpu())
    assert_same_weights(model, plain)
    assert_same_gradients(model, plain, some_missing=True)


def test_an_interrupted_lookup_leaves_nothing(compute_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Encoder()
    plain = copy.deepcopy(model).to(compute_device)

    def interrupted(_meter: Meter, _nbytes: int) -> None:
        raise KeyboardInterrupt  # the rows have been sent for

    with headrace.offload(model, device=compute_device, device_memory=BUDGET) as handle:
        monkeypatch.setattr(Meter, "rows_onloaded", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(ids_of(0).to(compute_device))
        monkeypatch.undo()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), compute_device)
        assert handle.stats().device_peak_bytes <= BUDGET
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), compute_device)
    assert_same_weights(model, plain)


def test_copies_are_plain(compute_device: torch.device) -> None:
    torch.manual_seed(0)
    model = Encoder()
    ids = ids_of(0)
    with headrace.offload(model, device=compute_device, device_memory=BUDGET):
        found = model(ids.to(compute_device)).cpu()
        copied = copy.deepcopy(model)
    assert "forward" not in vars(copied.table)
    assert torch.equal(copied.table(ids), model.table(ids))
    assert found.shape == copied(ids).shape


def test_what_is_tied_later_travels_whole(compute_device: torch.device) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.Linear(32, 16)]
    model = nn.Sequential(nn.Embedding(600, 16), *layers, nn.Linear(16, 1, bias=False))
    plain = copy.deepcopy(model)
    budget = 600 * 16 * 4 + 2500  # the table beside a layer, not beside two
    with headrace.offload(model, device=compute_device, device_memory=budget, resident=["3"]) as handle:
        ids = ids_of(0).to(compute_device)
        model(ids)
        assert handle.stats().row_bytes > 0
        model[3].weight, plain[3].weight = model[0].weight, plain[0].weight
        model(ids).square().mean().backward()
        assert handle.stats().device_peak_bytes <= budget
    plain.to(compute_device)(ids).square().mean().backward()
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad.cpu())
