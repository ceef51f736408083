"""Are the other ranks told of the error that ends a process, whoever else wants to know of it?"""

import sys
from typing import Any

import pytest

from headrace.runtime import node


def test_an_uncaught_error_is_told_once_where_others_wrap_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.distributed does, between two models that are offloaded."""
    reported: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: reported.append(error))
    node._watch_uncaught()
    ours = sys.excepthook

    def wrapper(*about: Any) -> None:
        ours(*about)

    monkeypatch.setattr(sys, "excepthook", wrapper)
    node._watch_uncaught()
    node._watch_uncaught()
    error = ValueError("the last one")
    sys.excepthook(ValueError, error, None)
    assert reported == [error]
