"""How far ahead is a layer loaded, and who loads it? A simulation says how far; a manager loads, in the background."""

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from headrace.compat.tutorial.managers import NVMeOffloadManager, UnifiedOffloadManager
from headrace.errors import StateError
from headrace.formulas import prefetch_depth
from headrace.runtime.threads import OneThread

__all__ = ["LayerPrefetcher", "compute_optimal_prefetch"]


class LayerPrefetcher:
    """Gives tensors by name, and begins to load the `prefetch_depth` tensors that follow in `layer_order`. After the
    last one come the first ones, for the next pass. Calls may come in any order.

    `manager` loads them. Without one, a subclass defines `_load_layer(name)`, which is called on a thread of its own
    for tensors that are loaded ahead.
    """

    def __init__(
        self,
        layer_order: list[str],
        prefetch_depth: int = 2,
        *,
        manager: NVMeOffloadManager | UnifiedOffloadManager | None = None,
    ) -> None:
        if prefetch_depth < 0 or len(set(layer_order)) != len(layer_order):
            raise ValueError(
                f"prefetch_depth={prefetch_depth} and {len(layer_order)} layers ({len(set(layer_order))} names); give 0"
                " or more, and each name once"
            )
        self.layer_order = layer_order
        self.prefetch_depth = prefetch_depth
        self.current_idx = 0
        self.prefetched: dict[str, Future[torch.Tensor] | None] = {}  # None: the manager loads it
        self._places = {name: index for index, name in enumerate(layer_order)}
        self._manager = manager
        self._thread: OneThread | None = None

    def get_layer(self, name: str) -> torch.Tensor:
        """The layer's tensor, which has arrived. Raises what its loading raised, and KeyError for an unknown name."""
        if name not in self._places:
            raise KeyError(f"{name!r} is none of the {len(self.layer_order)} names of layer_order")
        loading = self.prefetched.pop(name, None)
        tensor = self._load_layer(name) if loading is None else loading.result()
        self.current_idx = self._places[name]
        self._prefetch_upcoming()
        return tensor

    def _prefetch_upcoming(self) -> None:
        count = len(self.layer_order)
        following = [self.layer_order[(self.current_idx + i + 1) % count] for i in range(self.prefetch_depth)]
        wanted = [name for name in following if name != self.layer_order[self.current_idx]]
        for name in [name for name in self.prefetched if name not in wanted]:
            del self.prefetched[name]  # loaded ahead for an order that was not followed
        for name in wanted:
            if name not in self.prefetched:
                self.prefetched[name] = self._async_load_layer(name)

    def _load_layer(self, name: str) -> torch.Tensor:
        if self._manager is None:
            raise StateError(f"nothing loads {name!r}: give LayerPrefetcher(manager=...), or define _load_layer")
        return self._manager.tiers.get(name)

    def _async_load_layer(self, name: str) -> "Future[torch.Tensor] | None":
        if self._manager is not None:
            self._manager.tiers.prefetch([name])
            return None
        self._thread = self._thread or OneThread("headrace-layers")
        return self._thread.submit(self._load_layer, name)


def compute_optimal_prefetch(layer_sizes: Sequence[int], bandwidth: float, compute_times: Sequence[float]) -> list[int]:
    """How many layers ahead each layer must be requested to arrive in time, pass after pass over one link.

    Sizes are in bytes, `bandwidth` in bytes per second, times in seconds. Each load begins as late as it can: it ends
    before its layer is due, and leaves time for the loads behind it. If the link is slower than compute on the whole,
    one layer ahead keeps it busy, and no depth helps (`headrace.formulas.prefetch_depth`): then it is 1 for each layer.
    """
    count = len(layer_sizes)
    if count != len(compute_times) or not bandwidth > 0 or not all(seconds > 0 for seconds in compute_times):
        raise ValueError(
            f"{count} sizes with {len(compute_times)} times at {bandwidth} bytes/s: give one time above 0 for each"
            " size, and a bandwidth above 0"
        )
    loads = [size / bandwidth for size in layer_sizes]
    if not count or prefetch_depth(sum(loads), sum(compute_times)) is None:
        return [1] * count
    ends = list(itertools.accumulate(list(compute_times) * 4))  # when each computation of four passes ends
    slack = 1e-9 * sum(compute_times)  # for rounding: a load that takes as long as a computation fits beside it
    latest = math.inf
    depths = []
    for index in reversed(range(count, 4 * count)):
        latest = min(latest, ends[index - 1]) - loads[index % count]
        busy = next((i for i in range(index) if ends[i] > latest + slack), index - 1)
        depths.append(index - busy)
    return depths[::-1][count : 2 * count]
