"""Which names does headrace export? A change here is a change for users: it belongs in the changelog."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.cli.main import build_parser

GOLDEN = Path(__file__).parent / "golden" / "public_api.txt"
MODULES = ["", ".optim", ".formulas", ".checkpoint", ".integrations.ranks", ".integrations.transformers"]
MODULES += [".compat", ".compat.megatron", ".compat.diffsynth", ".compat.tutorial"]


# What functions return: nobody calls these classes.
MADE_BY_CALLS = [
    headrace.ActivationOffloading,
    headrace.ActivationStats,
    headrace.Offloaded,
    headrace.Probe,
    headrace.RunPlan,
    headrace.Saving,
    headrace.Stats,
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
        if not member.startswith("_") and owner.__module__.startswith("headrace"):
            found = inspect.getattr_static(value, member)
            function = getattr(found, "__func__", found)
            yield f"{name}.{member}{signature(function) if inspect.isfunction(function) else ''}"


def public_api() -> Iterator[str]:
    for suffix in MODULES:
        module = importlib.import_module(f"headrace{suffix}")
        for name in sorted(module.__all__):
            yield from described(f"headrace{suffix}.{name}", getattr(module, name))
    for command, parser in build_parser().commands.items():
        for option in sorted(option for action in parser._actions for option in action.option_strings):
            yield f"headrace {command} {option}"


def test_signatures_are_those_that_were_released(request: pytest.FixtureRequest):
    text = "".join(f"{line}\n" for line in public_api())
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), (
        "belongs in the changelog; then pytest tests/test_public_names.py --update-golden"
    )


def test_a_name_that_is_none_is_an_attribute_error():
    for name in ("ofload", "__wrapped__", "_names"):
        with pytest.raises(AttributeError, match=f"module 'headrace' has no attribute '{name}'"):
            getattr(headrace, name)
    assert {"offload", "__version__"} <= set(dir(headrace))


def test_pytorchs_compiler_is_not_loaded_before_it_is_needed():
    code = "import sys, headrace; headrace.offload; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
