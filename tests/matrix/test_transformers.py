"""Are the architectures of transformers exact: trained with labels or without, checkpointed its way, generating?"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.utils import ModelOutput

from tests.matrix.models import CHECKPOINTING
from tests.support.compare import Outcome, on_cpu
from tests.support.loops import adamw, to_device, train
from tests.support.offloaded import assert_exact, assert_moves_as_planned

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **IDS,
}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
    )


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, output_router_logits=True, experts_implementation="eager"
    )
    return transformers.MixtralForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=5, n_head=4, n_positions=32, **IDS)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def mamba() -> nn.Module:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=5, **IDS)
    return transformers.MambaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        **{name: value for name, value in IDS.items() if name != "bos_token_id"},
    )
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=12,
        max_target_positions=16,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        **IDS,
    )
    return transformers.WhisperForConditionalGeneration(config)


def tokens(seed: int, length: int = 10) -> Tensor:
    return torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(seed))


def text_inputs(seed: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(seed)}


def sound_inputs(seed: int) -> dict[str, Tensor]:
    features = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(seed))
    return {"input_features": features, "decoder_input_ids": tokens(seed)}


def pair_inputs(seed: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(seed), "decoder_input_ids": tokens(seed + 100, 6)}


Inputs = Callable[[int], dict[str, Tensor]]
ARCHITECTURES: list[tuple[Callable[[], nn.Module], Inputs]] = [
    (llama, text_inputs),
    (qwen3, text_inputs),
    (mixtral, text_inputs),
    (gpt2, text_inputs),
    (bert, text_inputs),
    (mamba, text_inputs),
    (t5, pair_inputs),
    (whisper, sound_inputs),
]


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def batches_of(inputs: Inputs) -> list[dict[str, Tensor]]:
    """Two with labels, one without."""
    batches = [inputs(seed) for seed in range(3)]
    for batch in batches[:2]:
        batch["labels"] = batch.get("decoder_input_ids", batch.get("input_ids")).clone()  # type: ignore[union-attr]
    return batches


def forward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    output = model(**batch)
    assert isinstance(output, ModelOutput)
    return output.logits, output.loss if "labels" in batch else output.logits.square().mean()


@pytest.mark.core(checkpointing="non-reentrant", make="mixtral")
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize(("make", "inputs"), ARCHITECTURES, ids=[make.__name__ for make, _ in ARCHITECTURES])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_training(
    make: Callable[[], nn.Module], inputs: Inputs, checkpointing: str, compute_device: torch.device
) -> None:
    batches = to_device(batches_of(inputs), compute_device)

    def make_model() -> Any:
        model: Any = built(make).train()
        if checkpointing != "none":
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        return model

    handle, model = assert_exact(make_model, lambda model: train(model, batches, forward), compute_device, 0.5)
    assert model.device == compute_device
    optimizer = adamw(model.parameters())

    def cycle() -> None:
        optimizer.zero_grad()
        forward(model, batches[0])[1].backward()
        optimizer.step()

    assert_moves_as_planned(handle, model, cycle)


@pytest.mark.core(make=["llama", "t5"])
@pytest.mark.parametrize("make", [llama, qwen3, mixtral, gpt2, mamba, t5, whisper])
def test_generate(make: Callable[[], nn.Module], compute_device: torch.device) -> None:
    inputs = sound_inputs(0)["input_features"] if make is whisper else tokens(0)

    def generate(model: Any) -> Outcome:
        continued = [
            model.generate(inputs.to(model.device), max_new_tokens=6, min_new_tokens=6, do_sample=sampled)
            for sampled in (False, True)
            if torch.manual_seed(0)
        ]
        return Outcome(outputs=[on_cpu(result) for result in continued]).read(model)

    handle, model = assert_exact(lambda: built(make).eval(), generate, compute_device, 0.5)
    handle.reset_stats()
    model.generate(inputs.to(compute_device), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert handle.stats().demand_onloads < handle.stats().onloads
