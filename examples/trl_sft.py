"""How does TRL's SFTTrainer fine-tune an offloaded model? Offload it, and give it to the trainer."""

import tempfile

import tiny
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import headrace

DEVICE_MEMORY = "2MiB"  # for 4.2 MiB of weights


def main(device=None, device_memory=DEVICE_MEMORY, offload=True, output=None):
    model = tiny.llama()
    handle = headrace.offload(model, device=device, device_memory=device_memory) if offload else None
    rows = [{"prompt": f"{name}:", "completion": f" {text}"} for name, text in tiny.docstrings().items()]
    arguments = SFTConfig(
        output or tempfile.mkdtemp(),
        max_length=tiny.LONGEST,
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        use_cpu=str(device) == "cpu",
        bf16=False,
    )
    trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer())
    trainer.train()
    return model, handle


if __name__ == "__main__":
    _, handle = main(**tiny.options(device_memory=DEVICE_MEMORY))
    print(handle.report())
