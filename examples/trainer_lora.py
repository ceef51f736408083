"""How does Trainer train LoRA adapters of an offloaded model? PEFT first, then offload: adapters stay on the device."""

import tempfile

import tiny
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import headrace

DEVICE_MEMORY = "2MiB"  # for 4.2 MiB of weights


def main(device=None, device_memory=DEVICE_MEMORY, offload=True, output=None):
    base = tiny.llama()
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    handle = headrace.offload(model, device=device, device_memory=device_memory) if offload else None
    arguments = TrainingArguments(
        output or tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        use_cpu=str(device) == "cpu",
    )
    rows = [{name: rows[0] for name, rows in batch.items()} for batch in tiny.batches(16, size=1)]
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return model, handle


if __name__ == "__main__":
    _, handle = main(**tiny.options(device_memory=DEVICE_MEMORY))
    print(handle.report())
