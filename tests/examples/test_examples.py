"""Do the examples give, offloaded, the bits that they give without headrace, within their budgets?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.conftest import EXAMPLES, run_example
from tests.support.compare import same

# What transformers, TRL, PEFT and Lightning say of each other.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*num_workers"),
    pytest.mark.extended,
]

CASES = [pytest.param(name, {}, id=name) for name in EXAMPLES]
CASES.append(pytest.param("trl_dpo", {"lora": True}, id="trl_dpo_lora"))
CASES.append(pytest.param("dit_full", {"lora": True}, id="dit_full_lora"))


@pytest.fixture
def main_of(at_examples: None) -> Callable[[str], Callable[..., Any]]:
    """The function `main` of an example."""
    return lambda name: run_example(name, as_program=False)["main"]


def tensors(result: Any) -> dict[str, torch.Tensor]:
    """Of a model, or an output."""
    state = {"output": result} if isinstance(result, torch.Tensor) else result.state_dict()
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_example(
    name: str,
    settings: dict[str, Any],
    main_of: Callable[[str], Callable[..., Any]],
    compute_device: torch.device,
) -> None:
    main = main_of(name)
    plain, none = main(device=compute_device, offload=False, **settings)
    assert not none
    expected = tensors(plain)
    result, handles = main(device=compute_device, **settings)
    for handle in handles if isinstance(handles, list) else [handles]:
        stats = handle.stats()
        assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes
        assert stats.onload_bytes > 0
        handle.remove()
    found = tensors(result)
    assert list(found) == list(expected)
    for key, tensor in found.items():
        assert same(tensor, expected[key]), key


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("name", ["lightning_trainer", "lightning_fabric"])
def test_lightning_goes_on_from_its_own_checkpoint(
    name: str, main_of: Callable[[str], Callable[..., Any]], tmp_path: Path
) -> None:
    main, expected = main_of(name), None
    resumed = {"epochs": 2, "checkpoints": tmp_path, "resume_from": tmp_path / "epoch=0.ckpt"}
    for settings in ({"epochs": 2}, {"checkpoints": tmp_path}, resumed):
        model, handle = main(device="cpu", **settings)
        handle.remove()
        expected = expected or tensors(model)
    assert all(same(tensor, expected[key]) for key, tensor in tensors(model).items())


RECIPE = "model.num_layers=3 model.hidden_size=32 model.moe_ffn_hidden_size=16 model.num_moe_experts=8"
RECIPE += " model.vocab_size=64 train.train_iters=3 train.global_batch_size=4 train.micro_batch_size=2"


@pytest.mark.parametrize(
    "overrides",
    [
        "optimizer.optimizer_cpu_offload=True optimizer.optimizer_offload_fraction=0.5",
        "cfg.optimizer.optimizer_cpu_offload=true optimizer.optimizer_offload_fraction=1.0",
        "model.cpu_offloading=True model.cpu_offloading_num_layers=2",
        "model.recompute_granularity=full model.cpu_offloading=True model.cpu_offloading_num_layers=1",
    ],
)
def test_a_recipe_trains_with_the_losses_of_the_plain_run(
    overrides: str, at_examples: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for more in ("", overrides):
        given = ["--recipe", "qwen3_30b_a3b_pretrain_config", *RECIPE.split(), *more.split()]
        monkeypatch.setattr("sys.argv", ["run_recipe", *given])
        run_example("run_recipe", as_program=True)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert len(set(shown[0].splitlines())) == 6


def test_the_recipe_is_that_model(at_examples: None) -> None:
    config = run_example("run_recipe", as_program=False)["qwen3_30b_a3b_pretrain_config"]()
    with torch.device("meta"):
        model = config.model.provide()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(30.5e9, rel=0.002)


@pytest.mark.parametrize("name", ["accelerate_loop", "text_to_image"])
def test_as_a_program(
    name: str, at_examples: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--device", "cpu", "--device-memory", "900KiB"])
    ran = run_example(name, as_program=True)
    handles = ran.get("handles") or [ran["handle"]]
    assert all(handle.stats().device_budget_bytes == 900 << 10 for handle in handles)
    assert capsys.readouterr().out.count("of 900 KiB") == len(handles)
    for handle in handles:
        handle.remove()
