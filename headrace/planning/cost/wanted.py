"""Which methods does a user ask for, of all that a plan considers? By a name, by its parts, or by the host's share."""

from dataclasses import replace
from typing import Any

from headrace.planning.cost.work import Activations, Method, Place, Training

METHODS = {
    "none": "weights=device,state=device",
    "offload-optimizer": "weights=device,state=host",
    "offload-optimizer-to-disk": "weights=device,state=disk",
    "stream-weights": "weights=host",
    "stream-weights-from-disk": "weights=disk",
}
_PLACES = {place.value: place for place in Place}
_PARTS: dict[str, dict[str, Any]] = {  # parts of a method, by name and value
    "weights": _PLACES,
    "state": _PLACES,
    "update": {place.value: place for place in (Place.HOST, Place.DEVICE)},
    "cache": _PLACES,
    "activations": {kind.value.split()[0]: kind for kind in Activations},
}

Wanted = dict[str, Any]  # the parts of a method, and its `host_share`, that are asked for


def wanted(method: str | None, optimizer_fraction: float | None) -> Wanted:
    """What `headrace plan --method` and `--optimizer-fraction` ask for.

    Raises ValueError naming the choices, TypeError for a method that is not text.
    """
    asked: Wanted = {}
    if not isinstance(method, str | None):
        raise TypeError(f"method={method!r} is a {type(method).__name__}; give one of {', '.join(METHODS)}")
    words = [] if method is None else [METHODS.get(word, word) for word in method.split(",")]
    for item in ",".join(words).split(",") if words else ():
        name, _, value = item.partition("=")
        if value not in _PARTS.get(name, {}):
            parts = "; ".join(f"{part}={'|'.join(values)}" for part, values in _PARTS.items())
            raise ValueError(
                f"method={method!r}: {item!r} is none of {', '.join(METHODS)}, nor a part of one ({parts})"
            )
        part = _PARTS[name][value]
        if asked.setdefault(name, part) is not part:
            before = next(text for text, known in _PARTS[name].items() if known is asked[name])
            raise ValueError(f"method={method!r} has {name}={before} and {name}={value}; give one")
    if optimizer_fraction is not None:
        asked["host_share"] = optimizer_fraction
    return asked


def admitted(methods: list[Method], asked: Wanted, training: Training) -> list[Method]:
    """The `methods` that have all that is asked for. Raises ValueError if none has."""
    parts, share = {name: value for name, value in asked.items() if name in _PARTS}, asked.get("host_share")
    found = [
        replace(method, host_share=share or method.host_share)
        for method in methods
        if all(getattr(method, name) is value for name, value in parts.items()) and _divides(method, share)
    ]
    if not found:
        told = ", ".join(f"{name}={getattr(value, 'value', value)}" for name, value in asked.items())
        raise ValueError(
            f"no method has {told} with training={training.value!r}. Weights that are trained and do not rest on the"
            " device have their state off it, too, and all of it; disk needs a machine with one; cache=host and"
            " cache=disk need inference on one device, with weights off it. Leave out the part that breaks a rule"
        )
    return found


def _divides(method: Method, host_share: float | None) -> bool:
    """Whether the method can give the host that share of the optimizer."""
    on_device = method.state is Place.DEVICE
    if not host_share:
        return on_device or host_share is None
    return not on_device and (host_share == 1 or not (method.streamed or method.update is Place.DEVICE))
