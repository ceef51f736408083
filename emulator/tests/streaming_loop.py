"""What does a right streaming loop look like, and which of its ordering edges can be left out? One at a time, by name.

Weights wait in pinned memory and arrive in two slots, one layer ahead of compute. Each layer's gradient leaves through
two pinned staging buffers; the host adds it up and updates the weight. At the end the first layer is on its way again.
"""

from enum import Enum, auto

import torch
from torch import Tensor

WIDTH, LAYERS = 8, 4


class Bug(Enum):
    LANE_DOES_NOT_WAIT_FOR_ALLOCATION = auto()
    EVENT_RECORDED_BEFORE_ALLOCATION = auto()
    COMPUTE_DOES_NOT_WAIT_FOR_ARRIVAL = auto()
    COMPUTE_WAITS_FOR_WRONG_EVENT = auto()
    SLOT_REUSED_BEFORE_LAST_USE = auto()
    COPY_OUT_DOES_NOT_WAIT_FOR_PRODUCER = auto()
    CURRENT_STREAM_READ_INSIDE_WITH = auto()
    HOST_READS_BEFORE_COPY_OUT_IS_DONE = auto()
    STAGING_REUSED_BEFORE_HOST_HAS_READ = auto()
    HOST_WRITES_SOURCE_IN_FLIGHT = auto()
    STAGING_REFILLED_IN_FLIGHT = auto()
    GRADIENT_FREED_BEFORE_COPY_OUT_IS_DONE = auto()
    GRADIENT_ZEROED_BEFORE_COPY_OUT_IS_DONE = auto()
    SLOT_EVICTED_WHILE_ARRIVING = auto()
    SLOT_FREED_BY_ANOTHER_LANE = auto()
    TWO_LANES_FILL_ONE_BUFFER = auto()


def initial_weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(LAYERS)]


def expected_weights() -> list[Tensor]:
    hidden, updated = torch.ones(WIDTH, WIDTH), []
    for weight in initial_weights():
        hidden = torch.tanh(hidden @ weight)
        updated.append(weight.add(hidden.t() @ hidden))
    return updated


class StreamingLoop:
    def __init__(self, bug: Bug | None = None) -> None:
        self.bug = bug
        self.weights = [weight.pin_memory() for weight in initial_weights()]
        self.weight_staging = torch.empty(WIDTH, WIDTH).pin_memory()
        self.gradient_staging = [torch.empty(WIDTH, WIDTH).pin_memory() for _ in range(2)]
        self.compute = torch.accelerator.current_stream()
        self.onload, self.offload, self.other = (torch.Stream("emu") for _ in range(3))
        self.used: list[torch.Event | None] = [None, None]  # the last use of each slot
        self.arrived: dict[int, torch.Event] = {}
        self.sent: dict[int, tuple[Tensor | None, torch.Event]] = {}
        self.allocate_slots()

    def allocate_slots(self) -> None:
        too_early = self.compute.record_event()
        lane = self.onload if self.bug is Bug.SLOT_FREED_BY_ANOTHER_LANE else self.compute
        with lane:
            self.slots = [torch.empty(WIDTH, WIDTH, device="emu") for _ in range(2)]
        if self.bug is Bug.EVENT_RECORDED_BEFORE_ALLOCATION:
            self.onload.wait_event(too_early)
        elif self.bug is not Bug.LANE_DOES_NOT_WAIT_FOR_ALLOCATION:
            self.onload.wait_event(self.compute.record_event())

    def fetch(self, layer: int) -> None:
        source = self.weights[layer]
        if self.bug is Bug.STAGING_REFILLED_IN_FLIGHT:
            source = self.weight_staging.copy_(source)
        last_use = self.used[layer % 2]
        if last_use and self.bug is not Bug.SLOT_REUSED_BEFORE_LAST_USE:
            self.onload.wait_event(last_use)
        with self.onload:
            self.slots[layer % 2].copy_(source, non_blocking=True)
        self.arrived[layer] = self.onload.record_event()
        if self.bug is Bug.HOST_WRITES_SOURCE_IN_FLIGHT:
            self.weights[layer].mul_(1)

    def forward(self, layer: int, hidden: Tensor) -> Tensor:
        if self.bug is Bug.COMPUTE_WAITS_FOR_WRONG_EVENT:
            if layer:
                self.compute.wait_event(self.arrived[layer - 1])
        elif self.bug is not Bug.COMPUTE_DOES_NOT_WAIT_FOR_ARRIVAL:
            self.compute.wait_event(self.arrived[layer])
        hidden = torch.tanh(hidden @ self.slots[layer % 2])
        self.used[layer % 2] = self.compute.record_event()
        return hidden

    def send_gradient(self, layer: int, gradient: Tensor) -> None:
        staging = self.staging_of(layer)
        if self.bug is Bug.CURRENT_STREAM_READ_INSIDE_WITH:
            with self.offload:
                self.offload.wait_stream(torch.accelerator.current_stream())
        elif self.bug is not Bug.COPY_OUT_DOES_NOT_WAIT_FOR_PRODUCER:
            self.offload.wait_stream(self.compute)
        with self.offload:
            staging.copy_(gradient, non_blocking=True)
        done = self.offload.record_event()
        if self.bug is Bug.TWO_LANES_FILL_ONE_BUFFER:
            self.other.wait_stream(self.compute)
            with self.other:
                staging.copy_(gradient, non_blocking=True)
        if self.bug is Bug.GRADIENT_ZEROED_BEFORE_COPY_OUT_IS_DONE:
            gradient.zero_()
        kept = None if self.bug is Bug.GRADIENT_FREED_BEFORE_COPY_OUT_IS_DONE else gradient
        self.sent[layer] = (kept, done)

    def staging_of(self, layer: int) -> Tensor:
        return self.gradient_staging[0 if self.bug is Bug.STAGING_REUSED_BEFORE_HOST_HAS_READ else layer % 2]

    def update(self, layer: int) -> None:
        _, done = self.sent.pop(layer)
        if self.bug is not Bug.HOST_READS_BEFORE_COPY_OUT_IS_DONE:
            done.synchronize()
        self.weights[layer].add_(self.staging_of(layer))

    def run(self) -> None:
        hidden = torch.ones(WIDTH, WIDTH, device="emu")
        self.fetch(0)
        for layer in range(LAYERS):
            self.fetch((layer + 1) % LAYERS)
            hidden = self.forward(layer, hidden)
            self.send_gradient(layer, hidden.t() @ hidden)
            if layer:
                self.update(layer - 1)
        self.evict()
        self.update(LAYERS - 1)
        torch.accelerator.synchronize()

    def evict(self) -> None:
        if self.bug is not Bug.SLOT_EVICTED_WHILE_ARRIVING:
            self.compute.wait_event(self.arrived[0])
        self.slots.clear()
