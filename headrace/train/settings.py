"""How is a setting of a training run declared? Once, with all that the command line and a resumed run must know."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Declared", "declared", "flag", "setting"]


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What is known of a setting: `decides` says whether another value may lead to another result.

    Of model, device and share of the state there `headrace.train.resume.Terms` has what they come to.
    """

    name: str
    default: Any
    help: str
    group: str
    kind: Callable[[str], Any]
    metavar: str | None
    choices: tuple[str, ...] | None
    several: str | None  # nargs of argparse
    decides: bool


def setting(
    default: Any,
    text: str,
    *,
    group: str,
    kind: Callable[[str], Any] = str,
    metavar: str | None = None,
    choices: tuple[str, ...] | None = None,
    several: str | None = None,
    decides: bool = True,
) -> Any:
    """A field of a dataclass of settings. Its help names the default, where there is one to name."""
    named = default is not None and default != () and not isinstance(default, bool)
    shown = " ".join(default) if isinstance(default, tuple) else default
    about = {
        "help": f"{text} (default: {shown})" if named else text,
        "group": group,
        "kind": kind,
        "metavar": metavar,
        "choices": choices,
        "several": several,
        "decides": decides,
    }
    return dataclasses.field(default=default, metadata=about)


def declared(settings: type) -> list[Declared]:
    """The settings of a dataclass, in its order."""
    return [
        Declared(name=field.name, default=field.default, **field.metadata) for field in dataclasses.fields(settings)
    ]


def flag(name: str) -> str:
    """The name of a setting on the command line."""
    return "--" + name.replace("_", "-")
