"""Which model does a run train? One from a transformers directory, or a small Llama; or adapters on it."""

import importlib.util
import json
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from headrace.errors import CheckpointError, TrainInputError
from headrace.integrations.transformers import open_pretrained, saved_config
from headrace.memory.disk import Checkpoint
from headrace.train.byte_tokenizer import END_ID, PAD_ID, VOCABULARY_SIZE, byte_tokenizer
from headrace.train.config import DTYPES, HEAD_SIZE, TrainConfig

if TYPE_CHECKING:
    from peft import PeftModel

_NOT_OF_A_MODEL = ("_name_or_path", "transformers_version")  # entries that say how the config was saved


def tokenizer_of(config: TrainConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the model's directory, or of the built-in model. Raises TrainInputError if there is no model."""
    if config.model is None:
        return byte_tokenizer(longest=config.sequence_length)
    try:
        saved_config(config.model)
    except CheckpointError as error:
        raise TrainInputError(f"--model: {error}. Without --model, a small built-in Llama is trained") from error
    return load_tokenizer(config.model)


def load_tokenizer(directory: Path, *, trust_remote_code: bool | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in `directory`. Raises TrainInputError. If `trust_remote_code` is None, transformers may ask."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises many kinds for a file that is missing or broken
        raise TrainInputError(
            f"model directory {directory} has no tokenizer that transformers can load ({_first_line(error)}); "
            "save the model's tokenizer there"
        ) from error
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model before it is trained."""

    model: "PreTrainedModel | PeftModel"
    weight_files: Checkpoint | None  # the files from which its weights are mapped
    digest: str  # of the weights and the config, wherever the model's directory is

    @cached_property  # keeps the value from before the model is placed
    def weight_bytes(self) -> int:
        """Bytes of all parameters, shared ones once."""
        return sum(parameter.nbytes for parameter in self.model.parameters())


def load_model(config: TrainConfig) -> LoadedModel:
    """The model on the CPU, in training mode, with weights that follow from `config` alone. Raises TrainInputError.

    With `config.disk` the weights of a saved model are mapped from its files, and not loaded.
    """
    if config.lora_rank is not None and importlib.util.find_spec("peft") is None:
        raise TrainInputError("peft is not installed; run: pip install peft")
    torch.manual_seed(config.seed)
    weight_files: Checkpoint | None = None
    if config.model is None:
        model = _built_in_model(config)
    elif config.disk is None:
        model = _saved_model(config.model, config)
    else:
        model, weight_files = _mapped_model(config.model)
    digest = _digest(model, config.model)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and config.sequence_length > longest:
        raise TrainInputError(
            f"--sequence-length is {config.sequence_length}, but the model reads {longest} tokens; lower it"
        )
    if config.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise TrainInputError(f"{type(model).__name__} has no gradient checkpointing; leave the option out")
        # Later releases of transformers 5 have the first name, and warn about the second.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    if config.lora_rank is not None:
        model = _adapted(model, config)
    model.train()
    return LoadedModel(model=model, weight_files=weight_files, digest=digest)


def _digest(model: PreTrainedModel, directory: Path | None) -> str:
    """The digest of a saved model; reading all weights takes less than a step. Settings identify a built-in one."""
    if directory is None:
        return "built in"
    config = {name: value for name, value in saved_config(directory).items() if name not in _NOT_OF_A_MODEL}
    digest = xxhash.xxh3_128(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _adapted(model: PreTrainedModel, config: TrainConfig) -> "PeftModel":
    """The model with adapters, which are trained while its own weights are not."""
    from peft import LoraConfig, get_peft_model  # here: it imports bitsandbytes, which a plain model does not need

    if config.gradient_checkpointing:
        model.enable_input_require_grads()  # else layers of frozen weights are not recomputed
    targets = config.lora_targets
    transposed = any(isinstance(module, Conv1D) for module in model.modules())  # GPT-2's weights are transposed
    torch.manual_seed(config.seed)
    adapters = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        fan_in_fan_out=transposed,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
    )
    try:
        with warnings.catch_warnings():  # PEFT uses a name of transformers that is deprecated
            warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
            adapted: PeftModel = get_peft_model(model, adapters)
    except ValueError as error:
        raise TrainInputError(f"--lora-targets {' '.join(targets)}: {_first_line(error)}") from error
    if config.model is not None:  # else adapter files would have a path relative to this process's directory
        adapted.peft_config["default"].base_model_name_or_path = str(config.model.absolute())
    return adapted


def check_vocabulary(model: PreTrainedModel, largest: int) -> None:
    """Raises TrainInputError if the text holds a token for which the model has no embedding."""
    rows = model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise TrainInputError(
            f"the tokenizer gives token {largest}, but the model embeds tokens below {rows}; "
            "use the tokenizer that belongs to the model"
        )


def _built_in_model(config: TrainConfig) -> PreTrainedModel:
    llama = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=config.hidden_size,
        intermediate_size=(8 * config.hidden_size // 3 + 63) // 64 * 64,
        num_hidden_layers=config.layers,
        num_attention_heads=config.hidden_size // HEAD_SIZE,
        max_position_embeddings=config.sequence_length,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(llama).to(DTYPES[config.dtype or "float32"])


def _saved_model(directory: Path, config: TrainConfig) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=DTYPES[config.dtype] if config.dtype else "auto", local_files_only=True
        )
    except Exception as error:  # transformers raises many kinds for a file that is missing or broken
        raise TrainInputError(
            f"model directory {directory} holds no causal language model that transformers can load: "
            f"{_first_line(error)}"
        ) from error


def _mapped_model(directory: Path) -> tuple[PreTrainedModel, Checkpoint]:
    model, weight_files = open_pretrained(directory)
    if type(model) not in MODEL_FOR_CAUSAL_LM_MAPPING.values():
        weight_files.close()
        raise TrainInputError(
            f"model directory {directory} holds a {type(model).__name__}, which is not a causal language model"
        )
    model.name_or_path = str(directory)  # PEFT writes this name beside adapters
    return model, weight_files


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
