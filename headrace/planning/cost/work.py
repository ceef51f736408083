"""What is asked of a model, and how is it spread over devices and tiers? Settings of a step, and ways to hold it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from headrace.planning.cost.hardware import Hardware, share_of
from headrace.planning.cost.shape import ModelShape


class Training(Enum):
    """What is trained."""

    FULL = "full"
    ADAPTER = "adapter"
    NONE = "inference"


class Place(Enum):
    """A tier in which weights or state rest."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Activations(Enum):
    """What becomes of the activations that backward needs."""

    KEPT = "kept"
    RECOMPUTED = "recomputed"
    OFFLOADED = "offloaded"
    SPILLED = "spilled to disk"


class Overlap(Enum):
    """When blocks are updated."""

    NONE = "none"  # when backward is over; the next step waits for all updates
    FORWARD = "forward"  # when all gradients are known (exact clipping), beside the next forward
    BACKWARD = "backward"  # as soon as a block's gradient has arrived


@dataclass(frozen=True, kw_only=True)
class Work:
    """One optimizer step of one replica: `micro_batches` of `batch_size` sequences of `sequence_length` tokens.

    Bytes are per trained parameter. `state_bytes` is 8 for Adam (two moments in float32). `master_bytes` is 4 for a
    float32 copy of 16-bit weights, 2 for the 16 bits that these lack, and 0 for float32 weights and for 16-bit ones
    that are rounded stochastically. `gradient_bytes` is the size of a gradient and of a weight. `clipped`: gradients
    are clipped to a global norm, for which they are read once more.
    """

    training: Training = Training.FULL
    batch_size: int = 1
    sequence_length: int = 2048
    micro_batches: int = 1
    gradient_bytes: int = 2
    master_bytes: int = 4
    state_bytes: float = 8
    clipped: bool = False

    def __post_init__(self) -> None:
        if self.master_bytes not in (0, 2, 4):
            raise ValueError(f"master_bytes={self.master_bytes}; a master takes 0, 2 or 4 bytes")
        for name in ("batch_size", "sequence_length", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; give at least 1")

    @property
    def tokens(self) -> int:
        """Tokens in one micro-batch of one replica."""
        return self.batch_size * self.sequence_length

    @property
    def master_form(self) -> str:
        """The setting of `headrace.optim` that makes such masters."""
        return {4: "full", 2: "split"}.get(self.master_bytes, "none" if self.gradient_bytes == 2 else "split")

    @property
    def update_bytes(self) -> float:
        """DRAM traffic of the update per parameter: gradient read, weight written, master and state read and written.

        28 for Adam in mixed precision with a master in 32 bits, 26 with one of 16 bits beside the weight, 22 without.
        """
        times = 2 if self.master_bytes == 4 else 3  # without a whole master the weight is read too
        return times * self.gradient_bytes + 2 * (self.master_bytes + self.state_bytes)

    def update_crossing(self, *, streamed: bool) -> tuple[float, float]:
        """The bytes per parameter that an update by the device brings there, and those that it sends back.

        State, and the weight and its gradient where weights are `streamed`; otherwise these are there.
        """
        state, weight = self.master_bytes + self.state_bytes, self.gradient_bytes
        return (state + 2 * weight, state + weight) if streamed else (state, state)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """`data` replicas on `nodes` equal nodes: those of a node share one copy on the host, or ZeRO divides it."""

    data: int = 1
    zero_stage: int = 0
    nodes: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; give at least 1")
        if self.zero_stage not in (0, 1, 2):
            raise ValueError(
                f"zero_stage={self.zero_stage!r}; give 1 (state is divided), 2 (gradients, too), or 0: without a stage,"
                " replicas share one copy of offloaded weights on each node"
            )
        if self.data % self.nodes:
            raise ValueError(f"nodes={self.nodes} but {self.data} devices cannot be spread over so many evenly")

    @property
    def ranks(self) -> int:
        """Replicas on one node."""
        return self.data // self.nodes

    def divided(self, amount: float, stage: int) -> float:
        """A replica's own part of what ZeRO divides from `stage` on: 1 for master and state, 2 for gradients."""
        return amount / self.data if self.zero_stage >= stage else amount


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to hold a run: where weights, optimizer state, keys and values rest, and what becomes of activations.

    Weights that rest on the device stay there; others visit it block by block. If the optimizer's state is not on the
    device, the host updates `host_share` of the parameters; the device holds the state of the others, and updates them.
    With `update` DEVICE, the device updates all, and state comes and goes block by block.
    `together` micro-batches go through a block each time it is on the device (`forward_backward`). With a `cache` on
    the host or on disk, each layer's keys and values visit the device for each token (`offload_cache`).
    """

    weights: Place
    state: Place
    activations: Activations
    overlap: Overlap = Overlap.NONE
    host_share: float = 1.0
    together: int = 1
    update: Place = Place.HOST
    cache: Place = Place.DEVICE

    @property
    def device_share(self) -> float:
        """The share of the parameters that the device updates."""
        return 1.0 if self.state is Place.DEVICE else 1.0 - self.host_share

    @property
    def streamed(self) -> bool:
        return self.weights is not Place.DEVICE

    @property
    def crossing_share(self) -> float:
        """The share of the weights that crosses to the device: of weights that stay there, what the host updates."""
        return 1.0 if self.streamed else self.host_share if self.update is Place.HOST else 0.0

    @property
    def uses_disk(self) -> bool:
        return Place.DISK in (self.weights, self.state, self.cache) or self.activations is Activations.SPILLED

    def without_disk(self) -> Method:
        """The same method with host memory in place of the disk."""
        rests = (self.weights, self.state, self.cache)
        weights, state, cache = (Place.HOST if place is Place.DISK else place for place in rests)
        spilled = self.activations is Activations.SPILLED
        activations = Activations.OFFLOADED if spilled else self.activations
        return replace(self, weights=weights, state=state, cache=cache, activations=activations)

    def text(self, training: Training) -> str:
        """The method in words."""
        parts = []
        if self.streamed:
            parts.append("weights streamed from " + ("disk" if self.weights is Place.DISK else "host memory"))
        if training is not Training.NONE and self.state is not Place.DEVICE:
            share = "" if self.host_share == 1 else f"{self.host_share:.0%} of the "
            parts.append(f"{share}optimizer on the host" + (", its state on disk" if self.state is Place.DISK else ""))
            parts[-1] += ", updated by the device" if self.update is Place.DEVICE else ""
        if training is not Training.NONE and self.activations is not Activations.KEPT:
            parts.append(f"activations {self.activations.value}")
        if self.cache is not Place.DEVICE:
            parts.append("keys and values " + ("on disk" if self.cache is Place.DISK else "in host memory"))
        if self.together > 1:
            parts.append(f"{self.together} micro-batches together in each block (forward_backward)")
        return "; ".join(parts) or "everything on the device: no offloading"


@dataclass(frozen=True)
class Case:
    """What is done with which model, where, and how: all that a forecast is made of. `hardware` is a whole node."""

    shape: ModelShape
    work: Work
    spread: Spread
    method: Method
    hardware: Hardware

    @cached_property
    def share(self) -> Hardware:
        """One device's share of the node."""
        return share_of(self.hardware)

    @property
    def trains(self) -> bool:
        return self.work.training is not Training.NONE

    @property
    def changes(self) -> bool:
        """Whether weights on the host change in each step, so that they cross to the device at least once."""
        return self.work.training is Training.FULL and self.gradients_leave

    @property
    def gradients_leave(self) -> bool:
        """Whether gradients go to the host: they stay where the device updates weights that stay there."""
        stay = self.method.update is Place.DEVICE and not self.method.streamed
        return self.trains and self.method.state is not Place.DEVICE and not stay

    @property
    def shares(self) -> bool:
        """Whether the replicas of a node share a copy on the host."""
        on_host = self.method.streamed or (self.trains and self.method.state is not Place.DEVICE)
        return self.spread.data > 1 and not self.spread.zero_stage and on_host

    @property
    def sent_in(self) -> int:
        """The number of micro-batches after which gradients leave; above 1, the device adds them up until then."""
        return self.work.micro_batches if self.method.host_share < 1 else 1

    def grouped(self) -> Case:
        """The same case with micro-batches that go together as one, because they move as much as a single one."""
        work, together = self.work, self.method.together
        rounds = math.ceil(work.micro_batches / together)
        return replace(self, work=replace(work, batch_size=together * work.batch_size, micro_batches=rounds))
