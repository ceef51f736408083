"""How does a test reach an object inside of the package, without the path through private attributes?"""

from typing import TypeVar

import pytest

T = TypeVar("T")


def instances(monkeypatch: pytest.MonkeyPatch, kind: type[T]) -> list[T]:
    """Those of a class that are made from now on."""
    found: list[T] = []
    begin = kind.__init__

    def init(self: T, *args: object, **named: object) -> None:
        begin(self, *args, **named)
        found.append(self)

    monkeypatch.setattr(kind, "__init__", init)
    return found
