"""How many devices work together, on which nodes, and how do they reach each other? From what a user says of it."""

from __future__ import annotations

from headrace.planning.cost.hardware import FABRIC, NO_PEERS, PEERS, Hardware

__all__ = ["all_devices", "with_peers"]


def with_peers(machine: Hardware, peer: str | None, rate: float | None) -> Hardware:
    """The machine with devices that reach each other by `peer` (None: as they do); `rate`: whether a speed was given.

    Raises ValueError for a way that does not exist, or whose speed is not known.
    """
    if peer is None:
        if rate is not None and machine.peer == NO_PEERS:
            raise ValueError(
                f"peer_bytes_per_second={rate:g} but devices of {machine.name} do not reach each other; give peer too,"
                f" one of {', '.join(PEERS)}"
            )
        return machine
    if peer not in PEERS:
        raise ValueError(f"peer={peer!r}; give one of {', '.join(PEERS)}")
    if rate is not None or peer in (machine.peer, NO_PEERS):
        return machine.changed(peer=peer)
    if peer == FABRIC:
        raise ValueError(f"peer={peer!r} of which speed? {machine.name} has none; give peer_bytes_per_second too")
    return machine.changed(peer=peer, collective_bytes_per_second=machine.onload_bytes_per_second)


def all_devices(machine: Hardware, devices: int | None, nodes: int, degree: int) -> int:
    """Of all nodes together: `devices` on each; by default `degree`, and the machine's own where there are several.

    Raises ValueError where there is none, the network is not known, or `degree` does not divide them.
    """
    for name, value in (("devices", devices), ("nodes", nodes)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}; give at least 1")
    if nodes > 1 and not machine.node_bytes_per_second:
        raise ValueError(f"nodes={nodes} but the network of {machine.name} is not known; give network_bytes_per_second")
    each = devices or (degree if nodes == 1 else machine.devices)
    if each * nodes % degree:
        on = f" on each of {nodes} nodes" if nodes > 1 else ""
        raise ValueError(f"devices={each}{on} cannot be cut into tensor times pipeline, which is {degree}")
    return each * nodes
