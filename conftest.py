"""What do all tests share? The emulated accelerator's fixture, processes that start fast, and no network."""

import gc
import os

import hypothesis  # noqa: F401  # before anything is frozen: it looks for who holds the random numbers it is given
import pytest

pytest.register_assert_rewrite("tests.support")
pytest_plugins = ["emulator.fixtures", "tests.support.nursery"]

# Tests build their models from small configs: nothing may be looked up on the Hugging Face hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# Each xdist worker and each subprocess would otherwise start a thread for every core.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew instead of comparing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Registers the emulated accelerator before the first test when any test may use it.

    PyTorch's autograd engine counts the devices at the first backward of the process: none may be added later. So the
    default device of such a session is the emulated one; a test that means the CPU names it.
    """
    if any({"device", "emu_device"} & set(getattr(item, "fixturenames", ())) for item in items):
        import emulator.emu  # noqa: F401


def pytest_collection_finish() -> None:
    """What is imported by now is no garbage: each of the many collections would look through all of it again."""
    gc.collect()
    gc.freeze()
