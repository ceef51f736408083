"""What does a model hold? Every parameter once, with all the places that hold it, and the modules that own it."""

import itertools
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, partial

import torch
from torch import nn

from headrace.errors import LayoutError
from headrace.memory.arena import aligned
from headrace.runtime.autograd import address_of
from headrace.runtime.tensors import is_integer, map_tensors
from headrace.weights.model.compound import Compound, compound_of, is_compound
from headrace.weights.model.home import AliasParam, WatchedBuffer, owner_of
from headrace.weights.model.layout import by_storage, check_can_travel, lay_out, overlap, travel_dtype
from headrace.weights.model.module_buffers import may_rest_on_host, overlapping_buffers
from headrace.weights.model.places import Member, Place
from headrace.weights.model.precision import ParamDtype, Precision

# These have a path on which they compute with their children's weights without calling the children.
USE_WEIGHTS_OF_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
OF_MODULES = frozenset(nn.Module().__dict__)  # what each module has: parameters, buffers, hooks
_LARGE_BUFFER_BYTES = 16 * 2**10  # smaller ones stay on the device
_LEFT = "_headrace_left_to_user"  # attribute of a parameter


@dataclass
class Inventory:
    """The parameters of a model. Tied ones are one member with several places."""

    param_dtype: ParamDtype = None  # the dtype in which they travel; None: their own
    members: dict[int, Member] = field(default_factory=dict)  # by the id of the parameter
    owned: dict[nn.Module, list[int]] = field(
        default_factory=dict
    )  # ids of the parameters a module itself computes with
    names: dict[nn.Module, str] = field(default_factory=dict)  # every module, by its first name
    parents: dict[nn.Module, nn.Module] = field(default_factory=dict)
    buffers: dict[int, nn.Parameter] = field(default_factory=dict)  # each that travels, as a parameter, by buffer id
    places_of_compounds: dict[Compound, list[Place]] = field(default_factory=dict)

    def add(self, name: str, parameter: nn.Parameter, module: nn.Module, place: Place, *, check: bool) -> None:
        """Adds a parameter that is one plain tensor. With `check`, raises LayoutError if it cannot travel."""
        key = id(parameter)
        if key not in self.members:
            if check:
                check_can_travel(name, parameter)
            self.members[key] = Member(name, parameter)
        self.members[key].places.append(place)
        self.owned.setdefault(module, []).append(key)

    def add_buffer(self, name: str, buffer: torch.Tensor, module: nn.Module, place: Place, *, check: bool) -> None:
        """As `add`, for a buffer that travels."""
        if id(buffer) not in self.buffers:
            home = owner_of(buffer).home if isinstance(buffer, WatchedBuffer) else None
            self.buffers[id(buffer)] = AliasParam.of(buffer, is_buffer=True) if home is None else home
        self.add(name, self.buffers[id(buffer)], module, place, check=check)

    def add_compound(self, name: str, weight: torch.Tensor, module: nn.Module, place: Place, *, check: bool) -> None:
        """As `add`, for the parts of a weight that is not one plain tensor."""
        compound = compound_of(weight)
        try:
            compound = compound or Compound(name, weight)
        except LayoutError as error:
            raise LayoutError(f"parameter {name!r} cannot be offloaded: {error}") from None
        if compound not in self.places_of_compounds:
            self.places_of_compounds[compound] = []
            if check:
                compound.check()
            for path, part in compound.parts.items():
                part_name = f"{name}.{path}"
                if check:
                    check_can_travel(part_name, part)
                self.members[id(part)] = Member(part_name, part, compound=compound)
        self.places_of_compounds[compound].append(place)
        self.owned.setdefault(module, []).extend(map(id, compound.parts.values()))

    def below(self, module: nn.Module) -> list[int]:
        """Ids of the parameters that a module or anything inside it holds, each once, in order."""
        return list(dict.fromkeys(key for inner in module.modules() for key in self.owned.get(inner, ())))

    def named(self, pattern: str) -> list[int]:
        """Ids of the parameters whose names match. If a weight or one of its parts matches, all its parts count."""
        found = [member for member in self.members.values() if fnmatchcase(member.name, pattern)]
        whole = {member.compound for member in found if member.compound is not None}
        whole |= {compound for compound in self.places_of_compounds if fnmatchcase(compound.name, pattern)}
        alone = {id(member.parameter) for member in found}
        return [key for key, member in self.members.items() if key in alone or member.compound in whole]

    def nbytes(self, keys: list[int]) -> int:
        """Bytes that these parameters take in a block, aligned and in the dtype in which they travel."""
        alone = [self.members[key].parameter for key in keys if key not in self._sharing]
        sharing = [self.members[key].parameter for key in keys if key in self._sharing]
        sizes = (parameter.numel() * travel_dtype(parameter, self.param_dtype).itemsize for parameter in alone)
        return sum(aligned(nbytes) for nbytes in sizes) + lay_out(sharing, self.param_dtype)[1]

    def cast_bytes(self, keys: list[int]) -> int:
        """Bytes of the homes beside the block: of those parameters that travel in another dtype than their own."""
        parameters = [self.members[key].parameter for key in keys]
        return sum(p.nbytes for p in parameters if travel_dtype(p, self.param_dtype) != p.dtype)

    def can_be_cut(self, key: int, places: int = 1) -> bool:
        """Whether rows of a parameter can travel alone: only `places` places hold it, nothing else holds its memory,
        and it has no hooks.
        """
        member = self.members[key]
        parameter = member.parameter
        return (
            len(member.places) == places
            and not isinstance(parameter, AliasParam)
            and key not in self._sharing
            and not parameter._backward_hooks
            and parameter.is_contiguous()
        )

    def check_together(self, parts: Iterable[Collection[int]]) -> None:
        """Raises LayoutError for trained parameters that have elements in common and would lose that in blocks.

        `parts`: the ids of each block's parameters. Those of one block keep sharing, unless they travel in another
        dtype.
        """
        number = {key: index for index, keys in enumerate(parts) for key in keys}
        members = [member for member in self.members.values() if member.compound is None]
        for group in by_storage([member.parameter for member in members], None):
            in_order = sorted(group, key=lambda index: members[index].parameter.storage_offset())
            for pair in itertools.pairwise(members[index] for index in in_order):
                one, other = (member.parameter for member in pair)
                casts = any(travel_dtype(each, self.param_dtype) != each.dtype for each in (one, other))
                apart = casts or number.get(id(one)) != number.get(id(other))
                if apart and (one.requires_grad or other.requires_grad) and overlap(one, other):
                    raise LayoutError(
                        f"parameters {pair[0].name!r} and {pair[1].name!r} are two that lie in the same memory, and"
                        f" would no longer do so {'as casts' if casts else 'in different blocks'}. Tie them, so that"
                        " both modules have one Parameter (a.weight = b.weight), or give each memory of its own"
                        " (nn.Parameter(weight.detach().clone()))"
                    )

    def refuse_views(self) -> None:
        """Raises LayoutError for an attribute of a module that is a view of a trained parameter, made before: it would
        keep the memory and the values that the parameter has now.
        """
        trained: dict[int, list[Member]] = {}
        for member in self.members.values():
            parameter = member.parameter
            if parameter.requires_grad and member.compound is None and not isinstance(parameter, AliasParam):
                trained.setdefault(address_of(parameter.untyped_storage()), []).append(member)
        for module, module_name in self.names.items():
            for name, value in vars(module).items():
                if name in OF_MODULES or f"{name}_orig" in module._parameters:  # the latter is made anew in each call
                    continue
                where = f"{module_name}.{name}" if module_name else name
                map_tensors(value, partial(_refuse_view, where, trained))

    @cached_property
    def _sharing(self) -> frozenset[int]:
        """Ids of the parameters that share a storage with others: their bytes in a block depend on each other."""
        keys = list(self.members)
        groups = by_storage([member.parameter for member in self.members.values()], self.param_dtype)
        return frozenset(keys[index] for group in groups if len(group) > 1 for index in group)


def _refuse_view(where: str, trained: dict[int, list[Member]], tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type != "cpu":
        return tensor
    for member in trained.get(address_of(tensor.untyped_storage()), ()):
        if overlap(tensor, member.parameter):
            raise LayoutError(
                f"attribute {where!r}, of shape {tuple(tensor.shape)}, is a view of parameter {member.name!r}, and"
                " would keep its present values while the parameter is trained; make it in forward, or as a"
                " property, or give it memory of its own (.detach().clone())"
            )
    return tensor


def leave_to_user(parameters: Iterable[nn.Parameter], *, left: bool = True) -> None:
    """Keeps these parameters out of every inventory, and so of blocks and budgets: the user has them on the device,
    with their gradients and their optimizer. `left=False` ends that.
    """
    for parameter in parameters:
        if left:
            setattr(parameter, _LEFT, True)
        else:
            parameter.__dict__.pop(_LEFT, None)


def is_left_to_user(parameter: nn.Parameter) -> bool:
    """Whether `leave_to_user` left the parameter to the user."""
    return hasattr(parameter, _LEFT)


def take_inventory(model: nn.Module, *, param_dtype: ParamDtype = None, check: bool = True) -> Inventory:
    """Walks the model and lists its parameters, except those left to the user. With `check`, raises LayoutError for
    one that cannot travel; without it, only those buffers travel that do already.
    """
    inventory = Inventory(param_dtype)
    if isinstance(param_dtype, Precision):
        param_dtype.follow(model)
    overlapping = overlapping_buffers(model.modules()) if check else set()
    for module_name, module in model.named_modules():
        inventory.names[module] = module_name
        prefix = f"{module_name}." if module_name else ""
        for child in module.children():
            inventory.parents.setdefault(child, module)
        for name, parameter in module._parameters.items():
            if parameter is None or is_left_to_user(parameter):
                continue
            place = Place(module._parameters, name, module=weakref.ref(module))
            add = inventory.add_compound if is_compound(parameter) else inventory.add
            add(prefix + name, parameter, module, place, check=check)
        packed = _packed(module, overlapping) if check else ()
        for name, buffer in module._buffers.items():
            if buffer is not None and (name in packed or isinstance(buffer, WatchedBuffer)):
                inventory.add_buffer(prefix + name, buffer, module, Place(module._buffers, name), check=check)
        if isinstance(module, nn.RNNBase):
            _add_flat_weights(inventory, module)
    for module in inventory.names:
        if isinstance(module, USE_WEIGHTS_OF_CHILDREN):
            inventory.owned[module] = inventory.below(module)
    return inventory


def _packed(module: nn.Module, overlapping: Collection[int]) -> Collection[str]:
    """The names of buffers that are packed weights or their scales: large and persistent, in a module that has a large
    buffer of integers. Other buffers (statistics, codebooks, queues) are written by the module, and stay on the device.
    """
    large = {
        name: buffer
        for name, buffer in module._buffers.items()
        if buffer is not None
        and buffer.nbytes >= _LARGE_BUFFER_BYTES
        and name not in module._non_persistent_buffers_set
        and buffer.device.type == "cpu"
        and type(buffer) is torch.Tensor
        and may_rest_on_host(buffer)
        and not buffer.is_inference()
        and id(buffer) not in overlapping
    }
    return large.keys() if any(is_integer(buffer) for buffer in large.values()) else ()


def _add_flat_weights(inventory: Inventory, module: nn.RNNBase) -> None:
    """Adds the lists of its parameters with which an RNN computes, and the weak references by which it checks them."""
    for index, parameter in enumerate(module._flat_weights):
        member = inventory.members.get(id(parameter))
        if member is not None:
            member.places.append(Place(module._flat_weights, index))
            member.places.append(Place(module._flat_weight_refs, index, weakly=True))
