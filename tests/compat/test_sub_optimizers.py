"""Do optimizers of PyTorch step in a hybrid one with their own bits, and does each argument do what it says?"""

import copy
import functools
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from headrace.compat import HybridDeviceOptimizer
from headrace.compat.hybrid import TorchSteps
from headrace.optim.devices import DeviceShare
from tests.compat.test_megatron import SHAPES, FusedAdam, HostMemory, on_device
from tests.optim.references import copies, give_gradients, parameters
from tests.support.compare import assert_same

pytestmark = pytest.mark.emu("random:0")

CLASSES = ("RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "Adafactor")


def trained(ours: Any, reference: Any, steps: int = 4) -> None:
    theirs = [parameter for group in reference.param_groups for parameter in group["params"]]
    mine = [parameter for group in ours.param_groups for parameter in group["params"]]
    for step in range(steps):
        give_gradients(mine, theirs, step)
        ours.step()
        reference.step()


@pytest.mark.core(fraction=0.5)
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", CLASSES)
def test_any_class_of_pytorch_has_its_own_bits(
    emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, fraction: float
) -> None:
    """Those that it has on the CPU for what is there, and those that it has on the device for the rest."""
    kind = getattr(torch.optim, name)
    on_cpu = parameters(shapes=SHAPES)
    ours, there = on_device(on_cpu), on_device(on_cpu)
    optimizer, of_cpu, of_device = HybridDeviceOptimizer(ours, fraction, kind), kind(on_cpu), kind(there)
    on_host, divide = set(), DeviceShare.divide

    def divided(share: DeviceShare, *among: Any) -> Any:
        found = divide(share, *among)
        on_host.update(id(member.parameter) for member in found[0])
        return found

    monkeypatch.setattr(DeviceShare, "divide", divided)
    for step in range(4):
        give_gradients(ours, on_cpu, step)
        for weight, other in zip(ours, there, strict=True):
            other.grad = weight.grad
        for each in (optimizer, of_cpu, of_device):
            each.step()
    stays = [id(weight) not in on_host if 0 < fraction < 1 else fraction == 0 for weight in ours]
    assert any(stays) == (fraction < 1)
    assert all(stays) == (fraction == 0)
    for index, weight in enumerate(ours):
        reference, other = (of_device, there[index]) if stays[index] else (of_cpu, on_cpu[index])
        assert_same([weight], [other])
        assert optimizer.state[weight].keys() == reference.state[other].keys()
        for key, value in reference.state[other].items():
            assert torch.equal(torch.as_tensor(optimizer.state[weight][key]).cpu(), torch.as_tensor(value).cpu()), key


def test_a_partial_and_a_class_of_ones_own(emu_device: ModuleType) -> None:
    class SignDescent(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])

    for kind in (functools.partial(torch.optim.RMSprop, alpha=0.9, momentum=0.5), SignDescent):
        theirs = parameters(shapes=SHAPES)
        ours = on_device(theirs)
        trained(HybridDeviceOptimizer(ours, 0.5, kind, lr=0.01), kind(theirs, lr=0.01))
        assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("first", "second", "settings"),
    [
        (torch.optim.RMSprop, torch.optim.SGD, {"lr": 0.01}),
        (torch.optim.SGD, torch.optim.AdamW, {}),  # which decay weights by 0 and 0.01
        (torch.optim.SGD, torch.optim.AdamW, {"weight_decay": 0.0}),
        (*(functools.partial(torch.optim.AdamW, weight_decay=decay) for decay in (0.1, 0.2)), {}),
    ],
)
def test_two_rules_for_the_two_shares(
    emu_device: ModuleType, first: Any, second: Any, settings: dict[str, float]
) -> None:
    """The first half of the parameters goes by the one, the rest by the other, each with its own defaults."""
    theirs = parameters(shapes=((64, 64), (64,), (64, 64), (64,)))
    ours = on_device(theirs)
    references = [first(theirs[:2], **settings), second(theirs[2:], **settings)]
    groups = [{"params": (weight for weight in ours), **settings}]
    optimizer = HybridDeviceOptimizer(groups, 0.5, first, second)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1) for each in (optimizer, *references)]
    for step in range(3):
        give_gradients(ours, theirs, step)
        for each in (optimizer, *references, *schedules):
            each.step()
    assert_same(ours, theirs)
    for weight, reference in ((ours[0], references[0]), (ours[3], references[1])):
        assert optimizer.state[weight].keys() == reference.state[reference.param_groups[0]["params"][0]].keys()


def test_low_precision_weights_have_masters(emu_device: ModuleType) -> None:
    ours = on_device(parameters(torch.bfloat16, SHAPES))
    exact = copies([weight.cpu() for weight in ours], torch.float32)
    optimizer = HybridDeviceOptimizer(ours, 0.5, torch.optim.RAdam, master_form="full")
    trained(optimizer, torch.optim.RAdam(exact), steps=8)
    assert_same(ours, [weight.to(torch.bfloat16) for weight in exact])


def test_schedules_checkpoints_and_copies(emu_device: ModuleType) -> None:
    theirs = parameters(shapes=SHAPES)
    ours = on_device(theirs)
    optimizer, reference = HybridDeviceOptimizer(ours, 1.0, torch.optim.RMSprop), torch.optim.RMSprop(theirs)
    trained(optimizer, reference)
    again = HybridDeviceOptimizer(ours, 0.7, torch.optim.RMSprop)
    again.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1) for each in (again, reference)]
    for _ in range(2):
        trained(again, reference, steps=2)
        for schedule in schedules:
            schedule.step()
    assert_same(ours, theirs)
    assert isinstance(copy.deepcopy(again), TorchSteps)
    with pytest.raises(ValueError, match="load_state_dict"):
        again.dummy_step()


def test_steps_within_it_call_nobodys_hooks(emu_device: ModuleType) -> None:
    ours = on_device(parameters(shapes=SHAPES))
    optimizer = HybridDeviceOptimizer(ours, 0.5, torch.optim.RMSprop)
    seen = []
    handle = register_optimizer_step_post_hook(lambda stepped, *_: seen.append(stepped))
    give_gradients(ours, copies([weight.cpu() for weight in ours]), 0)
    optimizer.step()
    handle.remove()
    assert seen == [optimizer]


def test_pytorchs_own_steps_when_it_is_asked_for(emu_device: ModuleType) -> None:
    theirs = parameters(shapes=SHAPES)
    ours = on_device(theirs)
    optimizer = HybridDeviceOptimizer(ours, 0.5, torch.optim.AdamW, use_torch_optimizer=True, lr=0.01, fused=True)
    assert isinstance(optimizer, TorchSteps)
    trained(optimizer, torch.optim.AdamW(theirs, lr=0.01, fused=True))
    assert_same(ours, theirs)


@pytest.mark.parametrize(("grads", "params"), [(True, True), (True, False), (False, True), (False, False)])
def test_gradients_and_weights_are_pinned_each_for_itself(
    emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch, grads: bool, params: bool
) -> None:
    theirs = parameters(shapes=SHAPES)
    ours = on_device(theirs)
    optimizer: Any = HybridDeviceOptimizer(ours, 1.0, pin_cpu_grads=grads, pin_cpu_params=params)
    memory = HostMemory(monkeypatch)
    trained(optimizer, torch.optim.AdamW(theirs, fused=True))
    assert_same(ours, theirs)
    assert memory.pinned() == ({params}, {grads})


# TransformerEngine's arguments ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_moments_without_correction(emu_device: ModuleType, device: str) -> None:
    """exp_avg / (sqrt(exp_avg_sq) + eps), from the first step on."""
    weight = nn.Parameter(torch.ones(300, device=device))
    optimizer = HybridDeviceOptimizer(
        [weight], 0.5, None, FusedAdam, lr=0.5, weight_decay=0.0, bias_correction=False, betas=(0.5, 0.75)
    )
    optimizer = copy.deepcopy(optimizer)
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad = torch.full_like(weight, 2.0)
    optimizer.step()
    expected = 1 - 0.5 * (0.5 * 2) / ((0.25 * 4) ** 0.5 + 1e-8)
    assert weight.tolist() == pytest.approx([expected] * 300)


@pytest.mark.parametrize("through", ["settings", "partial"])
def test_adam_w_mode_chooses_the_rule(emu_device: ModuleType, through: str) -> None:
    theirs = parameters(shapes=SHAPES)
    ours = on_device(theirs)
    fused: Any = FusedAdam if through == "settings" else functools.partial(FusedAdam, adam_w_mode=False)
    more = {"adam_w_mode": False} if through == "settings" else {}
    optimizer = HybridDeviceOptimizer(ours, 0.5, torch.optim.Adam, fused, weight_decay=0.1, **more)
    assert not isinstance(optimizer, TorchSteps | torch.optim.AdamW)
    trained(optimizer, torch.optim.Adam(theirs, weight_decay=0.1, fused=True))
    assert_same(ours, theirs)


def test_arguments_that_say_what_is_so_here(emu_device: ModuleType) -> None:
    theirs = parameters(shapes=SHAPES)
    ours = on_device(theirs)
    said = {"master_weights": True, "master_weight_dtype": torch.float32, "use_decoupled_grad": False}
    said |= {"set_grad_none": True, "capturable": True, "exp_avg_dtype": torch.float32, "bias_correction": True}
    trained(HybridDeviceOptimizer(ours, 0.5, None, FusedAdam, **said), torch.optim.AdamW(theirs, fused=True))
    assert_same(ours, theirs)


def test_arguments_that_change_what_is_kept(emu_device: ModuleType) -> None:
    ours = on_device(parameters(torch.bfloat16, SHAPES))
    give_gradients(ours, copies([weight.cpu() for weight in ours]), 0)
    narrow = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    for remainders, key in ((True, "master_remainder"), (False, "master")):
        optimizer = HybridDeviceOptimizer(ours, 1.0, None, FusedAdam, store_param_remainders=remainders, **narrow)
        optimizer.step()
        assert all(key in optimizer.state[weight] for weight in ours)
        assert {optimizer.state[ours[0]][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"master_weights": False}, "master_weights=False, and parameter 0 is torch.bfloat16"),
        ({"master_weight_dtype": torch.float16}, "master_weight_dtype is available as torch.float32 only"),
        ({"use_decoupled_grad": True}, "use_decoupled_grad is available as False only"),
        ({"set_grad_none": False}, r"zero_grad\(set_to_none=False\)"),
        ({"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}, 'state_dtype="8bit" takes less'),
        ({"exp_avg_dtype": torch.bfloat16}, "exp_avg_dtype=torch.bfloat16 with exp_avg_sq_dtype=torch.float32"),
        ({"cpu_optimizer_cls": torch.optim.LBFGS}, "LBFGS cannot run"),
        ({"cpu_optimizer_cls": torch.optim.SparseAdam}, "SparseAdam cannot run"),
    ],
)
def test_arguments_that_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HybridDeviceOptimizer([nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))], **settings)
