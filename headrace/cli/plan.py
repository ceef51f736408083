"""How does the command line plan a run? The arguments of `headrace plan`; several machines are shown side by side."""

import argparse
import contextlib
import inspect
import json
from pathlib import Path
from typing import Any

from headrace.ahead import machine_of, plan
from headrace.cli import InputError, about_input
from headrace.planning.cost import DRIVES, METHODS, PEERS, RunPlan, compare_text

EPILOG = """\
MODEL is a transformers config.json, a directory that holds one, or the name of a model whose config transformers
can load. Memory is bytes or text such as 24GiB. The model itself is never loaded.
Rates are what is reached, not what is sold. What headrace cannot run yet (some ZeRO stages) is simulated, and the plan
says so. docs/many_devices.md has examples.
In the table of lanes (compute, copies each way, drive, update), the floor is the least time that what passes through a
lane can take; "busy" is what the plan gives it.
Exit codes: 0 planned and fits, 1 does not fit (the plan says what is missing), 2 the input cannot be used.
"""
_HUB_SECONDS = 5.0
_TRAININGS = {"lora": "adapter", "qlora": "adapter"}  # other names of trainings
_QLORA_BITS = 4.5  # of NF4, with its scales


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Plan a run: the strategy, bytes by tier, the step's time and why, and what would help most."
    parser.epilog = EPILOG
    parser.add_argument("model", metavar="MODEL", help="a config.json, its directory, or the name of a model")
    parser.add_argument(
        "--hardware",
        nargs="+",
        metavar="NAME",
        help='of the catalogue, such as 4090, or "measured"; several are compared (default: measured, else 4090)',
    )
    for option, metavar, kind, default, text in (
        ("training", "KIND", str, "full", "full, lora, qlora or inference (default: full)"),
        ("overlap", "KIND", str, "none", "of the update: none, forward, backward (default: none)"),
        ("state-dtype", "KIND", str, "float32", "of the moments: float32, bfloat16, 8bit (default: float32)"),
        ("master-form", "KIND", str, "split", "of bfloat16 weights' masters: split, full, none (default: split)"),
        ("batch-size", "N", int, 1, "sequences in a micro-batch (default: 1)"),
        ("sequence-length", "N", int, 2048, "tokens in a sequence (default: 2048)"),
        ("micro-batches", "N", int, 1, "micro-batches in a step (default: 1)"),
        ("devices", "N", int, None, "devices of each node (default: 1, all with several nodes)"),
        ("nodes", "N", int, 1, "nodes, each with its own copy of the model in host memory (default: 1)"),
        ("zero-stage", "N", int, 0, "ZeRO stage of the replicas, 0 to 2 (default: 0)"),
        ("optimizer-fraction", "N", float, None, "the host's share of the optimizer's state and update, 0 to 1"),
        ("expert-hit-rate", "N", float, None, "of the experts that decoding wants, the share on the device, 0 to 1"),
        ("adapter-rank", "N", int, None, "rank of LoRA adapters (default: 16)"),
        ("weight-bits", "N", float, None, "bits of a stored weight of the layers, such as 4.5"),
        ("device-memory", "SIZE", str, None, "of each device, instead of the machine's"),
        ("host-memory", "SIZE", str, None, "of the node, instead of the machine's"),
        ("disk", "SIZE", str, None, "of the node, instead of the machine's"),
    ):
        parser.add_argument(f"--{option}", metavar=metavar, type=kind, default=default, help=text)
    parser.add_argument(
        "--method",
        metavar="NAME",
        help=f"instead of the fastest: {', '.join(METHODS)}, or parts, separated by commas:"
        " weights=device|host|disk, state=device|host|disk, update=host|device,"
        " activations=kept|recomputed|offloaded|spilled; in inference, cache=device|host|disk (keys and values)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIGURE=VALUE",
        help="another figure of the machine; may be given several times: link=25GB/s (each way), disk=7GB/s (reads and"
        " writes), host=60GB/s (its memory), update=50GB/s (the part that updates reach), device=900GB/s (its memory),"
        " flops=150TFLOPS (products of 16 bits), peers=20GB/s (of each device to others of its node), network=10GB/s"
        f" (of the node), peer={'|'.join(PEERS)}, drive={'|'.join(DRIVES)} or 2xhdd",
    )
    parser.add_argument("--no-disk", action="store_true", help="nothing may rest on disk")
    parser.add_argument("--json", action="store_true", help="all numbers, as JSON (docs/json.md)")


def run(arguments: argparse.Namespace) -> int:
    model = _config(arguments.model)
    plans = [(name or "default", _planned(model, name, arguments)) for name in arguments.hardware or [None]]
    if arguments.json:
        made = [one.to_dict() for _, one in plans]
        print(json.dumps(made[0] if len(made) == 1 else made, indent=2))
    elif len(plans) == 1:
        print(plans[0][1].to_text(), end="")
    else:
        print(compare_text(plans), end="")
    return 0 if all(one.fits for _, one in plans) else 1


def _planned(model: Any, hardware: str | None, arguments: argparse.Namespace) -> RunPlan:
    given = {name: value for name, value in vars(arguments).items() if name in inspect.signature(plan).parameters}
    given["training"] = _TRAININGS.get(arguments.training, arguments.training)
    if arguments.training == "qlora" and arguments.weight_bits is None:
        given["weight_bits"] = _QLORA_BITS
    given["disk"] = False if arguments.no_disk else arguments.disk
    with about_input(ValueError):
        given["hardware"] = machine_of(hardware).changed(**_figures(arguments.set)) if arguments.set else hardware
        return plan(**{**given, "model": model})


def _figures(given: list[str]) -> dict[str, str]:
    """The figures given with --set, by name."""
    figures: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise InputError(f"--set {each}: give FIGURE=VALUE, such as link=25GB/s")
        figures[name] = value
    return figures


def _config(model: str) -> Any:
    """The path itself, or the config that transformers has under that name."""
    try:
        if Path(model).exists() or model.endswith(".json"):
            return model
    except OSError as error:
        raise InputError(f"MODEL {model[:80]!r}: {error.strerror}; give a config.json or a model's name") from error
    if model.startswith(("/", ".", "~")) or model.endswith("/"):
        raise InputError(f"there is no directory or file {model!r}; give a model's directory or its config.json")
    try:
        from huggingface_hub import HfApi
        from transformers import AutoConfig  # imported here because it takes seconds
    except ModuleNotFoundError as error:
        raise InputError(
            f"there is no file {model!r}; for names of models run: pip install 'transformers>=5'"
        ) from error
    with contextlib.suppress(OSError, ValueError):
        return AutoConfig.from_pretrained(model, trust_remote_code=False, local_files_only=True)
    try:
        HfApi().model_info(model, timeout=_HUB_SECONDS)  # transformers itself would retry many times
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # several libraries raise here
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"there is no directory or file {model!r}, and no config of that name on the Hugging Face hub: {reason}"
        ) from error
