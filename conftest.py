"""What do all tests share? The emulated accelerator's fixture, processes that start fast, no network, and two markers.

`make test` leaves out what is marked `extended`; `make test-all` runs everything. A test marked `core` stays in
`make test` with some of its parameters, and is extended with all others:

    @pytest.mark.core(world_size=2, compute_device="cpu")
    @pytest.mark.core(kind=["dense", "experts"])       # one of several

A value is a parameter's, its `name`, or its `__name__`; of `compute_device`, "cpu" or "emu". A marker of a file
(`pytestmark`) concerns those of its tests that have a parameter of that name; a test's own goes before it. A test of
the package with the fixture `emu_device` is core under its first schedule only. In the folders of `_OF_WHOLE_MODELS`, a
test with `compute_device` is core on "emu" only, which notices more than the CPU.
"""

import contextlib
import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

with contextlib.suppress(ImportError):  # tests/gpu does without
    import hypothesis  # before anything is frozen: it looks for who holds the random numbers it is given

    hypothesis.settings.register_profile("headrace", deadline=None)  # the machine may be busy
    hypothesis.settings.load_profile("headrace")

pytest.register_assert_rewrite("tests.support")
pytest_plugins = ["emulator.fixtures", "tests.support.kernel_accesses", "tests.support.nursery"]

# Tests build their models from small configs: nothing may be looked up on the Hugging Face hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# What a shell starts in the background ignores Ctrl-C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Each xdist worker and each subprocess would otherwise start a thread for every core.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew instead of comparing")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is extended by its parameters, and registers the emulated accelerator."""
    left = set()
    for item in items:
        if _is_core(item):
            left.add(_function(item))
        else:
            item.add_marker("extended")
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:  # where all of a test's parameters are here
        for item in items:
            if _own_core(item) and _function(item) not in left:
                raise pytest.UsageError(f"{_function(item)} has no parameters of those that its core marker wants")
    _register_emulator(items)


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _own_core(item: pytest.Item) -> list[pytest.Mark]:
    return [marker for marker in item.own_markers if marker.name == "core"]


def _is_core(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return True
    if callspec.indices.get("emu_device", 0) and not item.path.is_relative_to(_EMULATOR):
        return False
    own = _own_core(item)
    if len(own) > 1:
        raise pytest.UsageError(f"{item.nodeid} is marked core twice; give one marker all that is wanted")
    if own and (unknown := own[0].kwargs.keys() - callspec.params.keys()):
        raise pytest.UsageError(f"{item.nodeid} is marked core by {min(unknown)!r}, which is none of its parameters")
    wanted: dict[str, Any] = {}
    for marker in item.iter_markers("core"):  # the closest first
        if marker.args or not marker.kwargs:
            raise pytest.UsageError(f"{item.nodeid}: core wants parameters by name, as in core(world_size=2)")
        wanted = marker.kwargs | wanted
    if item.path.parent.name in _OF_WHOLE_MODELS:
        wanted.setdefault("compute_device", "emu")
    return all(_is_one_of(callspec, name, values) for name, values in wanted.items() if name in callspec.params)


def _is_one_of(callspec: Any, name: str, values: Any) -> bool:
    if name == "compute_device":  # the CPU comes first, then the emulated device under one schedule or several
        return bool(callspec.indices[name] == {"cpu": 0, "emu": 1}[values])
    values = values if isinstance(values, list) else [values]
    parameter = callspec.params[name]
    named = [getattr(parameter, one) for one in ("name", "__name__") if hasattr(parameter, one)]
    return any(type(one) is type(value) and one == value for one in (parameter, *named) for value in values)


_EMULATOR = Path(__file__).parent / "emulator"
_OF_WHOLE_MODELS = ("activations", "compat", "integrations", "matrix", "packed", "quantised", "weights")


def _register_emulator(items: list[pytest.Item]) -> None:
    """Registers the emulated accelerator before the first test when any test may use it.

    PyTorch's autograd engine counts the devices at the first backward of the process: none may be added later. So the
    default device of such a session is the emulated one; a test that means the CPU names it.
    """
    if any({"device", "emu_device"} & set(getattr(item, "fixturenames", ())) for item in items):
        import emulator.emu  # noqa: F401


def pytest_collection_finish() -> None:
    _keep_what_there_is()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    result = yield  # the test's fixtures are gone by then: frozen, they would never be collected
    if nextitem is None or nextitem.path != item.path:
        _keep_what_there_is()
    return result


def _keep_what_there_is() -> None:
    """What is imported by now is no garbage: each of the many collections would look through all of it again."""
    gc.collect()
    gc.freeze()
