"""What must be done once, before the first test with quantised weights?"""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any({"compute_device", "emu_device"} & set(getattr(item, "fixturenames", ())) for item in items):
        # PyTorch counts devices at the first backward of the process: the emulated one must be there by then.
        import torch._dynamo  # noqa: F401  # every optimizer imports it

        import emulator.emu  # noqa: F401
