"""Which messages of other libraries does the command line leave out? Pointless ones, caused by importing transformers.

transformers imports torchao, where it is installed, with the first model class. Without an accelerator, torchao warns
that its kernels cannot be loaded, and PyTorch warns of how torchao registers its enums.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

_LOGGERS = ("torchao", "torch.utils._pytree")


def _says_something(record: logging.LogRecord) -> bool:
    import torch  # imported already, if one of these loggers logs anything

    if record.name == "torchao":
        return not str(record.msg).startswith("Failed to load ") or torch.accelerator.is_available()
    about = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not (isinstance(about, type) and about.__module__.partition(".")[0] == "torchao")


@contextmanager
def without_noise() -> Iterator[None]:
    """A context that leaves out these messages alone. It is for programs: a library does not decide what is logged."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    keep = partial(_says_something)  # a new filter for each context, because one inside another may end first
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)
