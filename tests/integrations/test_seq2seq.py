"""Does Seq2SeqTrainer train, and evaluate by generating, with an offloaded encoder and decoder, bit for bit?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, Seq2SeqTrainer, Seq2SeqTrainingArguments

import headrace
from tests.support.compare import assert_same
from tests.support.held import weight_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.*generation.*", "ignore:.*generate.*")


def bart() -> BartForConditionalGeneration:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        dropout=0.0,
    )
    return BartForConditionalGeneration(config)


def fit(model: BartForConditionalGeneration, directory: Path) -> tuple[float, list[torch.Tensor]]:
    """The loss, and what was generated at each evaluation."""
    examples = [{"input_ids": torch.arange(5, 15) + i, "labels": torch.arange(6, 12) + i} for i in range(4)]
    generated = []

    def metrics(prediction: Any) -> dict[str, float]:
        generated.append(torch.as_tensor(prediction.predictions))
        return {}

    settings = Seq2SeqTrainingArguments(
        output_dir=str(directory),
        max_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        predict_with_generate=True,
        generation_max_length=8,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=settings,
        train_dataset=examples,  # type: ignore[arg-type]
        eval_dataset=examples,  # type: ignore[arg-type]
        compute_metrics=metrics,
    )
    return trainer.train().training_loss, generated


def test_predict_with_generate(tmp_path: Path) -> None:
    plain, model = bart(), bart()
    loss, generated = fit(plain, tmp_path)
    with headrace.offload(model, device="cpu", device_memory=weight_bytes(model) // 2) as handle:
        found, seen = fit(model, tmp_path)
        assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes
    assert found == loss
    assert len(seen) == len(generated) == 2
    assert_same(seen, generated)
    assert_same(model.parameters(), plain.parameters())
