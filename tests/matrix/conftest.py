"""What must be done once, before the first test of the matrix?"""

import gc

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any("compute_device" in getattr(item, "fixturenames", ()) for item in items):
        return
    # PyTorch counts devices at the first backward of the process: the emulated one must be there by then.
    import hypothesis  # noqa: F401  # pytest does for a failure, and a plugin then looks for referrers
    import torch._dynamo  # noqa: F401  # every optimizer imports it

    import emulator.emu  # noqa: F401

    gc.freeze()  # the tests collect garbage, which takes half a second over all that is imported
