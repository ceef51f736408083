"""How does the built-in model read text? One token per byte, and two special tokens."""

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

END_TOKEN, PAD_TOKEN = "<|end|>", "<|pad|>"
END_ID, PAD_ID = 256, 257
VOCABULARY_SIZE = 258


def encode_bytes(text: str) -> torch.Tensor:
    """The UTF-8 bytes of `text` and the end token, as int32 of shape (bytes + 1,). A token's id is its byte."""
    ids = np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)
    return torch.from_numpy(np.append(ids, np.int32(END_ID)))


def byte_tokenizer(*, longest: int) -> PreTrainedTokenizerBase:
    """The same encoding as a transformers tokenizer, to save with the model, which reads up to `longest` tokens."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )
