"""What does a model hold? Every parameter once, with all the places that keep it, and the modules that own it."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from millrace.memory.arena import aligned
from millrace.weights.model.layout import by_storage, check_can_travel, lay_out, travel_dtype
from millrace.weights.model.places import Member, Place

__all__ = ["USE_WEIGHTS_OF_CHILDREN", "Inventory", "take_inventory"]

# They compute with their children's weights, without calling those, where they take a path of their own.
USE_WEIGHTS_OF_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass
class Inventory:
    """The parameters of a model. Tied ones are one member with several places."""

    param_dtype: torch.dtype | None = None  # in which they travel
    members: dict[int, Member] = field(default_factory=dict)  # by the id of the parameter
    owned: dict[nn.Module, list[int]] = field(
        default_factory=dict
    )  # ids of the parameters a module itself computes with
    names: dict[nn.Module, str] = field(default_factory=dict)  # every module, by its first name
    parents: dict[nn.Module, nn.Module] = field(default_factory=dict)

    def below(self, module: nn.Module) -> list[int]:
        """Ids of the parameters that a module or anything inside it holds, each once, in order."""
        return list(dict.fromkeys(key for inner in module.modules() for key in self.owned.get(inner, ())))

    def nbytes(self, keys: list[int]) -> int:
        """Bytes of these parameters in a block: in the dtype in which they travel, and aligned."""
        alone = [self.members[key].parameter for key in keys if key not in self._sharing]
        sharing = [self.members[key].parameter for key in keys if key in self._sharing]
        sizes = (parameter.numel() * travel_dtype(parameter, self.param_dtype).itemsize for parameter in alone)
        return sum(aligned(nbytes) for nbytes in sizes) + lay_out(sharing, self.param_dtype)[1]

    def cast_bytes(self, keys: list[int]) -> int:
        """Bytes of those of these parameters that travel in another dtype than they have: homes beside the block."""
        parameters = [self.members[key].parameter for key in keys]
        return sum(p.nbytes for p in parameters if travel_dtype(p, self.param_dtype) != p.dtype)

    @cached_property
    def _sharing(self) -> frozenset[int]:
        """Parameters that share a storage with others: their bytes in a block depend on each other."""
        keys = list(self.members)
        groups = by_storage([member.parameter for member in self.members.values()], self.param_dtype)
        return frozenset(keys[index] for group in groups if len(group) > 1 for index in group)


def take_inventory(model: nn.Module, *, param_dtype: torch.dtype | None = None, check: bool = True) -> Inventory:
    """Walks the model. With `check`, raises LayoutError for a parameter that cannot travel."""
    inventory = Inventory(param_dtype)
    for module_name, module in model.named_modules():
        inventory.names[module] = module_name
        for child in module.children():
            inventory.parents.setdefault(child, module)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            key = id(parameter)
            if key not in inventory.members:
                full_name = f"{module_name}.{name}" if module_name else name
                if check:
                    check_can_travel(full_name, parameter)
                inventory.members[key] = Member(full_name, parameter)
            inventory.members[key].places.append(Place(module._parameters, name))
            inventory.owned.setdefault(module, []).append(key)
        if isinstance(module, nn.RNNBase):
            _add_flat_weights(inventory, module)
    for module in inventory.names:
        if isinstance(module, USE_WEIGHTS_OF_CHILDREN):
            inventory.owned[module] = inventory.below(module)
    return inventory


def _add_flat_weights(inventory: Inventory, module: nn.RNNBase) -> None:
    """An RNN computes with lists of its parameters, and checks by weak references that nobody changed them."""
    for index, parameter in enumerate(module._flat_weights):
        member = inventory.members.get(id(parameter))
        if member is not None:
            member.places.append(Place(module._flat_weights, index))
            member.places.append(Place(module._flat_weight_refs, index, weakly=True))
