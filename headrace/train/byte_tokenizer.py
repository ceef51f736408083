"""How does the built-in model read text? One token per byte, and two special tokens."""

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

END_TOKEN, PAD_TOKEN = "<|end|>", "<|pad|>"
END_ID, PAD_ID = 256, 257
VOCABULARY_SIZE = 258


def encode_bytes(text: str) -> np.ndarray:
    """The ids that the tokenizer below gives a text, as int32. It would itself need a gigabyte for a file of 5 MB."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def byte_tokenizer(*, longest: int) -> PreTrainedTokenizerBase:
    """A tokenizer for a model that reads up to `longest` tokens. A token's id is its byte in the text's UTF-8.

    No text becomes a special token, not even the name of one.
    """
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        model_max_length=longest,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
