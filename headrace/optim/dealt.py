"""How do ranks take a step together of which each performs a part? They agree first, and tell each other what failed.

All that decides about a collective, or about results, is agreed before it: which parameters there are, who updates
them, with which settings, which have gradients. An exception on one rank becomes one on each, that names the rank.
See docs/design/optimizers.md.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from headrace.errors import StateError
from headrace.optim.deal import Deal
from headrace.optim.dealt_state import Consolidated, OnAnotherRank
from headrace.optim.devices import Member
from headrace.runtime.ranks import Ranks

__all__ = ["Dealt"]

Perform = Callable[[list[Member]], None]


class Dealt:
    """The parameters of one optimizer that are dealt out to ranks, each whole."""

    def __init__(self, ranks: Ranks, deal: Deal) -> None:
        self.ranks = ranks
        self.deal = deal
        self.consolidated: Consolidated | None = None  # by consolidate_state_dict(), until the next step
        self._described: list[str] | None = None  # all parameters
        self._loaded = False  # since the last step; a load that failed may be tried again on one rank alone

    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """Deals these out, too."""
        raise NotImplementedError

    def is_elsewhere(self, parameter: torch.Tensor) -> bool:
        """Whether another rank updates it, and keeps its state."""
        return self.deal.owner(parameter) not in (None, self.ranks.own)

    def agree(
        self, look: Callable[[], list[Member]], groups: Sequence[dict[str, Any]], settings: Mapping[str, object]
    ) -> list[Member]:
        """`look()`: what of the parameters in `groups` has a gradient, alike on all ranks. A collective.

        Raises what that raises, and StateError where another rank failed, or has other parameters, settings or
        gradients.
        """
        found: list[Member] = []
        error = None
        try:
            found = look()
        except Exception as failure:
            error = failure
        gradients = {member.index: self._seen(member) for member in found}
        settings = {name: str(value) for name, value in settings.items()} | {
            "whether state was loaded": str(self._loaded)
        }
        if self._described is None:
            self._described = _described(groups)
        alike = [_digest(each) for each in (self._described, self.deal.owners, settings, gradients)]
        if len(set(map(tuple, self.ranks.numbers([int(error is not None), *alike])))) > 1 or error is not None:
            told = self.ranks.objects((_text(error), self._described, settings, gradients))
            if error is not None:
                raise error
            self._refuse(told)
        self._agreed(alike)
        self._loaded = False
        self.consolidated = None  # what was put together is of another step
        return found

    def _seen(self, member: Member) -> int:
        """What of a gradient's values the ranks compare."""
        return 0

    def _agreed(self, alike: Sequence[int]) -> None:
        """The ranks have all of this alike."""

    def update(self, members: Sequence[Member], perform: Perform) -> None:
        """Each rank calls `perform` for its own, and all get all updated weights. A collective.

        Raises what that raises, once all collectives are over; StateError where it did so on another rank.
        """
        raise NotImplementedError

    def tell(self, error: Exception | None) -> None:
        """Ends an update: raises what failed here, or StateError for what failed on another rank. A collective."""
        failed = any(rank for (rank,) in self.ranks.numbers([int(error is not None)]))
        told = self.ranks.objects(_text(error)) if failed else []
        if error is not None:
            raise error
        for rank, text in enumerate(told):
            if text is not None:
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

    # state ------------------------------------------------------------------------------------------------------------
    def of_others(self, parameters: Iterable[torch.Tensor]) -> dict[int, OnAnotherRank]:
        """By number, what stands for the state of those that other ranks update."""
        return {
            number: OnAnotherRank(number, self.ranks.named(self.deal.owner(parameter) or 0))
            for number, parameter in enumerate(parameters)
            if self.is_elsewhere(parameter)
        }

    def kept(self, state_dict: Mapping[str, Any], groups: Iterable[dict[str, Any]]) -> dict[Any, Any]:
        """Of the state that a state_dict has, by number, what this rank keeps; the others' is empty.

        Raises ValueError where that is on another rank.
        """
        self.consolidated = None
        self._loaded = True
        pairs = zip(state_dict["param_groups"], groups, strict=False)
        of_numbers = {
            number: parameter
            for saved, group in pairs
            for number, parameter in zip(saved["params"], group["params"], strict=False)
        }
        kept: dict[Any, Any] = {}
        for number, entries in state_dict["state"].items():
            elsewhere = number in of_numbers and self.is_elsewhere(of_numbers[number])
            if not elsewhere and isinstance(entries, OnAnotherRank):
                raise ValueError(f"{self.ranks.named(self.ranks.own)} is to keep what this state_dict lacks: {entries}")
            kept[number] = {} if elsewhere else entries
        return kept


def _described(groups: Iterable[dict[str, Any]]) -> list[str]:
    """All parameters, in their order."""
    pairs = [pair for group in groups for pair in zip_longest(group["params"], group.get("param_names", ()))]
    return [
        f"parameter {index}{f', {name!r},' if name else ''} of shape {tuple(parameter.shape)} and {parameter.dtype}"
        for index, (parameter, name) in enumerate(pairs)
    ]


def _digest(value: object) -> int:
    """A number that is equal where values are, on all ranks."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest())


def _text(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
