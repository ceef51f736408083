"""Who updates a parameter, and keeps its state? This process alone; or ranks, each of which does a part of a step.

Ranks first agree, bring to each owner what it needs, spread what it has written, and tell each other what failed. What
decides about collectives or results is agreed on beforehand: which parameters there are, who updates them, with which
settings, and which have gradients. An exception on one rank becomes an exception on every rank that names it. See
docs/design/optimizers.md.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from headrace.errors import StateError
from headrace.optim.consolidation import Consolidated, OnAnotherRank, consolidated
from headrace.optim.devices import Member
from headrace.optim.loading import by_number
from headrace.runtime.pending import OtherRanks, Unit
from headrace.runtime.ranks import Ranks
from headrace.runtime.sharded import is_sharded

_Perform = Callable[[list[Member]], None]
Unscale = Callable[[], dict[torch.device, torch.Tensor]]


class OwnerMap:
    """Which of `count` ranks owns which parameter. Each parameter, in order, goes to the rank with the fewest elements.

    All ranks come to the same result without communication.
    """

    def __init__(self, count: int, owners: Sequence[int] = ()) -> None:
        """`owners`: the owners of the first parameters, as an earlier map had them."""
        self._before = owners
        self._owners: dict[Any, int] = {}
        self._elements = [0] * count  # of the parameters of each rank

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Gives these parameters owners. Parameters that are frozen now do not count: they have no state."""
        for parameter in parameters:
            number = len(self._owners)
            fewest = self._elements.index(min(self._elements))
            owner = self._before[number] if number < len(self._before) else fewest
            self._owners[parameter] = owner
            if parameter.requires_grad:
                self._elements[owner] += parameter.numel()

    def owner(self, parameter: torch.Tensor) -> int | None:
        """The rank that updates the parameter; None if every rank does."""
        return self._owners.get(parameter)

    @property
    def owners(self) -> list[int]:
        """The owners of all parameters, in the order of the parameters."""
        return list(self._owners.values())


class Ownership:
    """Who owns the parameters of one optimizer: this process all of them, or each of several ranks some."""

    def __init__(self, ranks: Ranks | None = None, owners: Sequence[int] = ()) -> None:
        """`ranks`: None if there is this process alone. `owners`: see OwnerMap."""
        self.shares = ranks is not None
        self.ranks: Any = ranks
        self.map = OwnerMap(1 if ranks is None else ranks.count, owners)
        self._consolidated: Consolidated | None = None  # made by `consolidate`, kept until the next step
        self._described: list[str] | None = None  # a text for each parameter
        self._loaded = False  # state was loaded since the last step, perhaps on one rank alone

    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """Adds parameters to the optimizer. Raises ValueError for parameters that its ranks cannot share."""
        self._described = None
        self.map.take(parameters if self.shares else ())

    def is_elsewhere(self, parameter: torch.Tensor) -> bool:
        """Whether another rank updates the parameter, and keeps its state."""
        return self.shares and self.map.owner(parameter) not in (None, self.ranks.own)

    def agree(
        self,
        look: Callable[[], list[Member]],
        groups: Sequence[dict[str, Any]],
        settings: Callable[[], Mapping[str, object]],
    ) -> list[Member]:
        """The result of `look()`, the parameters in `groups` that have a gradient; alike on all ranks. A collective.

        Raises what `look` raises, and StateError if another rank failed, or has other parameters, settings or
        gradients.
        """
        if not self.shares:
            return look()
        self._prepare(groups)
        found: list[Member] = []
        gradients: dict[int, int] = {}
        error = None
        try:
            found = look()
            gradients = {member.index: self._seen(member) for member in found}
        except Exception as failure:
            error = failure
        told_settings = {name: str(value) for name, value in settings().items()}
        told_settings["whether state was loaded"] = str(self._loaded)
        if self._described is None:
            self._described = _described(groups)
        alike = [_digest(each) for each in (self._described, self.map.owners, told_settings, gradients)]
        if len(set(map(tuple, self.ranks.numbers([int(error is not None), *alike])))) > 1 or error is not None:
            told = self.ranks.objects((_text(error), self._described, told_settings, gradients))
            if error is not None:
                raise error
            self._refuse(told)
        self._agreed(alike)
        self._loaded = False
        self._consolidated = None  # it was of an earlier step
        return found

    def _prepare(self, groups: Sequence[dict[str, Any]]) -> None:
        """Called before the ranks agree. What it raises is raised on this rank alone."""

    def _seen(self, member: Member) -> int:
        """Looks at a member of a step. Returns a number that ranks compare, made from its gradient's values."""
        return 0

    def _agreed(self, alike: Sequence[int]) -> None:
        """Called when the ranks have found these numbers to be equal."""

    def unscale(self, unscale: Unscale, parameters: Sequence[torch.Tensor]) -> dict[torch.device, torch.Tensor]:
        """Has GradScaler unscale the parameters' gradients. Returns, by device, a number above 0 if any is infinite."""
        return unscale()

    def rounds(self, members: Sequence[Member]) -> Iterable[Sequence[Member]]:
        """Cuts `members` into batches, each of which is brought, updated and spread before the next."""
        return [members]

    def bring(self, members: Sequence[Member]) -> list[Member]:
        """Brings this rank what it needs for its own members, and returns these."""
        return [member for member in members if not self.is_elsewhere(member.parameter)]

    def spread(self, members: Sequence[Member]) -> None:
        """Called when each rank has updated its own members: gives all ranks their weights."""

    def perform_own(self, perform: _Perform, members: Sequence[Member]) -> None:
        """Calls `perform` with the members that this rank updates."""
        if mine := self.bring(members):
            perform(mine)
            self._performed(mine)

    def _performed(self, mine: Sequence[Member]) -> None:
        """Called when this rank has updated its own members."""

    def update(self, members: Sequence[Member], perform: _Perform) -> None:
        """Each rank calls `perform` with its own members, then all ranks get all updated weights. A collective.

        Raises what `perform` raises, after the last collective; StateError if it raised on another rank.
        """
        if not self.shares:
            self.perform_own(perform, members)
            return
        error = None
        for batch in self.rounds(members):
            mine = self.bring(batch)
            if mine and error is None:
                try:
                    perform(mine)
                    self._performed(mine)
                except Exception as failure:  # raised later: the other ranks wait for what this one sends
                    error = failure
            self.spread(batch)
        self._tell(error)

    def _tell(self, error: Exception | None) -> None:
        """Ends an update: raises what failed here, or StateError for what failed on another rank. A collective."""
        told = self.ranks.failures(error)
        if error is not None:
            raise error
        for rank, text in told.items():
            raise StateError(
                f"{self.ranks.named(rank)} failed to update its parameters: {text}; those of the other ranks are"
                " updated, and weights are alike on all: load a checkpoint, weights and state, on every rank"
            )

    def _refuse(self, told: list[tuple[str | None, list[str], dict[str, str], dict[int, int]]]) -> None:
        named = self.ranks.named
        for rank, (text, *_) in enumerate(told):
            if text is not None:
                raise StateError(f"{named(rank)} could not take the step, so no rank has updated anything: {text}")
        _, first, settings, present = told[0]
        for rank, (_, descriptions, *_) in enumerate(told):
            if len(descriptions) != len(first):
                longer, place = max(descriptions, first, key=len), min(len(descriptions), len(first))
                raise StateError(
                    f"{named(rank)} gave {len(descriptions)} parameters to its optimizer, and {named(0)} {len(first)}:"
                    f" only one of them has {longer[place]}; give the same ones, in the same order, on every rank"
                )
            for one, other in zip(descriptions, first, strict=True):
                if one != other:
                    raise StateError(
                        f"{named(rank)} has {one} where {named(0)} has {other}; give the same parameters, in the same"
                        " order, on every rank"
                    )
        for rank, (_, _, found, _) in enumerate(told):
            for name in settings | found:
                if settings.get(name) != found.get(name):
                    raise StateError(
                        f"ranks differ in {name}: {found.get(name)} on {named(rank)}, {settings.get(name)} on"
                        f" {named(0)}; nothing was updated. Give the same on every rank"
                    )
        for rank, (*_, others) in enumerate(told):
            for index in sorted(set(present).symmetric_difference(others)):
                has, lacks = (0, rank) if index in present else (rank, 0)
                raise StateError(
                    f"{first[index]} has a gradient on {named(has)} and none on {named(lacks)}; nothing was updated."
                    " Gradients must be averaged over all ranks before step(): DistributedDataParallel(...,"
                    " find_unused_parameters=True) does it where ranks use different parameters"
                )
            for index, seen in present.items():
                if seen != others[index]:
                    raise StateError(
                        f"the gradient of {first[index]} has other values on {named(rank)} than on {named(0)}; nothing"
                        " was updated. Write the same into gradients on every rank: clip and scale them on all or none"
                    )
        raise StateError("ranks have dealt out their parameters differently: freeze the same ones on every rank")

    # of ranks that share one copy of a model: see on_node.py ---------------------------------------------------------
    def begin_update(self, unit: Unit) -> OtherRanks | None:
        """The other ranks that perform parts of an update of a unit's parameters beside passes, if there are any."""
        return None

    def end_closure(self) -> None:
        """Called when a step's closure has returned."""

    def end_step(self) -> None:
        """Called when a step is over."""

    def discard_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Called in `zero_grad`."""

    # state ----------------------------------------------------------------------------------------------------------
    def with_others(self, state: dict[int, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Adds the state that other ranks keep, or placeholders for it, to the state of a state_dict, by number."""
        for number, parameter in enumerate(parameters):
            if not self.is_elsewhere(parameter):
                continue
            if self._consolidated is None and number in state:  # the parameter was updated, or its state loaded
                state[number] = OnAnotherRank(number, self.ranks.named(self.map.owner(parameter) or 0))
            elif self._consolidated is not None and number in self._consolidated:
                state[number] = self._consolidated[number]

    def own_part(self, state_dict: Mapping[str, Any], groups: Iterable[dict[str, Any]]) -> dict[Any, Any]:
        """The state in a state_dict that this rank keeps, by number; empty for parameters of other ranks.

        Raises ValueError if the state_dict has only placeholders for it.
        """
        self._consolidated = None
        self._loaded = True
        parameters = by_number(state_dict, groups)
        kept: dict[Any, Any] = {}
        for number, entries in state_dict["state"].items():
            elsewhere = number in parameters and self.is_elsewhere(parameters[number])
            if not elsewhere and isinstance(entries, OnAnotherRank):
                own = self.ranks.named(self.ranks.own) if self.shares else "this process"
                raise ValueError(f"{own} is to keep what this state_dict lacks: {entries}")
            kept[number] = {} if elsewhere else entries
        return kept

    def consolidate(self, state: Mapping[torch.Tensor, Any], parameters: Sequence[torch.Tensor], to: int) -> None:
        """Gathers the state of all ranks on the rank `to`. A collective."""
        if not self.shares:
            return
        owned = {
            number: state[parameter]
            for number, parameter in enumerate(parameters)
            if self.map.owner(parameter) == self.ranks.own and parameter in state
        }
        self._consolidated = consolidated(owned, self.ranks, to)


class Replicas(Ownership):
    """Who owns parameters that every rank has, with gradients that were averaged (ZeRO-1). All get all weights."""

    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """As in `Ownership`. Raises ValueError for parameters that cannot be sent over the mesh."""
        for parameter in parameters:
            what = f"a parameter of shape {tuple(parameter.shape)}"
            if is_sharded(parameter):
                raise ValueError(
                    f"{what} is a DTensor over {parameter.device_mesh}, which has its ranks already;"  # type: ignore[attr-defined]
                    " leave mesh out, which is for plain tensors that all ranks have alike"
                )
            if not self.ranks.reaches(parameter.device):
                raise ValueError(
                    f"{what} is on {parameter.device}, and the mesh's process group has no backend for"
                    f" {parameter.device.type!r}: init_process_group('cpu:gloo,cuda:nccl')"
                )
        super().take(parameters)

    def spread(self, members: Sequence[Member]) -> None:
        owners = ((self.map.owner(member.parameter) or 0, member) for member in members)
        self.ranks.spread((owner, member.parameter.detach()) for owner, member in owners)


def _described(groups: Iterable[dict[str, Any]]) -> list[str]:
    """A text for each parameter, in order."""
    pairs = [pair for group in groups for pair in zip_longest(group["params"], group.get("param_names", ()))]
    return [
        f"parameter {index}{f', {name!r},' if name else ''} of shape {tuple(parameter.shape)} and {parameter.dtype}"
        for index, (parameter, name) in enumerate(pairs)
    ]


def _digest(value: object) -> int:
    """A number that is the same on all ranks for equal values."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest())


def _text(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
