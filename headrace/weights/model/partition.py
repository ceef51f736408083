"""Which parameters travel together? Repeated layers first, then by size; or as the user says.

The parts of a partition are disjoint. Three kinds of parameters stay resident: those that a module holds beside
children of its own (a positional table at the root), those of modules too small to be worth a trip, and adapters, which
are a few trainable parameters in a model that is otherwise frozen.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from headrace.config import Blocks
from headrace.planning import FEWEST_ROWS, Key, goes_by_rows
from headrace.weights.model.experts import Experts, experts_of, lists_experts
from headrace.weights.model.inventory import USE_WEIGHTS_OF_CHILDREN, Inventory
from headrace.weights.model.layout import travel_dtype
from headrace.weights.model.precision import matching

_ADAPTER_SHARE = 0.1  # of all bytes: trainable parameters that take no more count as adapters
_SMALL_SHARE = 1 / 16  # of a unit: a module with fewer bytes is not worth a trip of its own
_MISSING_SHARE = 1 / 32  # of the bytes without room: the unit of a model that decodes, see `_unit_of_decoding`
_HALF_BYTES = 4 * 2**20  # of the host memory where rows are gathered: a copy of this size has a link's full speed
_HALF_SHARE = 1 / 8  # of a table, at the most
_VISIT_BYTES = 2 * 2**20  # cross a link of 25 to 50 GB/s while the host makes one visit


@dataclass
class Part:
    """Parameters that travel together, by id, and the modules whose call is a visit to them."""

    name: str
    keys: list[int]
    sites: list[nn.Module]
    row_bytes: int = 0  # bytes of one row of an embedding table that travels by rows; 0: it travels whole
    experts: Experts | None = None  # the experts that travel one by one; None: it travels whole
    expert_key: Key | None = None  # (layer, number) of an expert that is a module and comes when it is called

    def least_bytes(self, inventory: Inventory) -> int:
        """The least device memory that it needs while it computes."""
        return FEWEST_ROWS * self.row_bytes or inventory.nbytes(self.keys)


@dataclass
class Partition:
    """A model's streamed parts, in order of registration, and its resident parts, which have no sites of their own."""

    streamed: list[Part]
    resident: list[Part]

    @property
    def bank_bytes(self) -> int:
        """The least device memory that experts need beside other parts: enough for the experts of one token."""
        experts = [part.experts for part in self.streamed if part.experts is not None]
        slots = max((one.routed for one in experts), default=0)
        return slots * max((one.slice_bytes for one in experts), default=0)


def partition(
    model: nn.Module,
    inventory: Inventory,
    blocks: Blocks,
    resident: Sequence[nn.Module | str],
    budget_bytes: int,
    *,
    tables_by_rows: bool = True,
) -> Partition:
    """Cuts the model. `tables_by_rows`: whether embedding tables may travel by rows.

    Raises ValueError for modules or patterns that overlap, match nothing or are not the model's.
    """
    cutter = _Cutter(model, inventory, budget_bytes)
    return cutter.cut(blocks, resident, tables_by_rows=tables_by_rows)


class _Cutter:
    """The walk over one model. A parameter belongs to the part that takes it first."""

    def __init__(self, model: nn.Module, inventory: Inventory, budget_bytes: int) -> None:
        self._model = model
        self._inventory = inventory
        self._nbytes = inventory.nbytes
        self._budget_bytes = budget_bytes
        self._taken: set[int] = set()
        self._parts: list[Part] = []
        self._kept: list[int] = []  # orphans and small leaves

    def cut(self, blocks: Blocks, resident: Sequence[nn.Module | str], *, tables_by_rows: bool) -> Partition:
        kept_parts = [Part("resident", self._take(self._resident_keys(resident)), [])]
        kept_parts.append(Part("adapters", self._take(self._adapter_keys()), []))
        merge_bytes = 0
        if isinstance(blocks, int):
            self._cut_experts()
            unit_bytes = blocks
            merge_bytes = min(unit_bytes, self._budget_bytes // 2)  # so that one can arrive while another computes
        elif blocks == "auto":
            self._cut_experts()
            unit_bytes = self._repeated_layer_bytes() or self._budget_bytes // 2
            fine_bytes = self._unit_of_decoding()
            # A model that writes text token by token, as those of transformers do, and is not being trained.
            decodes = not self._model.training and callable(getattr(self._model, "generate", None))
            if decodes and 2 * fine_bytes <= unit_bytes:
                unit_bytes = merge_bytes = fine_bytes
        else:
            for module in self._given_modules(blocks):
                self._add_part(module)
            unit_bytes = max((self._nbytes(part.keys) for part in self._parts), default=0)
        self._walk(self._model, min(unit_bytes, self._budget_bytes // 2) or 1)
        kept_parts.append(Part("small", self._kept, []))
        if tables_by_rows:
            self._cut_tables_by_rows(sum(self._nbytes(part.keys) for part in kept_parts))
        parts = _merged(self._parts, self._nbytes, merge_bytes)
        order = {key: index for index, key in enumerate(self._inventory.members)}
        parts.sort(key=lambda part: order[part.keys[0]])
        return Partition(parts, [part for part in kept_parts if part.keys])

    # the walk ---------------------------------------------------------------------------------------------------------
    def _walk(self, module: nn.Module, unit_bytes: int) -> None:
        """Makes a part of a module not larger than the unit; cuts a larger one into its children, if it has any."""
        keys = self._untaken(self._inventory.below(module))
        if not keys:
            return
        inner = [child for child in module.children() if self._untaken(self._inventory.below(child))]
        whole = module is not self._model and self._nbytes(keys) <= unit_bytes
        if whole or not inner or isinstance(module, (nn.RNNBase, *USE_WEIGHTS_OF_CHILDREN)):
            if self._nbytes(keys) < unit_bytes * _SMALL_SHARE and not _in_list(self._inventory.parents.get(module)):
                self._kept += self._take(keys)
            else:
                self._add_part(module)
            return
        self._kept += self._take(self._inventory.owned.get(module, ()))
        for child in inner:
            self._walk(child, unit_bytes)

    def _cut_experts(self) -> None:
        """Makes parts of experts that travel one by one, unless all weights stay on the device."""
        if self._nbytes(list(self._inventory.members)) <= self._budget_bytes:
            return
        layers = 0
        for module, name in self._inventory.names.items():
            if lists_experts(module, name, by_name=not self._model.training):  # training calls most experts
                for number, expert in enumerate(module.children()):
                    self._add_part(expert, expert_key=(layers, number))
                layers += 1
            experts = experts_of(module, self._inventory)
            if experts is not None and self._untaken(self._inventory.below(module)) == self._inventory.below(module):
                self._add_part(module, experts=experts)

    def _cut_tables_by_rows(self, kept_bytes: int) -> None:
        """Has embedding tables travel by rows where that pays, unless all weights stay on the device."""
        sizes = [self._nbytes(part.keys) for part in self._parts]
        if kept_bytes + sum(sizes) <= self._budget_bytes:
            return
        rows = [_row_bytes_of(part.keys, part.sites, self._inventory) for part in self._parts]
        whole = [part.experts is None and not row_bytes for part, row_bytes in zip(self._parts, rows, strict=True)]
        largest = max((size for size, is_whole in zip(sizes, whole, strict=True) if is_whole), default=0)
        for part, size, row_bytes in zip(self._parts, sizes, rows, strict=True):
            trained = self._model.training and self._inventory.members[part.keys[0]].parameter.requires_grad
            if size > FEWEST_ROWS * row_bytes and goes_by_rows(size, largest, trained=trained):
                part.row_bytes = row_bytes

    def _repeated_layer_bytes(self) -> int:
        """Bytes of the largest element of the outermost lists of layers."""
        largest = 0
        inside: set[nn.Module] = set()
        for module in self._model.modules():
            if module in inside or not _in_list(module):
                continue
            sizes = [self._nbytes(self._untaken(self._inventory.below(child))) for child in module.children()]
            if sum(size > 0 for size in sizes) > 1:
                inside.update(module.modules())
                largest = max(largest, *sizes)
        return largest

    def _unit_of_decoding(self) -> int:
        """Bytes of the blocks that suit a model that nearly fits and uses each weight for little compute.

        A block has room only once another one has computed. So each pass moves about one block more over the link than
        the bytes without room, and a block should be small beside these. But the host visits all blocks in a pass, also
        those that stay: with too many blocks, visits take longer than the link needs.
        """
        total_bytes = self._nbytes(list(self._inventory.members))
        missing_bytes = total_bytes - self._budget_bytes
        if missing_bytes <= 0:
            return total_bytes
        return max(int(missing_bytes * _MISSING_SHARE), _VISIT_BYTES * total_bytes // missing_bytes)

    # what stays -------------------------------------------------------------------------------------------------------
    def _resident_keys(self, resident: Sequence[nn.Module | str]) -> list[int]:
        keys: list[int] = []
        names = self._inventory.names
        for chosen in resident:
            if isinstance(chosen, nn.Module):
                found = self._inventory.below(self._own(chosen, "resident"))
            else:
                found = [key for module in matching(chosen, names) for key in self._inventory.below(module)]
                found += self._inventory.named(chosen)
            if not found:
                raise ValueError(
                    f"resident={chosen!r} matches no module or parameter of the model; see named_modules()"
                )
            keys += found
        return keys

    def _adapter_keys(self) -> list[int]:
        members = self._inventory.members
        trainable = [key for key, member in members.items() if member.parameter.requires_grad]
        nbytes = self._nbytes(trainable)
        few = nbytes <= _ADAPTER_SHARE * self._nbytes(list(members)) and nbytes <= self._budget_bytes // 4
        return trainable if few else []

    # what the user gives ----------------------------------------------------------------------------------------------
    def _given_modules(self, blocks: Iterable[nn.Module | str]) -> list[nn.Module]:
        chosen: list[nn.Module] = []
        covered: dict[nn.Module, str] = {}  # every module inside a chosen one, and the chosen one's name
        names = self._inventory.names
        for given in blocks:
            found = [self._own(given, "blocks")] if isinstance(given, nn.Module) else matching(given, names)
            if not found:
                raise ValueError(
                    f"blocks={given!r} matches no module of the model; see model.named_modules() for names"
                )
            for module in _elements(found):
                name = names[module]
                if not self._inventory.below(module):
                    raise ValueError(f"block {name!r} holds no parameters; leave it out of blocks")
                for inner in module.modules():
                    if covered.setdefault(inner, name) != name or module in chosen:
                        other = covered[inner]
                        raise ValueError(f"blocks overlap: {name!r} and {other!r} share modules; give each module once")
                chosen.append(module)
        return chosen

    def _own(self, module: nn.Module, setting: str) -> nn.Module:
        for element in _elements([module]):
            if element not in self._inventory.names:
                raise ValueError(f"{setting} names a {type(element).__name__} that is not a part of the model")
        return module

    # bookkeeping ------------------------------------------------------------------------------------------------------
    def _add_part(self, module: nn.Module, experts: Experts | None = None, expert_key: Key | None = None) -> None:
        keys = self._take(self._inventory.below(module))
        if keys:
            sites = list(_elements([module]))
            self._parts.append(Part(self._inventory.names[module], keys, sites, experts=experts, expert_key=expert_key))

    def _take(self, keys: Iterable[int]) -> list[int]:
        taken = self._untaken(list(dict.fromkeys(keys)))
        self._taken.update(taken)
        return taken

    def _untaken(self, keys: Iterable[int]) -> list[int]:
        return [key for key in keys if key not in self._taken]


def _in_list(module: nn.Module | None) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _elements(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules, with the elements of each ModuleList in its place, as a ModuleList is never called itself."""
    for module in modules:
        if isinstance(module, nn.ModuleList):
            yield from _elements(module.children())
        else:
            yield module


def _merged(parts: list[Part], nbytes: Callable[[list[int]], int], limit_bytes: int) -> list[Part]:
    """Joins neighbouring parts while they stay within the limit. Parts that travel by rows or experts stay alone."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        alone = any(one.row_bytes or one.experts or one.expert_key for one in (last, part) if one is not None)
        if last is not None and not alone and nbytes(last.keys) + nbytes(part.keys) <= limit_bytes:
            merged[-1] = Part(
                f"{last.name.split(' to ')[0]} to {part.name}", last.keys + part.keys, last.sites + part.sites
            )
        else:
            merged.append(part)
    return merged


# tables: this is decided once for each, and each lookup decides for itself whether it goes by rows --------------------
def gathering_bytes(table_bytes: int, row_bytes: int) -> int:
    """Bytes of one half of the host memory where rows are gathered: one half is sent while the other is filled."""
    nbytes = min(_HALF_BYTES, int(table_bytes * _HALF_SHARE))
    return max(row_bytes, nbytes // row_bytes * row_bytes) if row_bytes else 0


def _row_bytes_of(keys: Sequence[int], modules: Sequence[nn.Module], inventory: Inventory) -> int:
    """Bytes of one row on the device, if these parameters are one table and nothing else; 0 if they travel whole.

    Several embeddings may hold the table, as in T5, whose encoder and decoder do.
    """
    if len(keys) != 1 or len(modules) != 1:
        return 0
    key = keys[0]
    parameter = inventory.members[key].parameter
    holders = [module for module, own in inventory.owned.items() if key in own]
    alone = parameter.dim() == 2 and inventory.can_be_cut(key, places=len(holders))
    only_looked_up = all(looks_rows_up(module) and inventory.owned[module] == [key] for module in holders)
    if not (alone and only_looked_up):
        return 0
    return parameter.shape[1] * travel_dtype(parameter, inventory.param_dtype).itemsize


def looks_rows_up(module: Any) -> bool:
    """Whether a call of the module takes rows of its weight, and does nothing else with it."""
    return (
        type(module) is nn.Embedding
        and module.max_norm is None
        and not module.sparse
        and not module.scale_grad_by_freq
        and "weight" in module._parameters
    )
