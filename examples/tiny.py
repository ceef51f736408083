"""What do the examples train? A small Llama with random weights, on the docstrings of Python's builtins."""

import argparse
import builtins
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from headrace.train.byte_tokenizer import END_ID, PAD_ID, VOCABULARY_SIZE, byte_tokenizer

LONGEST = 128  # tokens: a token is a byte


def llama(seed: int = 0) -> LlamaForCausalLM:
    """4.2 MiB of weights, in six layers and two embeddings."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    ids = {"vocab_size": VOCABULARY_SIZE, "bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    return LlamaForCausalLM(LlamaConfig(**sizes, **ids, max_position_embeddings=LONGEST))


def tokenizer() -> PreTrainedTokenizerBase:
    """One token for each byte."""
    return byte_tokenizer(longest=LONGEST)


def docstrings(count: int = 16) -> dict[str, str]:
    """What builtins are for, by name."""
    texts = {name: thing.__doc__ for name, thing in vars(builtins).items() if getattr(thing, "__doc__", None)}
    return dict(list(texts.items())[:count])


def batches(count: int = 8, size: int = 2) -> list[dict[str, torch.Tensor]]:
    """Token ids and labels: (size, LONGEST) each."""
    ids = torch.tensor(tokenizer()("\n\n".join(docstrings(60).values()), verbose=False)["input_ids"])
    rows = ids[: count * size * LONGEST].view(count, size, LONGEST)
    return [{"input_ids": row, "labels": row} for row in rows]


def options(device_memory: str) -> dict[str, Any]:
    """`--device` and `--device-memory` of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", help="where to compute; default: the accelerator, or the CPU where there is none")
    parser.add_argument("--device-memory", default=device_memory, help="for weights there; default: %(default)s")
    return vars(parser.parse_args())
