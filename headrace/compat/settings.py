"""What do the settings of other systems have in common? They may be changed, and no setting can be misspelt."""

import dataclasses
import difflib
from typing import Any

__all__ = ["Settings"]


class Settings:
    """Base of dataclasses whose fields may be set at any time; setting anything else raises AttributeError."""

    def __setattr__(self, name: str, value: Any) -> None:
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "headrace has no such setting"
            raise AttributeError(f"{type(self).__name__} has no {name!r}; {hint}")
        super().__setattr__(name, value)
