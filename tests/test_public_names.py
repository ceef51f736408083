"""Which names does millrace export? A change here is a change for users: it belongs in the changelog."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import millrace
import millrace.formulas
from millrace.cli.main import build_parser

PUBLIC_NAMES = [
    "ActivationOffloading",
    "ActivationStats",
    "BudgetError",
    "CheckpointError",
    "DiskError",
    "Hardware",
    "HardwareNotFound",
    "LayoutError",
    "MillraceError",
    "Offloaded",
    "Probe",
    "RankError",
    "RunPlan",
    "Saving",
    "StateError",
    "Stats",
    "WeightChangedError",
    "__version__",
    "experts",
    "from_pretrained",
    "load",
    "mark_not_offload",
    "offload",
    "offload_activations",
    "offload_pipeline",
    "plan",
    "probe",
    "save",
]

FORMULAS = [
    "ADAM_BYTES",
    "Compression",
    "MemoryTable",
    "Precision",
    "Row",
    "adam_seconds",
    "arithmetic_intensity",
    "batch_multiplier",
    "codec_cores",
    "compression_break_even",
    "efficiency",
    "fraction_step_seconds",
    "hideable_activation_share",
    "layer_activation_bytes",
    "layers_per_second",
    "memory_table",
    "overlap",
    "pipelined_seconds",
    "power_of_two_bytes",
    "prefetch_bytes",
    "prefetch_depth",
    "reserved_peak_blocks",
    "resident_fraction",
    "step_seconds",
    "tokens_to_hide",
    "transfer_seconds",
    "wear_steps",
    "zero_bytes",
]


def test_the_public_names_are_these_and_no_others():
    assert sorted(millrace.__all__) == sorted(PUBLIC_NAMES)


def test_the_formulas_are_these_and_no_others():
    assert sorted(millrace.formulas.__all__) == sorted(FORMULAS)
    assert [name for name in FORMULAS if not hasattr(millrace.formulas, name)] == []


def test_every_public_name_exists():
    missing = [name for name in PUBLIC_NAMES if not hasattr(millrace, name)]
    assert missing == []


GOLDEN = Path(__file__).parent / "golden" / "public_api.txt"
MODULES = ["", ".optim", ".formulas", ".checkpoint", ".compat", ".compat.megatron", ".integrations.transformers"]


# What functions return: nobody calls these classes.
MADE_BY_CALLS = [
    millrace.ActivationOffloading,
    millrace.ActivationStats,
    millrace.Offloaded,
    millrace.Probe,
    millrace.RunPlan,
    millrace.Saving,
    millrace.Stats,
]


def signature(callable_: Any) -> str:
    """Names, kinds and defaults; annotations may become more exact."""
    try:
        found = inspect.signature(callable_)
    except ValueError:  # of an exception's own
        return "(...)"
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values() if one.name != "self"]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def described(name: str, value: Any) -> Iterator[str]:
    """A line for a function; for a class of ours one for it, and one for each of its public members."""
    if not callable(value):
        yield name
        return
    yield name if value in MADE_BY_CALLS else f"{name}{signature(value)}"
    for member in sorted(dir(value)) if isinstance(value, type) else ():
        owner = next((one for one in value.__mro__ if member in vars(one)), object)
        if not member.startswith("_") and owner.__module__.startswith("millrace"):
            found = inspect.getattr_static(value, member)
            function = getattr(found, "__func__", found)
            yield f"{name}.{member}{signature(function) if inspect.isfunction(function) else ''}"


def public_api() -> Iterator[str]:
    for suffix in MODULES:
        module = importlib.import_module(f"millrace{suffix}")
        for name in sorted(module.__all__):
            yield from described(f"millrace{suffix}.{name}", getattr(module, name))
    for command, parser in build_parser().commands.items():
        for option in sorted(option for action in parser._actions for option in action.option_strings):
            yield f"millrace {command} {option}"


def test_signatures_are_those_that_were_released(request: pytest.FixtureRequest):
    text = "".join(f"{line}\n" for line in public_api())
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), (
        "belongs in the changelog; then pytest tests/test_public_names.py --update-golden"
    )


def test_pytorchs_compiler_is_not_loaded_before_it_is_needed():
    code = "import sys, millrace; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
