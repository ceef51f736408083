"""What must be done once, before the first test of activations?"""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any({"compute_device", "emu_device"} & set(getattr(item, "fixturenames", ())) for item in items):
        # PyTorch counts devices at the first backward of the process: the emulated one must be there by then.
        import emulator.emu  # noqa: F401
