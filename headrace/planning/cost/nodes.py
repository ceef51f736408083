"""How many devices work together, on which nodes? From what a user says of it."""

from __future__ import annotations

from headrace.planning.cost.hardware import Hardware

__all__ = ["all_devices"]


def all_devices(machine: Hardware, devices: int | None, nodes: int, degree: int) -> int:
    """Of all nodes together: `devices` on each; by default `degree`, and the machine's own where there are several.

    Raises ValueError where there is none, the network is not known, or `degree` does not divide them.
    """
    for name, value in (("devices", devices), ("nodes", nodes)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}; give at least 1")
    if nodes > 1 and not machine.node_bytes_per_second:
        raise ValueError(
            f"nodes={nodes} but the network of {machine.name} is not known; give it: Hardware.changed(network='12GB/s')"
        )
    each = devices or (degree if nodes == 1 else machine.devices)
    if each * nodes % degree:
        on = f" on each of {nodes} nodes" if nodes > 1 else ""
        raise ValueError(f"devices={each}{on} cannot be cut into tensor times pipeline, which is {degree}")
    return each * nodes
