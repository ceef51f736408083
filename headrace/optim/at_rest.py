"""What of an optimizer's state is seen from outside? What torch.optim has; what rests on disk never becomes memory."""

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from headrace.errors import DiskError, StateError
from headrace.memory.disk import TensorAtRest
from headrace.optim.dealt import Dealt
from headrace.optim.dealt_state import OnAnotherRank, consolidated
from headrace.optim.devices import Twins
from headrace.optim.disk_state import DiskState
from headrace.optim.loading import values_from
from headrace.optim.local_shards import LocalShards
from headrace.optim.options import Options
from headrace.optim.reduced import dealt_over
from headrace.optim.shares import Shares
from headrace.runtime.capture import before_write
from headrace.runtime.tensors import parameters_of

__all__ = ["StateAtRest"]


# Kept by copies and pickles, beside what the stock one keeps.
_OWN = ("_options", "_not_finite", "skipped_steps", "last_step_skipped", "last_grad_norm")


class StateAtRest(Optimizer):
    """The part of an optimizer of which checkpoints ask."""

    ELEMENTWISE: tuple[str, ...]
    _options: Options
    _dealt: Dealt | None  # where parameters are dealt out to ranks
    _disk: DiskState | None  # where the state rests, with tier="disk"
    _shares: Shares
    _twins: dict[torch.device, Twins]
    _local_shards: LocalShards

    @property
    def entries(self) -> defaultdict[torch.Tensor, Any]:
        """`state`, without what is on disk, and without waiting for updates that are under way."""
        return self.__dict__["state"]  # type: ignore[no-any-return]

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """State by parameter, as torch.optim has it. Waits for updates that are under way.

        With DTensor parameters a mapping made anew, over the same tensors: what is put into it is seen by nobody.
        """
        self._join_node()
        self.synchronize()
        self._show_state()
        return self._local_shards.outward(self.entries) if self._local_shards else self.entries

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        if "param_groups" in self.__dict__:  # what rests elsewhere is needed only if `value` has it
            self.synchronize()
            self._show_state()
        self.__dict__["state"] = self._local_shards.inward(value) if self._local_shards else value

    def _show_state(self) -> None:
        """`entries` become the whole state, wherever parts of it live."""
        self._shares.join(self.entries)

    @property
    def state_on_disk(self) -> bool:
        """Whether state rests on disk."""
        return self._disk is not None

    def state_at_rest(self) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        """As `state`; what is on disk is read when it is wanted. Waits for updates that are under way."""
        self._join_node()
        self.synchronize()
        self._shares.join(self.entries)
        if self._dealt is not None:
            state = self.state_dict()["state"]
            for entries in state.values():
                if isinstance(entries, OnAnotherRank):
                    raise StateError(repr(entries))
            return {one: state[number] for number, one in enumerate(parameters_of(self)) if number in state}
        if self._disk is None:
            return self.entries
        self._disk.synchronize()
        return {one: {**self._at_rest(one), **self.entries.get(one, {})} for one in parameters_of(self)}

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim has it. Where parameters are dealt out to ranks, with the state of this rank's alone.

        That of the others is something empty which cannot be pickled; `consolidate_state_dict` gets it.
        """
        found = super().state_dict()
        if self._dealt is not None:
            others = self._dealt.consolidated
            for number, entries in self._dealt.of_others(parameters_of(self)).items():
                if others is None and number in found["state"]:  # it was updated, or loaded
                    found["state"][number] = entries
                elif others is not None and number in others:
                    found["state"][number] = others[number]
        return found

    def consolidate_state_dict(self, to: int = 0) -> None:
        """One rank of the mesh gets the state of all, in host memory; until the next step its `state_dict()` has it.

        All ranks call this. Where no parameters are dealt out to ranks it does nothing.
        """
        self._join_node()
        if self._dealt is None:
            return
        state, ranks = self.state, self._dealt.ranks
        owned = {
            number: state[parameter]
            for number, parameter in enumerate(parameters_of(self))
            if self._dealt.deal.owner(parameter) == ranks.own and parameter in state
        }
        self._dealt.consolidated = consolidated(owned, ranks, to)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict()` of this or of the stock optimizer returned. Moments keep their values.

        Raises ValueError when groups or shapes do not match; nothing has changed then. Updates that a drive cut short
        are no error any more: loading is what makes up for them. Where parameters are dealt out to ranks, each rank
        takes the state of its own.
        """
        before, after = self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks
        self._join_node()
        with contextlib.suppress(DiskError, StateError):
            self.synchronize()
        state_dict = state_dict.copy()
        for hook in before.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = self.param_groups
        if self._dealt is not None:
            state_dict["state"] = self._dealt.kept(state_dict, groups)
        if self._local_shards:
            groups, state_dict["state"] = self._local_shards.loaded(groups, state_dict)
        values = values_from(groups, state_dict, self.ELEMENTWISE, self._options.moment_dtype)
        self._take_apart(values)
        before_write(parameters_of(self))
        self._forget_weights()
        if self._disk is not None:
            self._disk = self._disk.emptied()
        try:  # The stock method casts moments to the dtype of their parameter, so it gets the groups alone.
            self._optimizer_load_state_dict_pre_hooks = type(before)()
            self._optimizer_load_state_dict_post_hooks = type(after)()
            super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        finally:
            self._optimizer_load_state_dict_pre_hooks = before
            self._optimizer_load_state_dict_post_hooks = after
        self.__setstate__({"state": defaultdict(dict, values), "param_groups": self.param_groups})
        self._take_loaded()
        for post_hook in after.values():
            post_hook(self)

    def kept_elsewhere(self) -> set[torch.Tensor]:
        """The parameters whose state another rank keeps."""
        self._join_node()
        return set() if self._dealt is None else {one for one in parameters_of(self) if self._dealt.is_elsewhere(one)}

    def held_bytes(self) -> int:
        """Bytes of host memory that state, masters and copies take; the user's own tensors do not count."""
        self.synchronize()
        states = [*self.entries.values(), *(on_host for on_host, _ in self._shares.pieces.values())]
        values = [value for entries in states for value in entries.values() if isinstance(value, torch.Tensor)]
        held = sum(value.nbytes for value in values if value.device.type == "cpu")
        held += 0 if self._disk is None else self._disk.host_bytes
        return held + sum(twins.held_bytes() for twins in self._twins.values())

    def __getstate__(self) -> dict[str, Any]:
        owners = [] if self._dealt is None else self._dealt.deal.owners
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in _OWN}, "_owners": owners}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_weights" not in self.__dict__:  # of a copy or an unpickled optimizer
            self._forget_weights()
            self._begin_anew(state["_options"])
            self._local_shards = LocalShards()
            owners = state.pop("_owners")
            self._dealt = dealt_over(state["_options"], owners)
            every = [one for group in state["param_groups"] for one in group["params"]]
            self._deal_out(every, owners)
            self._local_shards.take(every)
            if self._local_shards:
                state = {**state, "state": self._local_shards.inward(state["state"])}
        super().__setstate__(state)

    def fill(self, state: Mapping[torch.Tensor, Mapping[str, TensorAtRest]]) -> None:
        """These tensors are the parameters' state from now on, beside what `load_state_dict` loaded of it.

        Waits until all that rests on disk is there. Raises DiskError where a drive did not take it.
        """
        raise NotImplementedError

    def synchronize(self) -> None:
        """The host waits for updates that are under way."""
        raise NotImplementedError

    def _join_node(self) -> None:
        """Where the parameters are of a model that ranks of a node have in common, these share the work."""
        raise NotImplementedError

    def _take_apart(self, state: Mapping[Any, Any]) -> None:
        """What is shown of a parameter's state on disk, and is another one's in `state`, becomes memory."""
        raise NotImplementedError

    def _forget_weights(self) -> None:
        """What is known of weights, and where their state lives, is void."""
        raise NotImplementedError

    def _begin_anew(self, options: Options) -> None:
        """Nothing is under way."""
        raise NotImplementedError

    def _deal_out(self, added: Sequence[torch.Tensor], owners: Sequence[int]) -> None:
        """These are the optimizer's from now on: where ranks share the work, which of them updates each."""
        raise NotImplementedError

    def _take_loaded(self) -> None:
        """`entries` were loaded: what was kept of the state before is void."""
        raise NotImplementedError

    def _at_rest(self, parameter: torch.Tensor) -> dict[str, TensorAtRest]:
        """What of a parameter's state is on disk."""
        raise NotImplementedError
