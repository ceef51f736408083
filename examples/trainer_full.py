"""How does transformers' Trainer fine-tune all weights of an offloaded model? Offload it first, then train as ever."""

import tempfile

import tiny
from transformers import Trainer, TrainingArguments

import headrace
from headrace.integrations.transformers import HeadraceCallback, optimizer_cls_and_kwargs

DEVICE_MEMORY = "2MiB"  # for 4.2 MiB of weights


def main(device=None, device_memory=DEVICE_MEMORY, offload=True, output=None):
    model = tiny.llama()
    handle = headrace.offload(model, device=device, device_memory=device_memory) if offload else None
    arguments = TrainingArguments(
        output or tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=1e-3,
        logging_steps=2,
        report_to=[],
        use_cpu=str(device) == "cpu",
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{name: rows[0] for name, rows in batch.items()} for batch in tiny.batches(16, size=1)],
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(arguments, overlap="forward") if offload else None,
        callbacks=[HeadraceCallback(handle, save=True)] if offload else None,
    )
    trainer.train()
    return model, handle


if __name__ == "__main__":
    _, handle = main(**tiny.options(device_memory=DEVICE_MEMORY))
    print(handle.report())
