"""How does the command line write text with a model that does not fit? The arguments of `millrace generate`."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.config import counted, format_bytes, parse_bytes
from millrace.errors import MillraceError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from millrace import Offloaded

EPILOG = """\
Sizes are bytes or text such as 8GiB. Without --prompt, the prompt is read from standard input.
The text goes to standard output as it comes, and what was measured to standard error.
"""


class GenerateInputError(MillraceError, ValueError):
    """What was given cannot be used."""


def add_generate_command(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "generate",
        help="write text with a model that is larger than memory",
        description="Write text with a causal language model that is larger than device memory, or than RAM.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a transformers model, tokenizer too")
    parser.add_argument("--prompt", metavar="TEXT", help="what the text begins with (default: standard input)")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="to write at most (default: 100)")
    parser.add_argument("--sample", action="store_true", help="draw tokens at random (default: the likeliest)")
    parser.add_argument("--temperature", type=float, metavar="X", help="of --sample (default: as the model says)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of --sample (default: 0)")
    memory = parser.add_argument_group("memory")
    memory.add_argument("--device", metavar="DEVICE", help="compute device (default: the accelerator, else cpu)")
    memory.add_argument("--device-memory", metavar="SIZE", help="for weights on the device (default: what is free)")
    memory.add_argument("--host-memory", metavar="SIZE", help="for weights in host RAM (default: what is free)")
    memory.add_argument("--disk", type=Path, metavar="DIR", help="for weights that fit in neither (default: none)")
    parser.set_defaults(run=run_generate)


def run_generate(arguments: argparse.Namespace) -> int:
    if arguments.max_new_tokens < 1:
        raise GenerateInputError(f"--max-new-tokens is {arguments.max_new_tokens}; give 1 or more")
    if arguments.temperature is not None and not (arguments.sample and arguments.temperature > 0):
        raise GenerateInputError(f"--temperature {arguments.temperature} needs --sample, and to be above 0")
    if not arguments.model.is_dir():
        raise GenerateInputError(f"model directory {arguments.model} does not exist; models are not downloaded")
    prompt = sys.stdin.read() if arguments.prompt is None else arguments.prompt
    if not prompt:
        raise GenerateInputError("the prompt is empty; give some text to go on from")
    try:
        # Here and not above: transformers takes seconds to import, and `millrace --help` does not need it.
        from transformers.utils.logging import disable_progress_bar

        from millrace.integrations.transformers import from_pretrained
        from millrace.runtime.device import resolve_device
    except ModuleNotFoundError as error:
        raise GenerateInputError(f"{error.name} is not installed; run: pip install 'millrace[transformers]'") from error
    disable_progress_bar()
    tokenizer = _tokenizer(arguments.model)
    try:
        settings = {
            "device": resolve_device(arguments.device),
            "device_memory": _size(arguments.device_memory, "--device-memory"),
            "host_memory": _size(arguments.host_memory, "--host-memory"),
            "disk": arguments.disk,
        }
    except ValueError as error:
        raise GenerateInputError(str(error)) from error
    model, handle = from_pretrained(arguments.model, trainable=False, **settings)
    with handle:
        _write(arguments, prompt, tokenizer, model, handle)
    return 0


def _write(
    arguments: argparse.Namespace,
    prompt: str,
    tokenizer: "PreTrainedTokenizerBase",
    model: "PreTrainedModel",
    handle: "Offloaded",
) -> None:
    """Writes the text as it comes, and then what was measured."""
    import torch
    from transformers import TextStreamer

    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    torch.manual_seed(arguments.seed)
    begin = time.perf_counter()
    written = model.generate(
        **inputs,
        max_new_tokens=arguments.max_new_tokens,
        do_sample=arguments.sample,
        temperature=arguments.temperature,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
    )
    seconds = time.perf_counter() - begin
    stats = handle.stats()
    tokens = written.shape[1] - inputs["input_ids"].shape[1]
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    from_disk = f"; {format_bytes(stats.fetch_bytes / seconds)}/s came from disk" if stats.fetch_bytes else ""
    print(
        f"{counted(tokens, 'token')} in {seconds:.1f} s; of {format_bytes(weight_bytes)} of weights at most"
        f" {format_bytes(stats.device_peak_bytes)} were on the device and {format_bytes(stats.host_peak_bytes)} in"
        f" host memory{from_disk}",
        file=sys.stderr,
    )


def _size(text: str | None, option: str) -> int | None:
    return None if text is None else parse_bytes(text, name=option)


def _tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds for a file that is missing or broken
        raise GenerateInputError(
            f"model directory {directory} has no tokenizer that transformers can load; save the model's tokenizer there"
        ) from error
    return tokenizer
