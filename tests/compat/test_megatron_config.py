"""Do Megatron's settings make the optimizer and the offloading that they name, and may they be overridden by texts?"""

from types import ModuleType
from typing import Any

import pytest
import torch

import headrace
from headrace.compat.hybrid import TorchSteps
from headrace.compat.megatron import (
    ConfigContainer,
    CPUOffloadConfig,
    HybridDeviceOptimizer,
    OptimizerConfig,
    apply,
    override,
)
from tests.activations.models import Stack, rows, step
from tests.compat.test_megatron import SHAPES, on_device
from tests.optim.references import give_gradients, parameters
from tests.support.compare import assert_same

pytestmark = pytest.mark.core(device="emu")

LAYERS = 6


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("changes", "kind", "settings"),
    [
        ({}, torch.optim.AdamW, {"weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}),
        (
            {"decoupled_weight_decay": False, "adam_beta1": 0.8},
            torch.optim.Adam,
            {"weight_decay": 0.01, "betas": (0.8, 0.999)},
        ),
        ({"optimizer": "sgd"}, torch.optim.SGD, {"weight_decay": 0.01, "momentum": 0.9}),
    ],
)
def test_the_optimizer_of_a_config(
    emu_device: ModuleType, changes: dict[str, Any], kind: Any, settings: dict[str, Any], offload: bool, by_torch: bool
) -> None:
    config = OptimizerConfig()
    config.lr = 0.01
    config.clip_grad = 0.0
    config.optimizer_cpu_offload = offload
    config.optimizer_offload_fraction = 0.5
    config.overlap_cpu_optimizer_d2h_h2d = True
    config.use_torch_optimizer_for_cpu_offload = by_torch
    for name, value in changes.items():
        setattr(config, name, value)
    theirs = parameters(shapes=SHAPES)
    ours = on_device(theirs)
    optimizer, reference = config.optimizer_for(ours), kind(theirs, lr=0.01, fused=True, **settings)
    assert isinstance(optimizer, TorchSteps) == (by_torch and offload)
    for number in range(3):
        give_gradients(ours, theirs, number)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    held = optimizer.held_bytes()
    assert (held > 1000) == offload  # beside numbers of steps
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_gradients_are_clipped_as_pytorch_does_it() -> None:
    theirs, ours = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    optimizer = OptimizerConfig(lr=0.1, clip_grad=0.5, optimizer="sgd", weight_decay=0.0).optimizer_for(ours)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, fused=True)
    for number in range(2):
        give_gradients(ours, theirs, number)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        optimizer.step()
        reference.step()
        assert optimizer.last_grad_norm == pytest.approx(float(norm))
    assert_same(ours, theirs)


def test_precision_and_other_optimizers() -> None:
    config = OptimizerConfig(use_precision_aware_optimizer=True)
    config.exp_avg_dtype = config.exp_avg_sq_dtype = torch.bfloat16
    config.store_param_remainders = False
    model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    model.bias.requires_grad_(False)
    optimizer = config.optimizer_for(model)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert [sorted(state) for state in optimizer.state.values()] == [["exp_avg", "exp_avg_sq", "master", "step"]]
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.bfloat16
    assert isinstance(OptimizerConfig(optimizer="muon").optimizer_for(model), torch.optim.Muon)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"optimizer": "soap"}, "optimizer='soap' is not available; allowed: adam, sgd, muon"),
        ({"optimizer_offload_fraction": 1.5}, r"outside \[0, 1\]"),
        ({"main_params_dtype": torch.float16}, "main_params_dtype=torch.float16"),
        ({"exp_avg_dtype": torch.uint8}, "exp_avg_dtype=torch.uint8"),
        ({"optimizer_cuda_graph": True}, "optimizer_cuda_graph=True"),
        (
            {
                "optimizer_cpu_offload": True,
                "use_torch_optimizer_for_cpu_offload": True,
                "exp_avg_dtype": torch.bfloat16,
                "exp_avg_sq_dtype": torch.bfloat16,
            },
            "exp_avg_dtype=torch.bfloat16 with use_torch_optimizer_for_cpu_offload=True",
        ),
    ],
)
def test_optimizers_that_cannot_be(changes: dict[str, Any], text: str) -> None:
    config = OptimizerConfig()
    for name, value in changes.items():
        setattr(config, name, value)  # nothing is said before it is used
    with pytest.raises(ValueError, match=text):
        config.optimizer_for(parameters(shapes=SHAPES))


def test_settings_that_do_not_exist_cannot_be_set() -> None:
    with pytest.raises(AttributeError, match="did you mean 'optimizer_cpu_offload'"):
        OptimizerConfig().optimizer_cpu_ofload = True  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="headrace has no such setting"):
        OptimizerConfig().barrier_with_L1_time = True  # type: ignore[attr-defined]


# layers ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("activations", "weights"), [(True, False), (False, True), (True, True)])
def test_a_config_alone_offloads_a_model(device: torch.device, activations: bool, weights: bool) -> None:
    expected = step(Stack(LAYERS).to(device), rows(device))
    config = CPUOffloadConfig(num_layers=LAYERS)
    config.cpu_offloading = True
    config.cpu_offloading_num_layers = 4
    config.cpu_offloading_activations = activations
    config.cpu_offloading_weights = weights
    config.pipeline_model_parallel_size = 2
    config.recompute_granularity = "full"
    model = Stack(LAYERS) if weights else Stack(LAYERS).to(device)
    handle = apply(config, model, min_bytes=0)
    for _ in range(3):
        assert_same(step(model, rows(device)), expected)
    assert isinstance(handle, headrace.Offloaded if weights else headrace.ActivationOffloading)
    stats: Any = handle.stats()
    assert not weights or stats.onload_bytes > 0
    assert not (activations and not weights) or stats.offload_bytes > 0
    handle.remove()


def test_modules_of_a_config_leave(device: torch.device) -> None:
    expected = step(Stack(LAYERS).to(device), rows(device))
    moved = []
    for modules in ("[layers.0]", '["layers.0", "layers.3"]'):
        config = ConfigContainer(model=CPUOffloadConfig(num_layers=LAYERS))
        override(config, ["model.fine_grained_activation_offloading=True", f"model.offload_modules={modules}"])
        model = Stack(LAYERS).to(device)
        handle = apply(config.model, model, min_bytes=0)
        assert isinstance(handle, headrace.ActivationOffloading)
        for _ in range(3):
            assert_same(step(model, rows(device)), expected)
        moved.append(handle.stats().offload_bytes)
    assert 0 < moved[0] < moved[1]


def test_nothing_to_offload(device: torch.device) -> None:
    model = Stack(LAYERS)
    assert apply(CPUOffloadConfig(num_layers=LAYERS, cpu_offloading_num_layers=3), model) is None
    assert apply(CPUOffloadConfig(num_layers=LAYERS, cpu_offloading=True), model) is None
    config = CPUOffloadConfig(num_layers=LAYERS)
    config.cpu_offloading, config.cpu_offloading_num_layers = True, LAYERS
    with pytest.raises(ValueError, match="give 0 to 5"):
        apply(config, model)


# overrides ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("optimizer.lr", "'optimizer.lr' is no override"),
        ("optimizer.optimizer_cpu_offlod=True", "did you mean 'optimizer_cpu_offload'"),
        ("optimizer.optimizer_cpu_offload=yes", "give True or False"),
        ("train.train_iters=many", "give a number, as 1 is"),
        ("train.global_batch_size=3", "is no multiple of micro_batch_size=2"),
        ("model.cpu_offloading_num_layers=48", "give 0 to 47"),
    ],
)
def test_overrides_that_cannot_be(assignment: str, text: str) -> None:
    config = ConfigContainer(model=CPUOffloadConfig(num_layers=48))
    override(config, ["train.micro_batch_size=2", "train.global_batch_size=2", "model.cpu_offloading=True"])
    with pytest.raises((ValueError, AttributeError), match=text):  # noqa: PT012 (when it is set, or checked)
        override(config, [assignment])
        config.validate()


def test_overrides_have_the_type_of_what_they_replace() -> None:
    config = ConfigContainer(model=CPUOffloadConfig(num_layers=48))
    override(
        config, ["optimizer.lr=1e-4", "cfg.optimizer.main_grads_dtype=float32", "model.recompute_granularity=full"]
    )
    assert (config.optimizer.lr, config.optimizer.main_grads_dtype) == (1e-4, torch.float32)
    assert config.model.recompute_granularity == "full"
    override(config, ["optimizer.use_distributed_optimizer=true", "model.recompute_granularity=null"])
    assert config.optimizer.use_distributed_optimizer is True
    assert config.model.recompute_granularity is None
    assert isinstance(config.optimizer.optimizer_for(parameters()), HybridDeviceOptimizer)
