"""Which methods does a user ask for, of all that a plan considers? By a name, by its parts, or by the host's share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from headrace.planning.cost.work import Activations, Method, Place, Training

__all__ = ["METHODS", "Wanted", "wanted"]

METHODS = {
    "none": "weights=device,state=device",
    "offload-optimizer": "weights=device,state=host",
    "offload-optimizer-to-disk": "weights=device,state=disk",
    "stream-weights": "weights=host",
    "stream-weights-from-disk": "weights=disk",
}
_PLACES = {place.value: place for place in Place}
_ACTIVATIONS = {kind.value.split()[0]: kind for kind in Activations}
_VALUES = {"weights": tuple(_PLACES), "state": tuple(_PLACES), "activations": tuple(_ACTIVATIONS)}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a method must have; None: whatever is fastest. `host_share`: of the optimizer, 0 to 1."""

    weights: Place | None = None
    state: Place | None = None
    activations: Activations | None = None
    host_share: float | None = None

    def of(self, methods: list[Method], training: Training) -> list[Method]:
        """Those of `methods` that are asked for. Raises ValueError when none is."""
        if self.host_share is not None and training is Training.NONE:
            raise ValueError("optimizer_fraction is of an update, which training='inference' has none of; leave it out")
        found = [
            method if self.host_share is None or not self.host_share else replace(method, host_share=self.host_share)
            for method in methods
            if self._admits(method)
        ]
        if not found:
            asked = [
                f"{name}={getattr(value, 'value', value)}" for name, value in vars(self).items() if value is not None
            ]
            raise ValueError(
                f"no method has {', '.join(asked)} with training={training.value!r}: weights that are trained and rest"
                " on the host are updated there, all of them, and only a machine with a disk can use one"
            )
        return found

    def _admits(self, method: Method) -> bool:
        parts = ((self.weights, method.weights), (self.state, method.state), (self.activations, method.activations))
        if any(asked is not None and asked is not own for asked, own in parts):
            return False
        if self.host_share is None:
            return True
        on_device = method.state is Place.DEVICE
        return on_device if self.host_share == 0 else not on_device and (self.host_share == 1 or not method.streamed)


def wanted(method: str | None, optimizer_fraction: float | None) -> Wanted:
    """What `headrace plan --method` and `--optimizer-fraction` ask for. Raises ValueError naming what there is."""
    if optimizer_fraction is not None and not (0 <= optimizer_fraction <= 1 and math.isfinite(optimizer_fraction)):
        raise ValueError(f"optimizer_fraction={optimizer_fraction}; give the host's share, from 0 to 1")
    given = [] if method is None else ",".join(METHODS.get(word, word) for word in method.split(",")).split(",")
    asked: dict[str, str] = {}
    for item in given:
        name, _, value = item.partition("=")
        if value not in _VALUES.get(name, {}):
            parts = "; ".join(f"{part}={'|'.join(values)}" for part, values in _VALUES.items())
            raise ValueError(
                f"method={method!r}: {item!r} is none of {', '.join(METHODS)}, nor a part of one ({parts})"
            )
        if asked.setdefault(name, value) != value:
            raise ValueError(f"method={method!r} has {name}={asked[name]} and {name}={value}; give one")
    return Wanted(
        weights=_PLACES.get(asked.get("weights", "")),
        state=_PLACES.get(asked.get("state", "")),
        activations=_ACTIVATIONS.get(asked.get("activations", "")),
        host_share=optimizer_fraction,
    )
