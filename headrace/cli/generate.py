"""How does the command line write text with a model that does not fit? The arguments of `headrace generate`."""

import argparse
import inspect
import json
import sys
import time
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from headrace.cli import InputError, about_input, path_argument
from headrace.config import counted, format_bytes, how_to_download, parse_budget

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

    from headrace import Offloaded

EPILOG = """\
Sizes are bytes, text such as 8GiB, or a share of the weights such as 25%. Without --prompt, the prompt is read
from standard input.
The text goes to standard output as it comes, and what was measured to standard error. Several prompts are written on
together, and their texts come when all are done.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write text with a causal language model that is larger than device memory, or than RAM."
    parser.epilog = EPILOG
    parser.add_argument(
        "--model", type=path_argument, required=True, metavar="DIR", help="a transformers model, tokenizer too"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="what the text begins with (default: standard input); may be given several times",
    )
    parser.add_argument(
        "--chat", action="store_true", help="prompts are a user's messages, in the model's chat template"
    )
    parser.add_argument("--json", action="store_true", help="write texts and what was measured as JSON")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="to write at most (default: 100)")
    parser.add_argument("--sample", action="store_true", help="draw tokens at random (default: the likeliest)")
    parser.add_argument("--temperature", type=float, metavar="X", help="of --sample (default: as the model says)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of --sample (default: 0)")
    memory = parser.add_argument_group("memory")
    memory.add_argument("--device", metavar="DEVICE", help="compute device (default: the accelerator, else cpu)")
    memory.add_argument("--device-memory", metavar="SIZE", help="for weights on the device (default: what is free)")
    memory.add_argument("--host-memory", metavar="SIZE", help="for weights in host RAM (default: what is free)")
    memory.add_argument(
        "--disk", type=path_argument, metavar="DIR", help="for weights that fit in neither (default: none)"
    )
    memory.add_argument(
        "--cache-tier",
        choices=("host", "disk"),
        help="keys and values rest in host memory, or on --disk (default: on the device, beside --device-memory)",
    )


def run(arguments: argparse.Namespace) -> int:
    _check_arguments(arguments)
    prompts = [sys.stdin.read()] if arguments.prompt is None else arguments.prompt
    if not all(prompts):
        raise InputError("the prompt is empty; give some text to go on from")
    try:
        # Imported here because transformers takes seconds, and `headrace generate --help` does not need it.
        from transformers.utils.logging import disable_progress_bar

        from headrace.integrations.transformers import from_pretrained
        from headrace.runtime.device import resolve_device
        from headrace.train.model import load_tokenizer
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is not installed; run: pip install 'transformers>=5'") from error
    if not sys.stderr.isatty():
        disable_progress_bar()
    tokenizer = load_tokenizer(arguments.model, trust_remote_code=False)
    if arguments.chat:
        prompts = [_in_template(tokenizer, prompt) for prompt in prompts]
    with about_input(ValueError):
        device = resolve_device(arguments.device)
    memory = {name: getattr(arguments, name) for name in ("device_memory", "host_memory", "disk")}
    model, handle = from_pretrained(arguments.model, trainable=False, device=device, **memory)
    with handle:
        _write(arguments, prompts, tokenizer, model, handle)
    return 0


def _check_arguments(arguments: argparse.Namespace) -> None:
    """Raises InputError for arguments that no model could use."""
    if arguments.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens is {arguments.max_new_tokens}; give 1 or more")
    if not -(2**63) <= arguments.seed < 2**64:
        raise InputError(f"--seed {arguments.seed} is not a number of 64 bits")
    if arguments.temperature is not None and not (arguments.sample and arguments.temperature > 0):
        raise InputError(f"--temperature {arguments.temperature} needs --sample, and to be above 0")
    if not arguments.model.is_dir():
        raise InputError(f"model directory {arguments.model} does not exist; {how_to_download(arguments.model)}")
    if arguments.disk is not None and arguments.disk.is_file():
        raise InputError(f"--disk {arguments.disk} is a file; give a directory")
    if arguments.cache_tier == "disk" and arguments.disk is None:
        raise InputError("--cache-tier disk needs a directory on a local drive; give --disk, too")
    with about_input(ValueError):  # what a share comes to is known only with the weights
        for name in ("device_memory", "host_memory"):
            if getattr(arguments, name) is not None:
                parse_budget(getattr(arguments, name), name=f"--{name.replace('_', '-')}", whole_bytes=0)


def _write(
    arguments: argparse.Namespace,
    prompts: list[str],
    tokenizer: "PreTrainedTokenizerBase",
    model: "PreTrainedModel",
    handle: "Offloaded",
) -> None:
    """Writes the text as it is generated, or several prompts' texts at the end, and then the measured numbers."""
    from transformers import TextStreamer

    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None and len(prompts) > 1:
        raise InputError("the tokenizer has no token to pad with; give one prompt at a time")
    tokenizer.padding_side = "left"  # so that all prompts end at the same place
    # A chat template adds the token for the beginning itself.
    inputs = tokenizer(
        prompts, return_tensors="pt", padding=len(prompts) > 1, add_special_tokens=not arguments.chat
    ).to(model.device)
    _check(arguments, model, inputs["input_ids"])
    if arguments.cache_tier is not None:
        inputs["past_key_values"] = _cache(model, handle, arguments.cache_tier)
    at_once = not arguments.json and len(prompts) == 1
    clock = _Clock(TextStreamer(tokenizer, skip_special_tokens=True) if at_once else None)
    torch.manual_seed(arguments.seed)
    written = model.generate(
        **inputs,
        max_new_tokens=arguments.max_new_tokens,
        do_sample=arguments.sample,
        temperature=arguments.temperature,
        pad_token_id=tokenizer.pad_token_id,
        streamer=clock,
    )
    seconds = time.perf_counter() - clock.began
    # With an encoder, the output holds no prompt, but one token to begin with.
    begin = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    new = [_up_to_end(row, model.generation_config.eos_token_id) for row in written[:, begin:].tolist()]
    count, first_seconds, stats = sum(map(len, new)), clock.first - clock.began, handle.stats()
    if arguments.json:
        told = {
            "texts": tokenizer.batch_decode(new, skip_special_tokens=True),
            "tokens": [len(tokens) for tokens in new],
            "seconds": seconds,
            "first_token_seconds": first_seconds,
            "tokens_per_second": count / seconds,
            **{name: getattr(stats, name) for name in _MEASURED},
        }
        print(json.dumps(told, indent=2))
        return
    if not at_once:
        print("\n\n".join(tokenizer.batch_decode(written, skip_special_tokens=True)))
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    came = f"; {format_bytes(stats.fetch_bytes / seconds)}/s came from disk" if stats.fetch_bytes else ""
    if stats.cache_onload_bytes:
        came += f"; {format_bytes(stats.cache_onload_bytes)} of keys and values came to the device"
    print(
        f"{counted(count, 'token')} in {seconds:.1f} s, the first after {first_seconds:.1f} s; of"
        f" {format_bytes(weight_bytes)} of weights at most {format_bytes(stats.device_peak_bytes)} were on the device"
        f" and {format_bytes(stats.host_peak_bytes)} in host memory{came}",
        file=sys.stderr,
    )


def _check(arguments: argparse.Namespace, model: "PreTrainedModel", tokens: torch.Tensor) -> None:
    """Raises InputError if the model cannot go on from these tokens, which have shape (prompts, length)."""
    from headrace.train.model import check_vocabulary

    if not model.can_generate():
        raise InputError(f"a {type(model).__name__} writes no text; give a causal language model")
    if not tokens.numel():
        raise InputError("the prompt has no tokens; give some text to go on from")
    check_vocabulary(model, int(tokens.max()))
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = tokens.shape[1] + arguments.max_new_tokens - 1  # the last new token goes through no layer
    if longest is None or length <= longest or model.config.is_encoder_decoder:
        return
    # Computed positions have no end, but those in a table do. Some tables have two extra rows.
    tables = {module for module in model.modules() if isinstance(module, nn.Embedding)} - {model.get_input_embeddings()}
    if any(longest <= table.num_embeddings <= longest + 2 for table in tables):
        raise InputError(
            f"{counted(tokens.shape[1], 'token')} of prompt and --max-new-tokens {arguments.max_new_tokens} are more"
            f" than the model's {longest} positions; shorten one"
        )


def _cache(model: "PreTrainedModel", handle: "Offloaded", tier: Literal["host", "disk"]) -> "Cache":
    """An empty cache for the model, which rests in this tier. Raises InputError if the model takes none."""
    from transformers import DynamicCache, EncoderDecoderCache

    from headrace.integrations.transformers import offload_cache

    if "past_key_values" not in inspect.signature(type(model).forward).parameters:
        raise InputError(f"a {type(model).__name__} keeps no keys and values; leave --cache-tier out")
    model.generation_config.cache_implementation = None  # two caches would be an error
    config = model.config.get_text_config(decoder=True)
    cache: Cache = DynamicCache(config=config)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache(config=config))
    return offload_cache(cache, handle, tier=tier)


# The fields of the stats that --json prints: bytes, and counts of experts.
_MEASURED = (
    "device_peak_bytes",
    "host_peak_bytes",
    "disk_bytes",
    "onload_bytes",
    "fetch_bytes",
    "expert_bytes",
    "expert_loads",
    "expert_uses",
    "expert_host_loads",
    "cache_peak_bytes",
    "cache_onload_bytes",
)


class _Clock:
    """A streamer for `generate`: it passes tokens on to `text`, and notes when the first new one came."""

    def __init__(self, text: "TextStreamer | None") -> None:
        self.began = self.first = time.perf_counter()
        self._text = text
        self._steps = 0  # calls of `put`; the first is the prompt

    def put(self, tokens: torch.Tensor) -> None:
        """Takes the prompt, or the next token of each text."""
        self._steps += 1
        if self._steps == 2:
            self.first = time.perf_counter()
        if self._text is not None:
            self._text.put(tokens)

    def end(self) -> None:
        """Called when there are no more tokens."""
        if self._text is not None:
            self._text.end()


def _up_to_end(tokens: list[int], ends: int | list[int] | None) -> list[int]:
    """The tokens up to and with the one that ends the text; all of them if none does."""
    last = {ends} if isinstance(ends, int) else set(ends or ())
    return next((tokens[:number] for number, token in enumerate(tokens, 1) if token in last), tokens)


def _in_template(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> str:
    if not tokenizer.chat_template:
        raise InputError("the tokenizer has no chat template; leave --chat out")
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates are programs, which may raise anything
        raise InputError(f"the chat template cannot be used: {error}; leave --chat out") from error
    return str(text)
