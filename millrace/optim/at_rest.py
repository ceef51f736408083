"""How is an optimizer's state saved and loaded that rests on disk? As tensors there, which are never made memory."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from millrace.memory.disk import TensorAtRest
from millrace.optim.disk_state import DiskState
from millrace.optim.shares import Shares
from millrace.runtime.tensors import parameters_of

__all__ = ["StateAtRest"]


class StateAtRest:
    """The part of an optimizer of which checkpoints ask."""

    param_groups: list[dict[str, Any]]
    _disk: DiskState | None  # where the state rests, with tier="disk"
    _shares: Shares

    @property
    def entries(self) -> defaultdict[torch.Tensor, Any]:
        """`state`, without what is on disk, and without waiting for updates that are under way."""
        return self.__dict__["state"]  # type: ignore[no-any-return]

    @property
    def state_on_disk(self) -> bool:
        """Whether state rests on disk."""
        return self._disk is not None

    def state_at_rest(self) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        """As `state`; what is on disk is read when it is wanted. Waits for updates that are under way."""
        self.synchronize()
        self._shares.join(self.entries)
        if self._disk is None:
            return self.entries
        self._disk.synchronize()
        return {one: {**self._at_rest(one), **self.entries.get(one, {})} for one in parameters_of(self)}

    def fill(self, state: Mapping[torch.Tensor, Mapping[str, TensorAtRest]]) -> None:
        """These tensors are the parameters' state from now on, beside what `load_state_dict` loaded of it."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """The host waits for updates that are under way."""
        raise NotImplementedError

    def _at_rest(self, parameter: torch.Tensor) -> dict[str, TensorAtRest]:
        """What of a parameter's state is on disk."""
        raise NotImplementedError
