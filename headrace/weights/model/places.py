"""Where do modules keep the parameters of a block? In `_parameters`, and in lists such as an RNN's.

While a block is bound, lists hold its leaves. `_parameters` holds the homes at all times; each leaf is an attribute of
the module instance, which Python finds before it asks `nn.Module.__getattr__`. A class with a `__getattr__` of its own
gets no such attribute: it is asked as ever (it may give a masked weight), and comes to the leaf through `_parameters`.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from headrace.errors import LayoutError
from headrace.weights.model.compound import Compound
from headrace.weights.model.home import Home, Leaf
from headrace.weights.model.managed_param import ManagedParam


@dataclass(frozen=True)
class Place:
    """Where a module keeps a parameter: its `_parameters`, or a list such as an RNN's `_flat_weights`."""

    container: Any  # dict or list
    key: Any
    weakly: bool = False  # whether the place holds a weak reference, as an RNN's `_flat_weight_refs` does
    module: "weakref.ref[nn.Module] | None" = None  # the module whose `_parameters` this is

    def get(self) -> Any:
        """The parameter that is there now; None if the place is gone or empty."""
        if isinstance(self.container, dict):
            return dict.get(self.container, self.key)
        held = self.container[self.key] if self.key < len(self.container) else None
        return held() if self.weakly and held is not None else held

    def put(self, parameter: Any) -> None:
        self.container[self.key] = weakref.ref(parameter) if self.weakly else parameter


@dataclass
class Member:
    """A parameter on its way into a block: its full name, and every place that holds it (a tied one has several)."""

    name: str
    parameter: nn.Parameter
    places: list[Place] = field(default_factory=list)
    compound: Compound | None = None  # the weight of which it is a part; that has the places then


class Places:
    """All places of one block's parameters, each with the ManagedParam or the compound that it shows."""

    def __init__(self, places: Iterable[tuple[Place, ManagedParam]]) -> None:
        self._keep(places, ())

    def move(
        self,
        params: Iterable[ManagedParam],
        places: Mapping[int, Sequence[Place]],
        compounds: Iterable[Compound],
        places_of_compounds: Mapping[Compound, Sequence[Place]],
    ) -> None:
        """Takes over new places, after the model was rebuilt around these. `places`: by the id of each home."""
        self._keep(
            ((place, param) for param in params for place in places.get(id(param.home), ())),
            ((place, compound) for compound in compounds for place in places_of_compounds.get(compound, ())),
        )

    def _keep(self, places: Iterable[tuple[Place, ManagedParam]], compounds: Iterable[tuple[Place, Compound]]) -> None:
        places = list(places)
        self._attributes = [(place, param) for place, param in places if place.module is not None]
        self._others: list[tuple[Place, ManagedParam | Compound]] = [
            *((place, param) for place, param in places if place.module is None),
            *compounds,
        ]
        self._compounds = {weight for _, weight in self._others if isinstance(weight, Compound)}
        # For each module its `_parameters`, and the ManagedParams of what lies there: what a visit binds.
        self._modules: list[tuple[weakref.ref[nn.Module], dict[str, Any], list[tuple[str, ManagedParam, Leaf]]]] = []
        for place, param in self._attributes:
            if place.module is not None:
                if not self._modules or self._modules[-1][1] is not place.container:
                    self._modules.append((place.module, place.container, []))
                self._modules[-1][2].append((place.key, param, param.leaf))

    @property
    def references(self) -> int:
        """The number of references to leaves from here and from the places while they are bound."""
        return 2 * len(self._attributes) + sum(not place.weakly for place, _ in self._others)

    def bind(self, *, adopts: bool) -> None:
        """Makes modules that hold the homes compute with the leaves. With `adopts`, a parameter that the user put in
        the place of a home becomes the home first.
        """
        for module, parameters, held in self._modules:
            present = module()
            if present is None:
                continue
            attributes = present.__dict__ if type(present).__getattr__ is nn.Module.__getattr__ else None
            for name, param, leaf in held:
                home = param.home
                if dict.get(parameters, name) is not home:
                    if not (adopts and self._adopt(Place(parameters, name), param)):
                        continue
                    home = param.home
                if leaf.requires_grad != home.requires_grad:
                    param.prepare_leaf()
                if attributes is not None:
                    attributes.setdefault(name, leaf)  # never replaces what the user has put there
        for place, weight in self._others:
            if place.get() is weight.shown or (adopts and self._adopt(place, weight)):
                weight.prepare_leaf()
                place.put(weight.leaf)

    def unbind(self) -> None:
        """Makes the modules hold the homes again."""
        self.hide_leaves()
        for place, weight in self._others:
            if place.get() is weight.leaf:
                place.put(weight.shown)
        for compound in self._compounds:
            compound.undo_rewrites()

    def hide_leaves(self) -> None:
        """Removes the leaves from the modules' attributes, so that modules look parameters up in `_parameters`."""
        for module, _, held in self._modules:
            present = module()
            if present is not None:
                attributes = present.__dict__
                for name, _, leaf in held:
                    if attributes.get(name) is leaf:
                        del attributes[name]

    def of_several_modules(self) -> set[ManagedParam]:
        """The parameters that are held by several modules, or twice by one."""
        return {param for param, count in Counter(param for _, param in self._attributes).items() if count > 1}

    def adopt_replacements(self) -> None:
        """Makes parameters that the user put in the place of homes the homes."""
        for place, weight in (*self._attributes, *self._others):
            self._adopt(place, weight)

    def _adopt(self, place: Place, weight: ManagedParam | Compound) -> bool:
        """Makes the parameter at `place` the home if the user put it there. Returns whether it did."""
        held = place.get()
        if held is weight.shown or held is weight.leaf or not _is_replacement(held):
            return False
        if isinstance(weight, Compound):
            return weight.adopt(held)
        replaced = weight.home
        if not place.weakly:  # a weak reference is only compared, never computed with
            self._check_still_tied(weight)
            weight.adopt(held)
        for other, its_weight in (*self._attributes, *self._others):
            if its_weight is weight and any(other.get() is one for one in (replaced, held)):
                other.put(weight.home)
        return True

    def _check_still_tied(self, param: ManagedParam) -> None:
        """Raises LayoutError if modules that shared one parameter now hold different ones."""
        held = [place.get() for place, its_param in self._attributes if its_param is param]
        if len({id(parameter) for parameter in held if parameter is not None}) > 1:
            raise LayoutError(
                f"parameter {param.name!r} was offloaded as one that {len(held)} modules share, and not all have the"
                " same one now: a checkpoint was loaded with assign=True, or one of them got another. Tie them again"
                " (model.tie_weights() in transformers), or call remove() on the handle before, and offload after"
            )


def _is_replacement(held: Any) -> bool:
    """Whether `held` is a parameter of the user's: not another one's home or leaf (tied after offload), and not a
    tensor that `torch.func.functional_call` has put there for one call.
    """
    return isinstance(held, nn.Parameter) and not isinstance(held, Home | Leaf)
