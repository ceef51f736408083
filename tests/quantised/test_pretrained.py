"""Do quantised models of transformers' come from their directories packed, and train with adapters, on every tier?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

import headrace
from tests.support.compare import assert_same, on_cpu
from tests.support.loops import adamw, causal_loss, steps, trained_parameters

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")]

LINEAR_WEIGHTS = 6 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)
BUDGET_BYTES = 700 << 10
TABLE_BYTES = 256 * 128 * 4  # of the embedding, whose rows travel alone: it takes no room on the device


def torchao_int8() -> Any:
    import torchao.quantization

    return TorchAoConfig(torchao.quantization.Int8WeightOnlyConfig())


def nf4() -> Any:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


@pytest.fixture(scope="module", params=[nf4, torchao_int8], ids=["bitsandbytes nf4", "torchao int8"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised model of six layers."""
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path / "plain")
    model = AutoModelForCausalLM.from_pretrained(path / "plain", quantization_config=request.param(), device_map="cpu")
    model.save_pretrained(path / "quantised")
    return path / "quantised"


def tokens() -> Tensor:
    return torch.arange(24).view(2, 12)


def plain(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, device_map="cpu").eval()


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(trained_parameters(model), lr=1e-3)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, count: int = 5) -> list[Tensor]:
    """Losses of some steps, and the adapters after them."""
    optimizer = optimizer or optimizer_of(model)
    losses = steps(model, optimizer, [tokens()] * count, causal_loss)
    return [*losses, *on_cpu(trained_parameters(model))]


def packed_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


@pytest.mark.core(tier="host")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_quantised_directory_is_run_as_it_lies_there(directory: Path, tier: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if tier == "disk":
        options = {"host_memory": packed_bytes(directory) // 2, "disk": tmp_path}
    with torch.no_grad():
        wanted = plain(directory)(tokens()).logits
        model, handle = headrace.from_pretrained(
            directory, device="cpu", device_memory=BUDGET_BYTES, trainable=False, **options
        )
        with handle:
            assert torch.equal(model(tokens()).logits, wanted)
            stats = handle.stats()
            assert stats.device_peak_bytes <= BUDGET_BYTES
            assert 0.5 * LINEAR_WEIGHTS < stats.onload_bytes < packed_bytes(directory) + 8192
            if tier == "disk":
                assert stats.fetch_bytes > 0
                assert stats.host_peak_bytes <= packed_bytes(directory) // 2


@pytest.mark.core(tier="disk")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_adapters_train_on_a_quantised_directory(directory: Path, tier: str, tmp_path: Path) -> None:
    wanted = trained(with_adapters(plain(directory)))
    options: dict[str, Any] = {}
    if tier == "disk":
        options = {"host_memory": int(packed_bytes(directory) * 0.8), "disk": tmp_path}
    model, handle = headrace.from_pretrained(
        directory, device="cpu", device_memory=BUDGET_BYTES - TABLE_BYTES, trainable=False, **options
    )
    with handle:
        got = trained(with_adapters(model))
        assert len(got) == len(wanted)
        assert_same(got, wanted)
        stats = handle.stats()
        assert stats.device_peak_bytes <= BUDGET_BYTES - TABLE_BYTES
        assert stats.onload_bytes > 5 * 0.5 * LINEAR_WEIGHTS
        assert tier == "host" or stats.fetch_bytes > 0


@pytest.mark.extended
def test_a_run_goes_on_from_its_checkpoint(directory: Path, tmp_path: Path) -> None:
    """Which has the adapters, the optimizer's state, and nothing of the base."""

    def begin() -> tuple[Any, torch.optim.Optimizer, headrace.Offloaded]:
        base, handle = headrace.from_pretrained(directory, device="cpu", device_memory=BUDGET_BYTES, trainable=False)
        model = with_adapters(base)
        return model, optimizer_of(model), handle

    wanted = trained(with_adapters(plain(directory)))
    model, optimizer, handle = begin()
    with handle:
        trained(model, optimizer, count=2)
        headrace.save(tmp_path / "step-2", model, optimizer)
    assert packed_bytes(tmp_path / "step-2") < packed_bytes(directory) / 4
    model, optimizer, handle = begin()
    with handle:
        headrace.load(tmp_path / "step-2", model, optimizer)
        got = trained(model, optimizer, count=3)
        assert_same(got, wanted[2:])
        assert handle.stats().device_peak_bytes <= BUDGET_BYTES


def test_what_finds_no_room_names_the_disk(directory: Path) -> None:
    """Parts of packed weights are made as they are loaded (offsets, tables), so they are not read in place."""
    with pytest.raises(headrace.BudgetError, match=r"pass a directory, such as disk=|pass disk="):
        headrace.from_pretrained(
            directory, device="cpu", device_memory=BUDGET_BYTES, trainable=False, host_memory="300KiB"
        )
