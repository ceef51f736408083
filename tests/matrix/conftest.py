"""What must be done once, before the first test of the matrix?"""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any("compute_device" in getattr(item, "fixturenames", ()) for item in items):
        return
    # PyTorch counts devices at the first backward of the process: the emulated one must be there by then.
    import torch._dynamo  # noqa: F401  # every optimizer imports it

    import emulator.emu  # noqa: F401
