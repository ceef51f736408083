"""How many bytes may a model take, in which tier? As many as the user set, or the machine has; checked first."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from headrace.config import ActivationConfig, OffloadConfig, format_bytes, parse_bytes
from headrace.errors import BudgetError
from headrace.memory.arena import aligned, whole_pages
from headrace.memory.disk import LEAST_READING_BYTES
from headrace.runtime.device import free_device_bytes, is_accelerator
from headrace.runtime.host import available_host_bytes, spare_host_bytes
from headrace.weights.model.experts import takes_single_experts
from headrace.weights.model.inventory import Inventory
from headrace.weights.model.layout import travel_dtype
from headrace.weights.model.partition import Part, Partition, gathering_bytes
from headrace.weights.rest.materialize import Materialized
from headrace.weights.rest.placement import Placement, place

_DEVICE_RESERVE = 0.1  # of free device memory: for workspaces and fragmentation, when no device_memory is given
_READING_BYTES = 32 * 2**20  # keeps a drive busy
_ACTIVATIONS_SHARE = 0.25  # of host memory, where blocks rest on disk and the user set no share


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Ceilings in bytes. `device_bytes` holds the weights on the device and the modules' buffers."""

    device_bytes: int
    buffer_bytes: int
    host_bytes: int
    ranks: int = 1  # ranks of a node, which share the host budget
    others_bytes: int = 0  # which models that share the device budget hold now, and give up

    @classmethod
    def of(cls, model: nn.Module, inventory: Inventory, config: OffloadConfig) -> "Budgets":
        """The budgets that the user set, or else what device and host have to spare."""
        weights_bytes = inventory.nbytes(list(inventory.members))
        staying = {id(buffer): buffer.nbytes for buffer in model.buffers() if id(buffer) not in inventory.buffers}
        buffer_bytes = sum(staying.values())
        device_bytes, host_bytes = config.device_memory_bytes, config.host_memory_bytes
        if device_bytes is None and is_accelerator(config.device):
            device_bytes = int(free_device_bytes(config.device) * (1 - _DEVICE_RESERVE))
        elif config.computes_at_home:  # blocks take no memory of their own, but in a few cases
            device_bytes = 2 * weights_bytes + buffer_bytes
        elif device_bytes is None:
            device_bytes = min(available_host_bytes() // 2, 2 * weights_bytes + buffer_bytes)
        others_bytes = 0
        if config.shared is not None:
            others_bytes = 0 if config.shared.device_bytes is None else config.shared.device_held_bytes
            host_bytes = host_bytes if config.shared.host_bytes is None else config.shared.host_left_bytes
        if host_bytes is None:  # weights in host memory count as available: they are moved, not copied
            held_bytes = weights_bytes if config.checkpoint is None else 0
            host_bytes = spare_host_bytes() + held_bytes
        return cls(
            device_bytes=device_bytes, buffer_bytes=buffer_bytes, host_bytes=host_bytes, others_bytes=others_bytes
        )

    @property
    def weights_bytes(self) -> int:
        """The bytes that the device budget leaves for weights."""
        return self.device_bytes - self.buffer_bytes

    @property
    def reading_bytes(self) -> int:
        """Bytes of host memory through which blocks that rest on the host are read from a checkpoint."""
        return max(LEAST_READING_BYTES, min(_READING_BYTES, self.host_bytes // 16))

    def checked(self, inventory: Inventory, partition: Callable[[int], Partition], device: torch.device) -> Partition:
        """The parts into which `partition` cuts the model for the bytes that are left for weights. Raises BudgetError
        if they cannot fit, before anything is allocated.
        """
        parts = partition(self.weights_bytes)
        needs = _Needs.of(inventory, parts, self.buffer_bytes)
        if needs.nbytes > self.device_bytes:
            advice = _smaller_blocks(inventory, needs.keys, (self.device_bytes - needs.kept_bytes) // 2)
            least, enough = needs, self.device_bytes
            while needs.nbytes > enough:  # with more memory, more small weights may stay
                least, enough = needs, parse_bytes(format_bytes(needs.nbytes, at_least=True))
                needs = _Needs.of(inventory, partition(enough - self.buffer_bytes), self.buffer_bytes)
            raise BudgetError(
                f"{least}; device_memory allows {format_bytes(self.device_bytes)}; raise it to at least"
                f" {format_bytes(enough, at_least=True)}{advice}"
            )
        sizes = [part.least_bytes(inventory) for part in parts.streamed if part.experts is None]
        all_bytes = sum(inventory.nbytes(part.keys) for part in parts.streamed if part.experts is not None)
        wanted_bytes = min(self.device_bytes, sum(sizes) + needs.kept_bytes + all_bytes)
        if is_accelerator(device) and wanted_bytes > (free_bytes := free_device_bytes(device) + self.others_bytes):
            raise BudgetError(
                f"device_memory={format_bytes(self.device_bytes)} is more than {device} has free,"
                f" {format_bytes(free_bytes)}; lower it, or end what else uses the device"
            )
        return parts

    def share_for_activations(
        self, inventory: Inventory, parts: Partition, config: OffloadConfig
    ) -> ActivationConfig | None:
        """The settings of activations, with a share of host memory if blocks that may rest on disk would fill it.

        If blocks leave more than that share, activations get what is left. As the user did not say how much they need,
        activations that find no room stay on the device.
        """
        activations = config.activations
        if activations is None or activations.host_memory_bytes is not None or config.disk is None:
            return activations
        share_bytes = int(self.host_bytes * _ACTIVATIONS_SHARE)
        if replace(self, host_bytes=self.host_bytes - share_bytes).place(inventory, parts, config).needs_no_staging:
            return replace(activations, stays_without_room=True)
        return replace(activations, host_memory_bytes=share_bytes, stays_without_room=True)

    def place(
        self, inventory: Inventory, parts: Partition, config: OffloadConfig, materialized: Materialized | None = None
    ) -> Placement:
        """Decides which blocks rest on the host, and which on disk. Raises BudgetError when they have no room.

        `materialized`: the parameters that lie in a checkpoint.
        """
        reserved_bytes = 0 if config.activations is None else config.activations.host_memory_bytes or 0
        host_bytes = self.host_bytes - reserved_bytes
        sizes = {part.name: inventory.nbytes(part.keys) for part in parts.streamed}
        resident_bytes = sum(whole_pages(inventory.nbytes(part.keys)) for part in parts.resident)
        if config.mesh is not None:  # homes that travel in another dtype lie in memory that headrace makes
            resident_bytes += sum(whole_pages(inventory.cast_bytes(part.keys)) for part in parts.resident)
        rows = [gathering_bytes(sizes[part.name], part.row_bytes) for part in parts.streamed]
        resident_bytes += 2 * whole_pages(max(rows)) if any(rows) else 0
        if config.disk is not None or config.checkpoint is not None:
            trained = [member.parameter for member in inventory.members.values() if member.parameter.requires_grad]
            gradient_bytes = sum(p.numel() * (config.grad_dtype or p.dtype).itemsize for p in trained)
            wide = {part.name: inventory.cast_bytes(part.keys) for part in parts.streamed}
            free_bytes = host_bytes - resident_bytes - (self.reading_bytes if config.checkpoint is not None else 0)
            sizes = {name: sizes[name] + wide[name] for name in sizes}
            placement = place(
                sizes,
                self.weights_bytes - sum(inventory.nbytes(part.keys) for part in parts.resident),
                free_bytes,
                gradient_bytes if config.disk is not None else 0,
                ranks=self.ranks,
                gradient_staging_bytes=None
                if config.mesh is None
                else self._gradient_staging_bytes(inventory, parts, config),
            )
            alone = [part for part in parts.streamed if _rests_alone_on_disk(part, inventory, config, materialized)]
            return _with_single_experts(placement, {part.name: sizes[part.name] for part in alone})
        arenas_bytes = resident_bytes + sum(map(whole_pages, sizes.values()))
        if config.mesh is not None:
            arenas_bytes += sum(whole_pages(inventory.cast_bytes(part.keys)) for part in parts.streamed)
        if arenas_bytes > host_bytes:
            beside = f" beside {format_bytes(reserved_bytes)} for activations" if reserved_bytes else ""
            raise BudgetError(
                f"weights need {format_bytes(arenas_bytes)} of host memory in all{beside}; host_memory allows"
                f" {format_bytes(self.host_bytes)}; raise it to at least"
                f" {format_bytes(arenas_bytes + reserved_bytes, at_least=True)},"
                ' or pass a directory, such as disk="/nvme/headrace", where blocks can rest',
                tier="host",
            )
        return Placement()

    def _gradient_staging_bytes(self, inventory: Inventory, parts: Partition, config: OffloadConfig) -> int:
        """Bytes of host memory through which ranks give gradients: twice the largest block's from each rank."""
        largest_bytes = 0
        for part in (*parts.streamed, *parts.resident):
            given = [inventory.members[key].parameter for key in part.keys]
            sizes = [p.numel() * _given_dtype(p, inventory, config).itemsize for p in given if p.requires_grad]
            largest_bytes = max(largest_bytes, aligned(len(sizes)) + sum(map(aligned, sizes)))
        return 2 * whole_pages(self.ranks * largest_bytes)


def _rests_alone_on_disk(
    part: Part, inventory: Inventory, config: OffloadConfig, materialized: Materialized | None
) -> bool:
    """Whether the part has experts that come one by one, and may rest on disk as a whole. Never so with a mesh."""
    if part.experts is None or config.mesh is not None:
        return False
    parameters = [inventory.members[key].parameter for key in part.keys]
    if any(p.requires_grad for p in parameters):
        return False  # training would read whole layers from disk, which have room elsewhere
    if any(site.training and not takes_single_experts(site) for site in part.sites):
        return False
    in_files = materialized is not None and all(materialized.name_of(p) is not None for p in parameters)
    return config.disk is not None or (in_files and not inventory.cast_bytes(part.keys))


def _with_single_experts(placement: Placement, sizes: Mapping[str, int]) -> Placement:
    """Puts all of these blocks of experts on disk if one is there: the freed room is for single experts."""
    on_host = {name: whole_pages(nbytes) for name, nbytes in sizes.items() if name not in placement.on_disk}
    if len(on_host) == len(sizes):
        return placement
    return replace(
        placement,
        on_disk=placement.on_disk.union(on_host),
        disk_bytes=placement.disk_bytes + sum(on_host.values()),
        experts_bytes=sum(on_host.values()),
    )


@dataclass(frozen=True, kw_only=True)
class _Needs:
    """The least device memory for a model cut into these parts: what stays, and the largest blocks used at once."""

    blocks: frozenset[str]
    keys: list[int]  # ids of the blocks' parameters
    blocks_bytes: int
    kept: str
    kept_bytes: int

    @classmethod
    def of(cls, inventory: Inventory, parts: Partition, buffer_bytes: int) -> "_Needs":
        sizes = {part.name: part.least_bytes(inventory) for part in parts.streamed if part.experts is None}
        order = {name: -index for index, name in enumerate(sizes)}  # among blocks of equal size the first counts

        def rank(names: frozenset[str]) -> tuple[int, int]:
            return sum(map(sizes.__getitem__, names)), max(map(order.__getitem__, names))

        largest = max(_at_once(inventory, parts), key=rank, default=frozenset[str]())
        kept_bytes = sum(inventory.nbytes(part.keys) for part in parts.resident) + buffer_bytes + parts.bank_bytes
        return cls(
            blocks=largest,
            keys=[key for part in parts.streamed if part.name in largest for key in part.keys],
            blocks_bytes=sum(map(sizes.__getitem__, largest)),
            kept="resident weights, buffers and experts" if parts.bank_bytes else "resident weights and buffers",
            kept_bytes=kept_bytes,
        )

    @property
    def nbytes(self) -> int:
        return self.blocks_bytes + self.kept_bytes

    def __str__(self) -> str:
        if not self.blocks:
            return f"{self.kept} need {format_bytes(self.kept_bytes)}"
        blocks = " and ".join(map(repr, sorted(self.blocks)))
        what = f"block {blocks} needs" if len(self.blocks) == 1 else f"blocks {blocks}, which share weights, need"
        return f"{what} {format_bytes(self.blocks_bytes)} beside {format_bytes(self.kept_bytes)} of {self.kept}"


def _given_dtype(parameter: nn.Parameter, inventory: Inventory, config: OffloadConfig) -> torch.dtype:
    """The dtype in which ranks give the gradients of a parameter."""
    travels = travel_dtype(parameter, inventory.param_dtype)
    return torch.promote_types(travels, config.grad_dtype or parameter.dtype)


def _at_once(inventory: Inventory, parts: Partition) -> set[frozenset[str]]:
    """The sets of streamed parts, by name, that nested calls use at the same time: for each module its own parts, those
    whose weights it holds, and the same of the modules around it. Weights that it borrows from other modules are only
    found during a pass.
    """
    whole = [part for part in parts.streamed if part.experts is None]
    part_of = {key: part.name for part in whole for key in part.keys}
    mains: dict[nn.Module, set[str]] = defaultdict(set)
    for part in whole:
        for site in part.sites:
            mains[site].add(part.name)
    used: set[frozenset[str]] = set()
    seen: set[tuple[nn.Module, frozenset[str]]] = set()
    inner = {child for module in inventory.names for child in module.children()}
    waiting = [(module, frozenset[str]()) for module in inventory.names if module not in inner]
    while waiting:
        module, around = waiting.pop()
        owned = {part_of[key] for key in inventory.owned.get(module, ()) if key in part_of}
        now = around | mains[module] | owned
        if (module, now) not in seen:
            seen.add((module, now))
            used.add(now)
            waiting += [(child, now) for child in module.children()]
    return used - {frozenset()}


def _smaller_blocks(inventory: Inventory, keys: list[int], limit_bytes: int) -> str:
    """The advice to cut these parameters into blocks of `limit_bytes`; empty if one of them is too large for that."""
    if max((inventory.nbytes([key]) for key in keys), default=limit_bytes) >= limit_bytes:
        return ""
    return f", or pass smaller blocks such as blocks={format_bytes(limit_bytes).replace(' ', '')!r}"
