"""How does TRL's DPOTrainer train with two models, each within a budget? Give it the reference model, offloaded too.

Left to itself the trainer loads a reference model of its own, whole, on the accelerator. With PEFT there is no second
model: leave `ref_model` out, and the base under the adapters is the reference.
"""

import tempfile

import tiny
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import DPOConfig, DPOTrainer

import headrace

DEVICE_MEMORY = "2MiB"  # for 4.2 MiB of weights in each of two models


def main(device=None, device_memory=DEVICE_MEMORY, offload=True, output=None, lora=False):
    model, reference = tiny.llama(), None if lora else tiny.llama().requires_grad_(False)
    if lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    models = [model] if lora else [model, reference]
    handles = [headrace.offload(one, device=device, device_memory=device_memory) for one in models if offload]
    texts = tiny.docstrings()
    rows = [
        {"prompt": f"{name}:", "chosen": f" {text[:60]}", "rejected": f" {text[-60:]}"} for name, text in texts.items()
    ]
    arguments = DPOConfig(
        output or tempfile.mkdtemp(),
        max_length=tiny.LONGEST,
        per_device_train_batch_size=2,
        max_steps=3,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        use_cpu=str(device) == "cpu",
        bf16=False,
    )
    trainer = DPOTrainer(
        model, reference, arguments, train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer()
    )
    trainer.train()
    return model, handles


if __name__ == "__main__":
    _, handles = main(**tiny.options(device_memory=DEVICE_MEMORY))
    for handle in handles:  # of the model, and of the reference model
        print(handle.report())
