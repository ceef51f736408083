"""Which messages of other libraries say nothing about a user's run? Those that importing transformers brings about.

transformers imports torchao, where it is installed, with its first model class, whichever class that is. torchao then
warns that its kernels for GPUs cannot be loaded, and PyTorch warns of the way in which torchao registers its enums.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["without_noise"]

_LOGGERS = ("torchao", "torch.utils._pytree")


def _says_something(record: logging.LogRecord) -> bool:
    if record.name == "torchao":
        return not record.getMessage().startswith("Failed to load ") or torch.accelerator.is_available()
    about = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not (isinstance(about, type) and about.__module__.partition(".")[0] == "torchao")


@contextmanager
def without_noise() -> Iterator[None]:
    """Leaves these messages out, and no others. For programs: what a library may say is up to the program."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(_says_something)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_says_something)
