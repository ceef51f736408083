"""Do optimizers, schedulers, clipping, loss scaling and accumulation work on an offloaded model as on a CPU model?"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.matrix.models import DENSE
from tests.support.compare import Outcome, on_cpu, same
from tests.support.loops import train
from tests.support.offloaded import Script, assert_exact, offload

Optimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam_amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-3),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-3),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=1e-3),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=1e-2),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-3),
}


class OnHost:
    """Copies of a plain model's parameters on the CPU, where the optimizer of an offloaded model works too."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.on_device = parameters
        self.parameters = [nn.Parameter(on_cpu(p)) for p in parameters]

    def act(self, act: Callable[[list[nn.Parameter]], None]) -> None:
        """Brings gradients, lets `act` work, and takes weights and gradients back."""
        for ours, theirs in zip(self.parameters, self.on_device, strict=True):
            ours.grad = None if theirs.grad is None else on_cpu(theirs.grad)
        act(self.parameters)
        with torch.no_grad():
            for ours, theirs in zip(self.parameters, self.on_device, strict=True):
                theirs.copy_(ours)
                theirs.grad = None if ours.grad is None else ours.grad.to(theirs.device)


Act = Callable[[torch.optim.Optimizer, list[nn.Parameter]], None]


def stepping(device: torch.device, make: Optimizer, act: Act) -> Script:
    """A script that trains; `act` is what a loop does after backward, with an optimizer and parameters on the CPU."""

    def script(model: nn.Module) -> Outcome:
        parameters = list(model.parameters())
        host = OnHost(parameters) if parameters[0].device.type != "cpu" else None
        optimizer = make(parameters if host is None else host.parameters)
        outcome = Outcome()
        for batch in DENSE.on(device):
            output, loss = DENSE.forward(model, batch)
            outcome.outputs += [on_cpu(output), on_cpu(loss)]
            loss.backward()
            if host is None:
                act(optimizer, parameters)
            else:
                host.act(lambda theirs: act(optimizer, theirs))
            outcome.read_gradients(model)
            model.zero_grad()
        return outcome.read(model)

    return script


@pytest.mark.core(name=["adamw_fused", "adamw_foreach", "adam_amsgrad", "sgd_momentum", "adafactor"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str, compute_device: torch.device) -> None:
    script = stepping(compute_device, OPTIMIZERS[name], lambda optimizer, _parameters: optimizer.step())
    handle, _ = assert_exact(DENSE.build, script, compute_device)
    assert handle.stats().steps == 3


def test_learning_rate_schedule(compute_device: torch.device) -> None:
    schedulers: dict[int, torch.optim.lr_scheduler.LRScheduler] = {}

    def act(optimizer: torch.optim.Optimizer, _parameters: list[nn.Parameter]) -> None:
        if id(optimizer) not in schedulers:
            schedulers[id(optimizer)] = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        optimizer.step()
        schedulers[id(optimizer)].step()

    assert_exact(DENSE.build, stepping(compute_device, OPTIMIZERS["sgd_momentum"], act), compute_device)


def test_clipping(compute_device: torch.device) -> None:
    def act(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        assert norm > 0.1
        torch.nn.utils.clip_grad_value_(parameters, 0.01)
        optimizer.step()

    assert_exact(DENSE.build, stepping(compute_device, OPTIMIZERS["adamw_loop"], act), compute_device)


def test_parameter_groups_and_two_optimizers(compute_device: torch.device) -> None:
    def script(model: nn.Module) -> Outcome:
        parameters = list(model.parameters())
        groups = [{"params": parameters[:5], "lr": 1e-2, "weight_decay": 0.0}, {"params": parameters[5:20]}]
        optimizers = [
            torch.optim.AdamW(groups, lr=1e-3, foreach=False),
            torch.optim.SGD(parameters[20:], lr=0.1, foreach=False),
        ]
        outcome = Outcome()
        for index, batch in enumerate(DENSE.on(compute_device)):
            output, loss = DENSE.forward(model, batch)
            outcome.outputs += [on_cpu(output)]
            loss.backward()
            outcome.read_gradients(model)
            optimizers[index % 2].step()  # the other one's parameters keep their gradients
            optimizers[index % 2].zero_grad()
        return outcome.read(model)

    assert_exact(DENSE.build, script, compute_device)


def test_gradient_scaler_skips_a_step_with_infinities(compute_device: torch.device) -> None:
    scales = []

    def script(model: nn.Module) -> Outcome:
        scaler = torch.amp.GradScaler(compute_device.type, init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        outcome = Outcome()
        for index, batch in enumerate(DENSE.on(compute_device)):
            output, loss = DENSE.forward(model, batch)
            if index == 1:
                loss = loss * float("inf")
            outcome.outputs.append(on_cpu(output))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
        return outcome.read(model)

    assert_exact(DENSE.build, script, compute_device)
    assert scales == [2.0**9] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation(set_to_none: bool, compute_device: torch.device) -> None:
    """Three micro-batches for each step, with gradients that are dropped or kept at zero between steps."""

    def script(model: nn.Module) -> Outcome:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        outcome = Outcome()
        for index, batch in enumerate(DENSE.on(compute_device, 9)):
            output, loss = DENSE.forward(model, batch)
            outcome.outputs.append(on_cpu(output))
            (loss / 3).backward()
            outcome.read_gradients(model)
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        return outcome.read(model)

    assert_exact(DENSE.build, script, compute_device)


def test_accumulation_in_float32(compute_device: torch.device) -> None:
    """`grad_dtype`: gradients of bfloat16 weights are summed up in float32, in the order of micro-batches."""

    def make() -> nn.Module:
        return DENSE.build().to(torch.bfloat16)

    expected: dict[str, Tensor] = {}
    plain = make().to(compute_device)
    for batch in DENSE.on(compute_device):
        plain.zero_grad()
        DENSE.forward(plain, batch)[1].backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            gradient = on_cpu(parameter.grad).float()
            expected[name] = expected[name] + gradient if name in expected else gradient

    def script(model: nn.Module) -> Outcome:
        for batch in DENSE.on(compute_device):
            DENSE.forward(model, batch)[1].backward()
        return Outcome()

    _, model = assert_exact(make, script, compute_device, grad_dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert same(parameter.grad, expected[name]), name


def test_evaluation_inside_training(compute_device: torch.device) -> None:
    def script(model: nn.Module) -> Outcome:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        outcome = Outcome()
        for index, batch in enumerate(DENSE.on(compute_device, 6)):
            output, loss = DENSE.forward(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outcome.outputs.append(on_cpu(output))
            if index % 2:
                model.eval()
                with torch.no_grad() if index % 4 == 1 else torch.inference_mode():
                    outcome.outputs.append(on_cpu(DENSE.forward(model, batch)[0]))
                model.train()
        return outcome.read(model)

    assert_exact(DENSE.build, script, compute_device)


def test_optimizer_that_was_made_before_offloading(compute_device: torch.device) -> None:
    model = DENSE.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    offload(model, compute_device)
    plain = train(DENSE.build().to(compute_device), DENSE.on(compute_device), DENSE.forward)
    assert train(model, DENSE.on(compute_device), DENSE.forward, lambda _: optimizer).parameters.keys()
    for name, parameter in model.named_parameters():
        assert same(on_cpu(parameter), plain.parameters[name]), name
