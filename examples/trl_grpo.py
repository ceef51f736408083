"""How does TRL's GRPOTrainer write completions and learn from their rewards with an offloaded model? As ever."""

import tempfile

import tiny
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import headrace

DEVICE_MEMORY = "2MiB"  # for 4.2 MiB of weights


def reward_for_letters(completions, **_):
    return [sum(letter.isalpha() for letter in completion) / 10 for completion in completions]


def main(device=None, device_memory=DEVICE_MEMORY, offload=True, output=None):
    model = tiny.llama()
    handle = headrace.offload(model, device=device, device_memory=device_memory) if offload else None
    arguments = GRPOConfig(
        output or tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=3,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        use_cpu=str(device) == "cpu",
        bf16=False,
    )
    trainer = GRPOTrainer(
        model,
        reward_for_letters,
        arguments,
        train_dataset=Dataset.from_list([{"prompt": f"{name}:"} for name in tiny.docstrings()]),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    return model, handle


if __name__ == "__main__":
    _, handle = main(**tiny.options(device_memory=DEVICE_MEMORY))
    print(handle.report())
