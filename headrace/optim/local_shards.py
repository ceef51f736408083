"""How does an optimizer take DTensors? Inside, each is its local shard; outside, its state is sharded like it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from headrace.errors import LayoutError, StateError
from headrace.optim import narrow
from headrace.optim.kernel import Master
from headrace.optim.loading import by_number
from headrace.optim.weights import FULL, REMAINDER
from headrace.runtime.sharded import described, gradient_of_shard, is_sharded, lies_as, local_shard, sharded_like

_STEP = "step"  # a plain number on every rank


class LocalShards:
    """The local shards of the parameters of one optimizer that are DTensors."""

    def __init__(self) -> None:
        self._shards: dict[torch.Tensor, torch.Tensor] = {}  # by DTensor
        self._whole: dict[torch.Tensor, torch.Tensor] = {}  # the DTensor, by shard and by stand-in
        self._stand_ins: dict[torch.Tensor, torch.Tensor] = {}  # by DTensor: see gathered.py

    def __bool__(self) -> bool:
        return bool(self._shards)

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Adds the DTensors among these parameters."""
        for parameter in filter(is_sharded, parameters):
            self._shards[parameter] = local_shard(parameter)
            self._whole[local_shard(parameter)] = parameter

    def stand_in(self, parameter: torch.Tensor) -> None:
        """Has a DTensor updated as a whole, in a tensor of its shape that has no memory between updates."""
        local, strides = local_shard(parameter), parameter.stride()
        whole = torch.empty_strided(parameter.shape, strides, dtype=local.dtype, device=local.device)
        whole.untyped_storage().resize_(0)
        self._stand_ins[parameter] = whole
        self._whole[whole] = parameter

    def is_stand_in(self, updated: torch.Tensor) -> bool:
        """Whether `updated` is the stand-in of a DTensor."""
        whole = self._whole.get(updated)
        return whole is not None and self._stand_ins.get(whole) is updated

    def to_local(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that is updated for a parameter. Raises StateError if its local shard has been replaced."""
        shard = self._shards.get(parameter)
        if shard is None:
            return parameter
        if shard is not local_shard(parameter):
            raise StateError(
                f"a DTensor parameter of shape {tuple(parameter.shape)} has another local tensor since this optimizer"
                " was made, as model.to() and assign=True do; make a new one after that, and load its state_dict()"
            )
        return self._stand_ins.get(parameter, shard)

    def dtensor_of(self, shard: torch.Tensor) -> torch.Tensor:
        """The DTensor whose shard or stand-in this is; a plain parameter is returned as it is."""
        return self._whole.get(shard, shard)

    def dtensors_of(self, shards: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The DTensors whose local shards or stand-ins are among these tensors."""
        return [self._whole[shard] for shard in shards if shard in self._whole] if self._whole else []

    def gradient(self, shard: torch.Tensor) -> torch.Tensor | None:
        """The gradient with which the shard is updated."""
        whole = self._whole.get(shard)
        return shard.grad if whole is None else gradient_of_shard(whole)

    def localize_state(self, state: Mapping[Any, Any]) -> "defaultdict[Any, Any]":
        """State by parameter, in local shards. Raises ValueError for state that is not sharded like its parameter."""
        found: defaultdict[Any, Any] = defaultdict(dict)
        for parameter, entries in state.items():
            found[self.to_local(parameter)] = self._taken(entries, parameter)
        return found

    def loaded(
        self, groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
        """The groups, and the state of a state_dict by number, both in local shards."""
        parameters = by_number(state_dict, groups)
        state = {key: self._taken(entries, parameters.get(key)) for key, entries in state_dict["state"].items()}
        return [{**group, "params": list(map(self.to_local, group["params"]))} for group in groups], state

    def globalize_state(self, state: Mapping[torch.Tensor, Any]) -> "defaultdict[torch.Tensor, Any]":
        """The inverse of `localize_state`: state by DTensor, in which state of a shard's shape is a DTensor too.

        It shares the memory, except for masters in split form, which are shown in full form: no collective takes int16.
        Raises LayoutError for state of another shape.
        """
        shown: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for shard, entries in state.items():
            whole = self._whole.get(shard)
            if whole is None or self.is_stand_in(shard):
                shown[self.dtensor_of(shard)] = entries
            else:
                pairs = (_in_full(name, value, shard) for name, value in entries.items())
                shown[whole] = {name: _shown(name, value, shard, whole) for name, value in pairs}
        return shown

    def _taken(self, entries: Any, parameter: Any) -> Any:
        """The state of one parameter, in local shards."""
        if not is_sharded(parameter):
            return entries
        for name, value in entries.items():
            if not isinstance(value, torch.Tensor) or name == _STEP:
                continue
            if is_sharded(value) if parameter in self._stand_ins else not lies_as(value, parameter):
                raise ValueError(
                    f"state {name!r} of a DTensor parameter of shape {tuple(parameter.shape)} and"
                    f" {parameter.placements} is {described(value)}; load it by torch.distributed.checkpoint, which"
                    " cuts it as that is cut now"
                )
        return {name: local_shard(value) for name, value in entries.items()}


def _in_full(name: str, value: Any, shard: torch.Tensor) -> tuple[str, Any]:
    if name != REMAINDER:
        return name, value
    return FULL, narrow.join(shard.detach().to(value.device), value, Master.SPLIT)


def _shown(name: str, value: Any, shard: torch.Tensor, whole: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or name == _STEP:
        return value
    if value.shape != shard.shape:
        raise LayoutError(
            f"state {name!r} has the shape {tuple(value.shape)}, and the local shard of its DTensor parameter"
            f" {tuple(shard.shape)}: no DTensor can show it; use another state_dtype than '8bit'"
        )
    return sharded_like(value, whole)
