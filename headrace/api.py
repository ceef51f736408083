"""How is a model offloaded? `offload()` wires the layers together, and `Offloaded` is the handle on the result."""

import contextlib
import json
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from headrace import live
from headrace.activation_offloading import ActivationOffloading
from headrace.activations.calls import refuse_watched
from headrace.activations.targets import find_targets
from headrace.ahead import probed_rates
from headrace.checkpoint.directory import replace_whole
from headrace.config import (
    BlocksSpec,
    OffloadConfig,
    Size,
    activation_config,
    blocks_of,
    check_count,
    check_flag,
    directory_of,
    format_bytes,
    is_number,
    modules_of,
    param_dtypes,
    parse_budget,
    parse_bytes,
    path_of,
    prefetch_blocks,
)
from headrace.errors import StateError
from headrace.memory.disk import Checkpoint, StagingRing
from headrace.memory.ledger import Ledger, Tier
from headrace.memory.shared_budget import Share, current_budget
from headrace.micro_batches import MicroBatches
from headrace.planning import Plan
from headrace.report import Report, RunRecord, Stats
from headrace.runtime.device import is_accelerator, resolve_device
from headrace.runtime.grad_scaler import grad_scaler_waits
from headrace.runtime.lanes import Lane, open_lanes
from headrace.runtime.node import Node
from headrace.runtime.pace import Pace
from headrace.runtime.pending import unit_of
from headrace.runtime.progress import progress
from headrace.runtime.ways import way_of
from headrace.weights.meter import Checkpointed, Meter
from headrace.weights.model.inventory import Inventory, take_inventory
from headrace.weights.model.module_buffers import ModuleBuffers, may_be_common, names_of_each_rank
from headrace.weights.model.partition import Partition, partition
from headrace.weights.model.places import Member
from headrace.weights.model.precision import precision_of
from headrace.weights.movement.averaging import AveragedGradients
from headrace.weights.movement.block import Block
from headrace.weights.movement.cache_copies import PURPOSE as CACHES
from headrace.weights.movement.caches import Caches
from headrace.weights.movement.common import CommonHomes
from headrace.weights.movement.executor import Executor
from headrace.weights.movement.flow import GradientFlow
from headrace.weights.movement.gathering import Gathers
from headrace.weights.movement.gradients import Gradients
from headrace.weights.movement.residency import Residency
from headrace.weights.movement.room import Room
from headrace.weights.passes.attachment import Attachment
from headrace.weights.passes.call import Passes
from headrace.weights.passes.engine import Engine
from headrace.weights.passes.refusals import refuse_unmanageable
from headrace.weights.passes.steps import OptimizerSteps
from headrace.weights.rest.budgets import Budgets
from headrace.weights.rest.fetching import Fetching
from headrace.weights.rest.materialize import Materialized, materialize
from headrace.weights.rest.placement import Placement
from headrace.weights.rest.tiers import Tiers

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy  # which takes long to import
else:
    MixedPrecisionPolicy = Any
_PolicySpec = torch.dtype | MixedPrecisionPolicy | None

T = TypeVar("T")
_LEAST_BYTES = 4096  # in a window of limited copies: each of so few bytes takes longer than they do


def offload(
    model: nn.Module,
    *,
    device: torch.device | str | int | None = None,
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    disk: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    blocks: BlocksSpec = "auto",
    resident: Sequence[nn.Module | str] = (),
    prefetch: int | Literal["auto"] = "auto",
    param_dtype: "_PolicySpec | Mapping[str, _PolicySpec]" = None,
    grad_dtype: torch.dtype | None = None,
    activations: bool | Mapping[str, Any] = False,
    mesh: Any = None,
    onload: Literal["own", "gather", "auto"] = "own",
    packed: bool | Literal["disk"] = "disk",
    check_gradients: bool = True,
) -> "Offloaded":
    """Offloads `model` in place, for training and inference: its weights visit `device` block by block as it computes.

    The parameters stay the model's own `nn.Parameter` objects, on the host, so optimizers, `state_dict`, clipping and
    saving work as on a CPU model. Inputs are moved to the device, and outputs stay there. Results equal those of the
    plain model bit for bit. Quantised weights travel packed, and are not trained.

    - `device`: where to compute. Default: the current accelerator, or the CPU if there is none.
    - `device_memory`: ceiling in bytes for weights on the device (resident, visiting and arriving together), for
      buffers of modules and for layers of `offload_cache()`. Give an int, or text such as "8GiB" or "25%" (of the
      weights), here and for `host_memory`. Gradients on their way out (those of two blocks at most) and activations
      come on top. Default: the memory that is free now, less a tenth; on the CPU, weights then compute where they rest,
      unless `disk`, `checkpoint` or `mesh` is given, too.
    - `host_memory`: ceiling in bytes for weights, gradients, activations, `offload_cache()` and staging buffers in host
      memory. What optimizers hold (`optimizer.held_bytes()`) comes on top, but counts in a shared `headrace.budget()`.
      Default: the memory that is free on the machine and in the cgroup, less 15%.
    - `disk`: a directory on a local drive, for blocks (and gradients) that do not fit in `host_memory`. It belongs to
      this model alone while the model is offloaded. Parameters on disk are tensors over memory-mapped files: code reads
      and writes them as usual.
    - `checkpoint`: a safetensors file, an index of shards, or a directory of them. Parameters on the meta device take
      their values from these, under the names of `state_dict()` and in the files' dtypes. Weights that do not fit in
      `host_memory` are read in place, and move to `disk` when they change.
    - `blocks`: what travels together: "auto" (repeated layers, or parts of layers if a model decodes and nearly fits),
      a size such as "256MiB", or a list of modules, ModuleLists and name patterns (fnmatch, such as "model.layers.*").
    - `resident`: modules and name patterns that stay on the device. Adapters and small weights outside the blocks stay
      anyway.
    - `prefetch`: how many visits ahead a block may be loaded. "auto": the plan decides.
    - `param_dtype`: dtype in which floating-point weights travel and compute; the parameters on the host keep theirs.
      Or an FSDP2 `MixedPrecisionPolicy`, which also casts the model's floating-point inputs and outputs. Or a dict of
      dtypes, policies and None (the own dtype) by module names and name patterns ("" is the model; a name counts more
      than a pattern, a later pattern more than an earlier one). A parameter belongs to the nearest module around it
      that has an entry; modules that come after `offload()` have none of their own. Inputs and outputs are cast only
      where a policy is given, as by `fully_shard` of that module.
    - `grad_dtype`: dtype of `parameter.grad`, in which micro-batches are summed. Default: the parameter's own dtype, or
      the `reduce_dtype` of the model's policy. No module can have another.
    - `activations`: True, or a dict of settings of `offload_activations` such as `{"device_memory": "2GiB"}`. What
      autograd saves then waits on the host, too. The plans for weights and for activations take each other's copies
      into account. A `host_memory` in the dict is the part of the `host_memory` here that is reserved for activations;
      if blocks rest on disk, its default is a quarter. Activations that do not fit in that part stay on the device.

    - `mesh`: a DeviceMesh (of one dimension, or of all ranks) whose ranks train one model, each with its own batches.
      All ranks call this with the same model. The ranks of a node share one copy of it, of its gradients and of what
      headrace's optimizers keep; `host_memory` is then the budget of the whole node, including each rank's staging
      buffers, and `disk` has one file per node. Gradients are averaged over all ranks. In forwards with gradients, all
      ranks get the first rank's buffers, as in DistributedDataParallel. Linux only.
    - `onload`: with `mesh`, how blocks arrive and gradients leave in training. "own": each device loads whole blocks
      over its own link. "gather": each device loads 1/N of a block over its link and gets the rest from the other
      devices of the node, through the mesh's process group. This is for devices that reach each other faster than the
      host (NVLink). With three or more ranks, gradients are then summed in the order of that group's collective.
      "auto": both are tried and the faster one is used; the report says which.
    - `packed`: "disk" also keeps a lossless packed copy of frozen bfloat16 weights that are read from disk repeatedly,
      if that is quicker: then only three quarters of their bytes are read. True also packs weights in host memory, in
      what the host budget leaves, for an accelerator with Triton: then three quarters of their bytes cross the link.
      (This has not been timed on an accelerator yet.) False packs nothing.
    - `check_gradients`: whether a backward raises StateError if it goes through the model and cannot reach any of the
      parameters that require gradients, because something is detached. After the first gradient, nothing is checked.

    Raises BudgetError when a budget is too small, LayoutError for parameters that cannot travel (on meta, sparse, or
    trained tensor subclasses), StateError for a model that is offloaded already, is wrapped for data-parallel training,
    or carries hooks of accelerate or diffusers, and ValueError or TypeError for invalid settings. Nothing has been
    changed in any of these cases. Host memory for gradients is allocated by the first pass with gradients, which raises
    BudgetError when `host_memory` has no room for them.

    Gradients of parameters come only from `backward()`: `torch.autograd.grad` and `backward(inputs=...)` do not find
    the parameters, because the graph holds their copies on the device.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    config = OffloadConfig(
        device=resolve_device(device),
        device_memory_bytes=_budget("device_memory", device_memory, model),
        host_memory_bytes=_budget("host_memory", host_memory, model),
        disk=directory_of(disk),
        checkpoint=checkpoint if isinstance(checkpoint, Checkpoint | None) else path_of(checkpoint, "checkpoint"),
        blocks=blocks_of(blocks),
        resident=modules_of(resident, "resident"),
        prefetch_blocks=prefetch_blocks(prefetch),
        param_dtype=param_dtypes(param_dtype),
        grad_dtype=grad_dtype,
        activations=activation_config(activations),
        mesh=mesh,
        onload=onload,
        packed=packed,
        check_gradients=check_gradients,
    )
    config = _with_shared_budget(config)
    refuse_watched(model, ", and pass activations=True here")
    refuse_unmanageable(model, with_checkpoint=config.checkpoint is not None)
    if config.activations is not None:
        find_targets(model, config.activations)
        if config.activations.tier == "disk" and config.disk is None:
            raise ValueError('activations with tier="disk" need a directory; give disk="/path/on/a/local/drive"')
    return Offloaded(model, config)


def _with_shared_budget(config: OffloadConfig) -> OffloadConfig:
    """The settings with the sizes of the `headrace.budget()` around the caller, if there is one."""
    shared = current_budget()
    if shared is None:
        return config
    if config.mesh is not None:
        raise ValueError("mesh= has budgets of its own, which ranks agree on; offload it outside of headrace.budget()")
    for name, size in (("device_memory", shared.device_bytes), ("host_memory", shared.host_bytes)):
        if size is not None and getattr(config, f"{name}_bytes") is not None:
            raise ValueError(
                f"{name} is given, and headrace.budget() around this call has one for all of its models; leave out one"
            )
    return replace(
        config,
        shared=shared,
        device_memory_bytes=config.device_memory_bytes if shared.device_bytes is None else shared.device_bytes,
        host_memory_bytes=config.host_memory_bytes if shared.host_bytes is None else shared.host_bytes,
    )


def _name_of(model: nn.Module) -> str:
    return ", ".join(model) if type(model) is nn.ModuleDict else type(model).__name__  # or of a pipeline's parts


def _budget(name: str, size: Size | None, model: nn.Module) -> int | None:
    """The bytes. Weights are counted only if the budget is a share of them: some models cannot be counted."""
    share = isinstance(size, str) and "%" in size
    whole_bytes = sum(parameter.nbytes for parameter in model.parameters()) if share else 0
    return None if size is None else parse_budget(size, name=name, whole_bytes=whole_bytes)


class Offloaded(live.Handle, live.ModelHandle):
    """The handle on an offloaded model, made by `offload()`. As a context manager it calls `remove()` at the end."""

    def __init__(self, model: nn.Module, config: OffloadConfig) -> None:
        self._given = config
        self._start(model)

    def __repr__(self) -> str:
        if self._attachment is None:
            return f"<{self._described}, removed>"
        device, host = format_bytes(self._budgets.device_bytes), format_bytes(self._budgets.host_bytes)
        return f"<{self._described}, offloaded on {self._device}: device_memory={device!r}, host_memory={host!r}>"

    def _start(self, model: nn.Module) -> None:
        self._config = config = self._given
        self._device = config.device
        self._node = None if config.mesh is None else Node(config.mesh)
        self._way = None if self._node is None else way_of(config.onload, self._node, config.device)
        self._attachment: Attachment | None = None
        self._made: list[Block] = []
        ranks = 1 if self._node is None else self._node.size
        self._ledger = Ledger(
            frozenset({"weights", "buffers", "optimizer"}), self._own_part(config.host_memory_bytes), ranks
        )
        self._share: Share | None = None
        if config.shared is not None:
            self._share = Share(config.shared, config.device, self._ledger)
            self._ledger.share = None if config.shared.host_bytes is None else self._share
        # In inference mode nothing could be trained that is made there.
        with torch.inference_mode(False), contextlib.ExitStack() as undo:
            materialized = None
            if config.checkpoint is not None:
                materialized = materialize(model, config.checkpoint, self._ledger)
                undo.callback(materialized.checkpoint.close)
                undo.callback(materialized.undo)
            inventory, parts, placement = self._cut(model, materialized)
            self._lanes = open_lanes(config.device)
            self._pace = Pace(self._lanes)
            self._meter = Meter(self._lanes, self._ledger)
            among = self._ledger, self._meter, placement, config.disk, materialized, self._node
            self._tiers = Tiers(config.device, *among, packed=config.packed is not False)
            undo.callback(self._tiers.close)
            undo.callback(self._release_blocks)
            self._leave_grad_scaler = grad_scaler_waits.use(self) if is_accelerator(config.device) else None
            reading: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if materialized is not None:
                materialized.checkpoint.log = self._meter.disk_log
                reading = materialized.checkpoint.reading(self._budgets.reading_bytes, self._ledger)
            with reading:
                self._wire(model, inventory, parts, placement)
            undo.pop_all()
            self._watch_steps()
        self._described = (
            f"{_name_of(model)} ({format_bytes(sum(block.nbytes for block in self._blocks()))} of weights)"
        )
        live.handles.add(self)

    def _cut(self, model: nn.Module, materialized: Materialized | None) -> tuple[Inventory, Partition, Placement]:
        """The model's tensors, which of them travel together, and where they rest. Changes no tensor."""
        self._param_dtype, grad_dtype = precision_of(model, self._config.param_dtype, self._config.grad_dtype)
        self._config = config = replace(self._config, grad_dtype=grad_dtype)
        inventory = take_inventory(model, param_dtype=self._param_dtype)
        inventory.refuse_views()
        self._budgets = budgets = self._agreed(Budgets.of(model, inventory, config), model)
        self._ledger.host_budget_bytes = self._own_part(budgets.host_bytes)
        if self._ledger.share is not None:
            self._ledger.host_budget_bytes = self._ledger.share.budget.host_bytes
        cut = partial(partition, model, inventory, config.blocks, config.resident, tables_by_rows=self._node is None)
        parts = budgets.checked(inventory, cut, config.device)
        inventory.check_together(part.keys for part in (*parts.streamed, *parts.resident))
        activations = budgets.share_for_activations(inventory, parts, config)
        placement = budgets.place(inventory, parts, replace(config, activations=activations), materialized)
        if activations is not None and activations.host_memory_bytes:
            activations = replace(activations, host_memory_bytes=self._own_part(activations.host_memory_bytes))
        self._config = replace(config, activations=activations)
        return inventory, parts, placement

    def _agreed(self, budgets: Budgets, model: nn.Module) -> Budgets:
        """The smallest budgets of any rank. Checks that settings agree, and gives all ranks the first's buffers."""
        if self._node is None:
            return budgets
        of_each_rank = names_of_each_rank(model)
        named = model.named_buffers()
        buffers = {name: one for name, one in named if name not in of_each_rank and may_be_common(one)}
        shapes = {f"buffer {name!r}": f"{tuple(one.shape)} of {one.dtype}" for name, one in buffers.items()}
        settings = {name: getattr(self._config, name) for name in ("onload", "param_dtype", "grad_dtype")}
        self._node.check_alike(settings | shapes)
        self._node.give_first(buffers.values())
        device_bytes, host_bytes = self._node.least([budgets.device_bytes, budgets.host_bytes])
        return replace(budgets, device_bytes=device_bytes, host_bytes=host_bytes, ranks=self._node.size)

    def _release_blocks(self) -> None:
        """Undoes what there is of the wiring."""
        self._detach()
        for block in self._made:
            block.release()

    def _detach(self) -> None:
        if self._attachment is not None:
            self._attachment.detach()
            self._attachment = None  # only now: where Ctrl-C comes before, `remove()` can be called again

    def _watch_steps(self) -> None:
        self._steps = OptimizerSteps(self._engine, self._meter)
        self._steps.watch()

    def _wire(self, model: nn.Module, inventory: Inventory, parts: Partition, placement: Placement) -> None:
        config = self._config
        self._fetching: Fetching | None = None
        if placement.on_disk:
            self._open_fetching(placement.chunk_bytes, placement.chunks)
        self._common = None if self._node is None else CommonHomes(self._node, lambda: self._made)
        streamed, residents = self._place(inventory, parts)
        for block in (*streamed, *residents):
            block.may_stay_at_home = config.computes_at_home
        for index, (part, block) in enumerate(zip(parts.streamed, streamed, strict=True)):
            block.index = index
            if not config.computes_at_home:  # else nothing is gained by single rows and experts
                block.row_bytes, block.experts, block.expert_key = part.row_bytes, part.experts, part.expert_key
        self._gathers: Gathers | None = None
        if self._common is not None and self._way is not None and self._way.gathers:
            self._gathers = Gathers(self._common, lambda: self._made, self._pace, self._meter, self._ledger)
        among = self._pace, self._ledger, self._meter, self._fetching, self._gathers
        packs = self._tiers.packs and config.packed is True
        self._residency = Residency(config.device, self._budgets.weights_bytes, *among, packed=packs)
        self._executor = Executor(streamed, self._residency, self._meter, config.prefetch_blocks)
        self.caches = Caches(self._residency, self._meter, config.disk)
        room = self._room()
        gradients: GradientFlow
        metered = self._lanes, self._ledger, self._meter
        if self._common is None:
            gradients = Gradients(*metered, self._tiers, config.grad_dtype)
        else:
            gradients = AveragedGradients(*metered, self._tiers, config.grad_dtype, self._common, self._gathers)
        self._gradients = gradients
        buffers = ModuleBuffers(config.device, self._ledger)
        movers = self._residency, self._executor, gradients, buffers
        passes = Passes(config.device, list(streamed), list(residents), *movers, self._common)
        self._engine = Engine(_name_of(model), passes)
        self._engine.room = room
        self._engine.backward.checks_gradients = config.check_gradients
        self._join()
        self._engine.wake()
        self._executor.slices.use_host(placement.experts_bytes)
        mains: dict[nn.Module, tuple[Block, ...]] = {}
        for part, block in zip(parts.streamed, streamed, strict=True):
            for module in part.sites:
                mains[module] = (*mains.get(module, ()), block)
        added = partial(self._block, "added")
        self._attachment = Attachment(model, self._engine, mains, added, self._param_dtype)
        self._attachment.keep_alive(self)
        self.activations: ActivationOffloading | None = None  # the handle on the model's activations
        if config.activations is not None:
            store = self._tiers.private_store if config.activations.tier == "disk" else None
            resources = self._lanes, self._ledger, store, self._meter.lane_use
            self.activations = ActivationOffloading(model, config.activations, *resources)
        self._micro_batches = MicroBatches(self._engine, gradients, self._attachment, self.activations)

    def _room(self) -> Room | None:
        """What makes room in host memory for all that comes after the model; None without a disk."""
        if self._config.disk is None:
            return None
        among = self._blocks, self._residency, self._executor, self._ledger, self._open_fetching
        room = Room(*among, self._tiers.has_room, self._budgets.ranks)
        self._tiers.make_room = room.make_room
        return room

    def _join(self) -> None:
        """Other models of a shared budget know this one from now on, and give way."""
        if self._share is not None:
            self._share.member = weakref.ref(self._engine)
            if self._share.budget.device_bytes is not None:
                self._residency.share = self._share

    @property
    def plan(self) -> Plan | None:
        """The plan that is being followed, or was followed last; None before the first pass is over."""
        return self._executor.plan

    def forward_backward(
        self, micro_batches: Iterable[T], loss_function: Callable[[T], torch.Tensor], *, together: int | None = None
    ) -> list[torch.Tensor]:
        """Computes gradients of `sum(loss_function(batch) for batch in micro_batches)`; returns the detached losses.

        `loss_function` calls the model and returns a tensor with one element, such as
        `lambda batch: model(**batch).loss / len(batches)`. Losses and gradients have the same bits as after

            for batch in micro_batches:
                loss_function(batch).backward()

        but in forward and in backward, each block computes all micro-batches before the next block comes. So weights
        cross each link once for all of them, and a block's gradient leaves once. What autograd saves is kept for all
        micro-batches at once: use gradient checkpointing, `activations`, or both. Or give `together`, the number of
        micro-batches that go through a block at once, such as `headrace.plan(...).method.together`. The next group
        starts when one is done.

        Each `loss_function(batch)` runs on a thread of its own, one at a time. The first micro-batch draws the same
        random numbers (dropout, from PyTorch's default generators) as in the loop; the others draw different ones, from
        the same distribution. If a model cannot be cut between blocks, or keeps something that other micro-batches
        would see, the loop is used instead, and a warning says so. `loss_function` is then called again for
        micro-batches that it has been called for already. If it shares something among micro-batches through its own
        variables, that goes unnoticed.

        Raises ValueError if there is no micro-batch or no loss, StateError within a pass, and whatever `loss_function`
        raises. After an error, gradients are those of the groups of `together` micro-batches that were done. Some may
        also hold a part of the failed group's, as after any backward that raises.
        """
        self._check_between_passes("forward_backward()")
        if self._attachment is None:
            raise StateError("forward_backward() was called after remove(); call the model")
        if isinstance(micro_batches, str) or not isinstance(micro_batches, Iterable):
            raise TypeError(
                f"micro_batches is a {type(micro_batches).__name__}; give a list of what loss_function takes"
            )
        if not callable(loss_function):
            raise TypeError(f"loss_function={loss_function!r} cannot be called; give a function of a micro-batch")
        batches = list(micro_batches)
        if not batches:
            raise ValueError("micro_batches is empty; give at least one")
        if together is not None:
            check_count(together, "together", "how many micro-batches go through a block at once, at least 1")
        return self._micro_batches.compute(batches, together or len(batches), loss_function)

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over ranks (`mesh`)."""
        return self._node is not None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """With `mesh`: a backward in this context does not average over the ranks; the next one outside averages all.

        It works like DistributedDataParallel's `no_sync`. Inside it, the `grad` of parameters does not change; each
        rank keeps its own sums on its host. `zero_grad()` and `p.grad = None` discard these sums. `p.grad.zero_()` does
        not where `p.grad` is None. Raises StateError without `mesh`.
        """
        gradients = self._gradients
        if not isinstance(gradients, AveragedGradients):
            raise StateError("no_sync() is for a model on several ranks; give headrace.offload(model, mesh=mesh)")
        before, gradients.synchronises = gradients.synchronises, False
        try:
            yield
        finally:
            gradients.synchronises = before

    @contextlib.contextmanager
    def copies_paused(self) -> Iterator[None]:
        """A context that leaves the link to others: weights are loaded when a pass needs them, and never ahead.

        Entering it waits until copies that are under way have arrived. From then on, nothing is copied outside a pass,
        and a pass copies only what it needs to compute: weights on demand, and its own gradients and activations. Loads
        that were put off start when you leave the context. Enter it in the thread that calls the model, as often as you
        like. Raises StateError after `remove()`.
        """
        self._check_offloaded("copies_paused()")
        self._executor.pause()
        try:
            self._wait_for_copies()
            yield
        finally:
            self._executor.resume(loads=self._attachment is not None)

    def limit_copies(self, bytes_per_second: Size | None, *, window_seconds: float = 0.1) -> None:
        """Limits the rate at which weights come to the device from now on, averaged over any `window_seconds`.

        The ceiling holds for weights from host memory and from disk alike: in any window of that length, at most
        `bytes_per_second * window_seconds` bytes are copied, unless a single tensor with gaps between its elements is
        larger. Passes wait longer, and give the same results. Gradients and activations are not limited. None removes
        the limit. Raises TypeError or ValueError for an invalid rate or window, StateError after `remove()`.
        """
        self._check_offloaded("limit_copies()")
        rate = None if bytes_per_second is None else parse_bytes(bytes_per_second, name="bytes_per_second")
        if not is_number(window_seconds):
            raise TypeError(f"window_seconds={window_seconds!r} is a {type(window_seconds).__name__}; give seconds")
        if rate is not None and not (_LEAST_BYTES <= rate * window_seconds < math.inf):
            raise ValueError(
                f"bytes_per_second={bytes_per_second!r} with window_seconds={window_seconds!r} let"
                f" {rate * window_seconds:g} bytes through in a window; give both so that it is {_LEAST_BYTES} at least"
                " (None lifts the limit, and copies_paused() keeps the link free)"
            )
        self._wait_for_copies()
        self._pace.limit(rate, window_seconds)

    def refresh(self) -> None:
        """Renews the device's copies of parameters. Needed after writes that go unnoticed (through a kept `p.data`)."""
        for block in self._blocks():
            for param in block.params:
                param.touch()
        self._executor.homes_changed()

    def save_order(self, path: str | os.PathLike[str]) -> None:
        """Writes the order and the times of the passes so far to a small file, for `load_order()` in other processes.

        The file appears as a whole, or takes the place of an older one. With `mesh`, one rank of each node writes it.
        Raises StateError within a pass and after `remove()`, and DiskError when the file cannot be written.
        """
        self._check_offloaded("save_order()")
        self._check_between_passes("save_order()")
        file = path_of(path, "path").expanduser()
        if self._node is None or self._node.is_first:
            replace_whole(file, json.dumps(self._executor.known()).encode())

    def load_order(self, path: str | os.PathLike[str]) -> bool:
        """Reads what `save_order()` wrote, so that the first pass is planned. Returns whether it is of this model.

        False: there is no such file yet, or it is damaged, or it is of a model with other blocks. Then the order is
        learned in the first pass, as without it. What passes have taught already is kept. Raises StateError within a
        pass and after `remove()`.
        """
        self._check_offloaded("load_order()")
        self._check_between_passes("load_order()")
        file = path_of(path, "path").expanduser()
        try:
            return file.is_file() and self._executor.restore(json.loads(file.read_bytes()))
        except (OSError, RecursionError, ValueError):  # nothing but the first pass depends on it
            return False

    def sleep(self, *, host: bool = False) -> None:
        """Frees all device memory of the model: weights, buffers of modules, and what it lends to optimizers.

        The next call brings back what it needs. In a shared `headrace.budget()`, the other models have the room until
        then. The memory is free for PyTorch; for another process, call `torch.cuda.empty_cache()` after it. Weights
        that autograd keeps for a backward to come stay. Waits for copies and updates.

        - `host`: also moves the weights in host memory to `disk`, but for those whose memory somebody keeps (`p.data`),
          and the state of headrace's optimizers. Weights come back with the next call, as far as `host_memory` is free
          then, or with a later one; state comes back with the optimizer's next step, or when somebody asks for it. What
          stays: gradients, tensors of state of less than 16 KiB, the state of PyTorch's optimizers, caches of
          `offload_cache()`, and with `param_dtype` the parameters in their own dtype.

        Raises StateError within a pass, and after `remove()`; with `host`, ValueError if the model has no disk or has a
        mesh, and DiskError if the drive has no room: some state and weights may have moved then, and the model works.
        """
        check_flag(host, "host")
        self._check_offloaded("sleep()")
        self._check_between_passes("sleep()")
        if host and (self._config.disk is None or self._node is not None):
            raise ValueError(
                "sleep(host=True) moves weights from this process's memory to disk; offload() the model with"
                ' disk="/nvme/headrace", and without mesh'
            )
        self.synchronize()
        self._engine.sleep(disk=self._config.disk if host else None)

    def wake(self) -> None:
        """Brings back what `sleep` freed, before the next call does.

        Weights and optimizer state that went to disk come back to host memory, as far as it is free; the rest comes
        later, as without this call. If no weights went to disk, what the next call begins with is loaded to the device
        (the copies may be under way when this returns), and other models of a shared budget give way. Raises DiskError,
        and StateError within a pass, while another model of the budget computes on another thread, and after
        `remove()`.
        """
        self._check_offloaded("wake()")
        self._check_between_passes("wake()")
        self._engine.wake()

    def _check_offloaded(self, what: str) -> None:
        if self._attachment is None:
            raise StateError(f"{what} came after remove(): the model is offloaded no more, and nothing is copied")

    def _wait_for_copies(self) -> None:
        """The host waits until the lanes are empty."""
        self._wait_for_arrivals()
        for lane in Lane:
            self._lanes.copy(lane, (), self._lanes.mark()).done.synchronize()

    def _wait_for_arrivals(self) -> None:
        error = None
        for block in self._blocks():
            try:
                self._residency.finish_arrival(block)
            except Exception as failed:  # it is told once all others are waited for
                error = error or failed
        if error is not None:
            raise error

    def stats(self, *, wait_for_updates: bool = True) -> Stats:
        """What was moved and held since `offload()` or the last `reset_stats()`. Waits for passes and updates."""
        check_flag(wait_for_updates, "wait_for_updates")
        stall_seconds, compute_seconds = self._meter.seconds()
        if self.activations is not None:  # whose waits are within the visits
            waited = min(compute_seconds, self.activations.stall_seconds())
            stall_seconds, compute_seconds = stall_seconds + waited, compute_seconds - waited
        return Stats(
            device_peak_bytes=self._ledger.budgeted_peak_bytes,
            device_budget_bytes=self._budgets.device_bytes,
            device_gradient_peak_bytes=self._ledger.peak_bytes(Tier.DEVICE, "gradients"),
            host_bytes=self._ledger.held_bytes(Tier.HOST),
            host_peak_bytes=self._ledger.peak_bytes(Tier.HOST),
            disk_bytes=self._ledger.held_bytes(Tier.DISK),
            cache_bytes=self._ledger.held_bytes(Tier.HOST, CACHES),
            cache_peak_bytes=self._ledger.peak_bytes(Tier.HOST, CACHES),
            stall_seconds=stall_seconds,
            compute_seconds=compute_seconds,
            not_finite_steps=self._steps.not_finite_steps(wait=wait_for_updates),
            **self._meter.counts() | self._ledger.locked(),
        )

    def reset_stats(self) -> None:
        """Resets counters and peaks."""
        self._meter.reset()
        self._steps.reset()
        self._ledger.reset_peaks()
        if self.activations is not None:
            self.activations.reset_stats()

    def report(self) -> Report:
        """The stats, and the last step beside its plan: `print` it, or use its `to_html`, `to_png` or `to_trace`."""
        activations = self.activations
        moved, waited = ([], []) if activations is None else (activations.moved(), activations.waited())
        return Report(
            RunRecord(
                device=str(self._device),
                stats=self.stats(),
                spans=tuple(self._meter.spans(moved, waited)),
                samples=tuple(self._meter.samples()),
                planned=None if self.plan is None else self.plan.predicted,
                rates=probed_rates(self._device),
                activations=() if activations is None else activations.summary(),
                ranks=() if self._way is None else (self._way.row,),
                model=self._described,
                made_at=time.strftime("%Y-%m-%d %H:%M"),
                budgets={"device": self._budgets.device_bytes, "host": self._budgets.host_bytes},
            )
        )

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Writes the last cycle as a Chrome trace (chrome://tracing, Perfetto): visits, stalls and copies by lane.

        Raises StateError before the first cycle is over, OSError when the file cannot be written.
        """
        report = self.report()
        if not report.record.spans:
            raise StateError("no pass over the model is complete yet, so there is no timeline; run a step first")
        report.to_trace(path)

    def synchronize(self) -> None:
        """Waits until the device is idle, and every copy, write and update for this model is done.

        Raises DiskError for a write that failed and has not succeeded since.
        """
        self._engine.passes.wait_for_updates()
        self._wait_for_arrivals()
        self.caches.settle()
        self._tiers.synchronize()
        if is_accelerator(self._config.device):
            torch.accelerator.synchronize(self._config.device)

    def remove(self) -> None:
        """Makes the model an ordinary CPU model again. Parameters keep their identity, values and gradients.

        Parameters that rest on disk stay tensors over its files, which have no name and disappear with the last of
        these tensors. Raises StateError within a forward or backward. If an update under way or a write to disk has
        failed, raises that error, but removes the handle all the same. If Ctrl-C breaks it off, call it again.
        Afterwards the handle refers to no weights.
        """
        if self._attachment is not None:
            self._check_between_passes("remove()")
            self.let_go()
            # Modules that `blocks` and `resident` hold would not go with the model.
            self._given = self._config = replace(self._config, blocks="auto", resident=())

    def convert(self, model: nn.Module, convert: Callable[[], object]) -> None:
        """Lets `convert` give the whole model other dtypes, and offloads it anew. Counters start at zero."""
        self._check_between_passes("a change of dtype")
        if self._given.disk is not None or self._given.checkpoint is not None:
            raise StateError(
                "weights that rest on disk, or come from a checkpoint, cannot change their dtype while they are"
                " offloaded; convert the model before offload(), or pass param_dtype to compute in another dtype"
            )
        self.let_go()
        convert()
        self._start(model)

    def settled_blocks(self, what: str) -> list[Block]:
        self._check_between_passes(what)
        self.synchronize()
        return self._blocks()

    def manages(self, parameter: nn.Parameter) -> bool:
        return getattr(unit_of(parameter), "manager", None) is self._engine

    def known(self) -> dict[str, Any]:
        return self._executor.known()

    def restore(self, known: Any) -> bool:
        return self._executor.restore(known)

    def note_checkpoint(self, saving: Checkpointed) -> None:
        self._meter.checkpoint_begun(saving)

    def _check_between_passes(self, what: str) -> None:
        self._engine.passes.check_process()
        self._engine.quiesce(updates=False)
        if self._engine.passes.computes or self._engine.passes.runs_hooks:
            raise StateError(f"{what} was called within a forward or backward of the model; call it after that")

    def let_go(self) -> None:
        if self._attachment is None:
            return
        steps: list[Callable[[], object]] = [self._engine.passes.wait_for_updates]
        steps += [block.wait_for_reads for block in reversed(self._blocks())]
        if is_accelerator(self._config.device):
            steps.append(partial(torch.accelerator.synchronize, self._config.device))
        steps += [self.caches.close, self._engine.release_everything, self._gradients.close]
        if self.activations is not None:
            steps.append(self.activations.remove)
        steps += [self._executor.close, self._detach, partial(live.handles.discard, self)]
        if self._share is not None:
            steps.append(self._share.leave)
        steps.append(self._steps.unwatch)
        if self._leave_grad_scaler is not None:
            steps.append(self._leave_grad_scaler)
        if self._fetching is not None:
            steps.append(self._fetching.close)
        if self._gathers is not None:
            steps.append(self._gathers.close)
        steps += [self._pace.close, self._lanes.close, self._tiers.close]
        with contextlib.ExitStack() as all_of_them:
            for step in reversed(steps):  # the stack calls the last one first
                all_of_them.callback(step)

    def _place(self, inventory: Inventory, parts: Partition) -> tuple[list[Block], list[Block]]:
        """The streamed and the resident blocks, made where they rest."""
        several = [*parts.streamed, *parts.resident]
        with progress("headrace: offloading", sum(inventory.nbytes(part.keys) for part in several)) as bar:
            for part in several:
                block = self._block(part.name, [inventory.members[key] for key in part.keys])
                bar.update(block.nbytes)
        return self._made[: len(parts.streamed)], self._made[len(parts.streamed) :]

    def _block(self, name: str, members: Sequence[Member]) -> Block:
        block = Block(name, members, self._config.device, self._tiers, self._param_dtype)
        self._made.append(block)
        if self._common is not None:
            self._common.move_in(block)
        return block

    def _own_part(self, nbytes: int | None) -> int | None:
        """This rank's part of a node's bytes."""
        return nbytes if self._node is None or nbytes is None else nbytes // self._node.size

    def _open_fetching(self, chunk_bytes: int, chunks: int) -> Fetching:
        ring = StagingRing(chunk_bytes, chunks, self._config.device, self._ledger)
        self._fetching = Fetching(ring, chunks, self._pace, self._meter)
        return self._fetching

    def forked(self) -> None:
        self._tiers.forked()
        for block in self._blocks():
            block.forked()

    def _blocks(self) -> list[Block]:
        return self._engine.passes.all_blocks()
