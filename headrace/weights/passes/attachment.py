"""How is a model put under management, kept there when it changes, and let go again?

Owns the link between the user's modules and the engine: who takes part in their calls, which of their buffers are
managed, and the places of parameters. Adapters that are added later (PEFT) are taken in at the next outermost call.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from headrace.errors import StateError
from headrace.memory.buffers import plain_tensors
from headrace.runtime.pipelines import pipelines_are_imported, split_backward_is_refused
from headrace.runtime.process_wide import hooked
from headrace.weights.model.data_parallel import refuse_wrapping
from headrace.weights.model.home import Home
from headrace.weights.model.inventory import Inventory, take_inventory
from headrace.weights.model.layout import check_can_travel, travel_dtype
from headrace.weights.model.module_buffers import names_of_each_rank
from headrace.weights.model.partition import looks_rows_up
from headrace.weights.model.places import Member, Place
from headrace.weights.model.precision import ParamDtype, Precision
from headrace.weights.movement.block import Block
from headrace.weights.passes.call import Companion, Site
from headrace.weights.passes.engine import Engine
from headrace.weights.passes.expert_dispatch import adapts_experts
from headrace.weights.passes.managed import bring_attributes_back, lend_parameters, make_managed, make_plain, site_of
from headrace.weights.passes.refusals import refuse_call, refuse_script


class _Registrations:
    """Counts registrations of parameters, buffers and modules with managed modules, so that a changed model is noticed.

    Registrations with other modules do not count: a decoder that slices its layers makes a new list in every forward.
    """

    def __init__(self) -> None:
        self.count = 0
        self.hooks = hooked(self._register)

    def _register(self) -> list[RemovableHandle]:
        return [
            torch_module.register_module_parameter_registration_hook(self._seen),
            torch_module.register_module_module_registration_hook(self._seen_module),
            torch_module.register_module_buffer_registration_hook(self._seen),
        ]

    def _seen(self, parent: nn.Module, *_args: Any) -> None:
        self.count += site_of(parent) is not None

    def _seen_module(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        refuse_wrapping(parent, module)
        _note_compiled(parent, name, module)
        self._seen(parent)


def _refuse_call() -> None:
    raise StateError("remove() was broken off before this module was an ordinary one again; call remove() once more")


def _note_compiled(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Notes a module that torch.compile made around a managed one, at the latter's site."""
    site = site_of(module) if name == "_orig_mod" and module is not None else None
    if site is not None:
        site.compiled_by = weakref.ref(parent)


_registrations = _Registrations()


class Attachment:
    """The modules of one offloaded model."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        mains: dict[nn.Module, tuple[Block, ...]],
        make_resident: Callable[[list[Member]], Block],
        param_dtype: ParamDtype,
    ) -> None:
        self._model = weakref.ref(model)
        self._engine = engine
        self._make_resident = make_resident
        self._param_dtype = param_dtype
        self._block_of: dict[int, Block] = {}  # by the ids of homes
        self._mains = weakref.WeakKeyDictionary(mains)
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # also those that have left the model
        self._seen = -1
        self._leave_registrations = _registrations.hooks.use(self)
        self._leave_pipelines: Callable[[], None] | None = None
        self._link(model, self._inventory(model))
        if isinstance(param_dtype, Precision):
            param_dtype.take_part()
        engine.note_buffers_budgeted()
        engine.before_call = self.follow

    def modules(self) -> list[tuple[str, nn.Module]]:
        """The model's modules by name; none if the model is gone."""
        model = self._model()
        return [] if model is None else list(model.named_modules())

    def follow(self) -> None:
        """Takes in what was registered since the last call: adapters, replaced modules, new buffers."""
        model = self._model()
        if model is None:
            return
        refuse_call(model)
        if self._leave_pipelines is None and pipelines_are_imported():
            self._leave_pipelines = split_backward_is_refused.use(self)
        if self._seen != _registrations.count:
            with plain_tensors():
                self._take_in(model)

    def _take_in(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            refuse_script(f"module {name!r}, which came after offload(),", module)
        for block in self._engine.passes.all_blocks():
            block.places.adopt_replacements()
        inventory = self._inventory(model)
        if not all(isinstance(member.parameter, nn.Parameter) for member in inventory.members.values()):
            return  # tensors that torch.func.functional_call has put there, for one call
        added = self._adopted([m for m in inventory.members.values() if not isinstance(m.parameter, Home)], inventory)
        if added:
            for member in added:
                check_can_travel(member.name, member.parameter)
            keys = [id(member.parameter) for member in added]
            what = f"parameters ({added[0].name!r} and {len(added) - 1} more)"
            self._engine.check_resident(what, inventory.nbytes(keys))
            self._engine.add_resident(self._make_resident(added))
        self._link(model, inventory)

    def _adopted(self, added: list[Member], inventory: Inventory) -> list[Member]:
        """The added parameters that need a block of their own. Each of the others has replaced one of its kind in its
        module (weight_norm makes `weight` into `weight_v`), and travels as that one did, in the same dtype.
        """
        gone = [
            param
            for block in self._engine.passes.all_blocks()
            for param in block.params
            if id(param.home) not in inventory.members
        ]
        left = []
        for member in added:
            dtype = travel_dtype(member.parameter, self._param_dtype)
            for param in (one for one in gone if one.layout.dtype == dtype):
                if param.fits(member.parameter) and member.name.startswith(param.name[: param.name.rfind(".") + 1]):
                    param.adopt(member.parameter)
                    gone.remove(param)
                    break
            else:
                left.append(member)
        return left

    def keep_alive(self, companion: Companion) -> None:
        """Keeps `companion` alive as long as the model lives, unless the model is detached before."""
        model = self._model()
        site = None if model is None else site_of(model)
        if site is not None:
            site.companion = companion

    def detach(self) -> None:
        """Makes the model an ordinary CPU model again. The engine refuses calls and backwards from now on."""
        self._leave_registrations()
        if self._leave_pipelines is not None:
            self._leave_pipelines()
        self._engine.before_call = _refuse_call
        self._engine.backward.refused = True
        for block in self._engine.passes.all_blocks():
            block.release()
        if isinstance(self._param_dtype, Precision):
            self._param_dtype.withdraw()
        bring_attributes_back(self._modules, self._engine.passes.device)
        for module in list(self._modules):
            if site_of(module) is not None:
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.device.type != "cpu":  # a tensor of a class of its own
                        module._buffers[name] = buffer.to("cpu")
            make_plain(module)

    def _inventory(self, model: nn.Module) -> Inventory:
        for module in model.modules():
            self._modules.add(module)
            lend_parameters(module)  # before the inventory notes places
        return take_inventory(model, param_dtype=self._param_dtype, check=False)

    def _link(self, model: nn.Module, inventory: Inventory) -> None:
        places: dict[int, list[Place]] = {key: member.places for key, member in inventory.members.items()}
        self._block_of = {id(param.home): block for block in self._engine.passes.all_blocks() for param in block.params}
        for block in self._engine.passes.all_blocks():
            block.places.move(block.params, places, block.compounds, inventory.places_of_compounds)
        for module, name in inventory.names.items():
            if site_of(module) is None:
                make_managed(module, self._site(module, name, inventory), self._engine)
        for module in inventory.names:
            _note_compiled(module, "_orig_mod", module._modules.get("_orig_mod"))
        self._engine.passes.buffers.take_in(inventory.names, names_of_each_rank(model))
        self._seen = _registrations.count

    def _site(self, module: nn.Module, name: str, inventory: Inventory) -> Site:
        own = [self._block_of[key] for key in inventory.owned.get(module, ()) if key in self._block_of]
        mains, compiled = self._mains.get(module), module._modules.get("_orig_mod")
        if mains is None and compiled is not None:  # torch.compile(layer), where the layer's own call is not seen
            mains = self._mains.get(compiled)
        needed = list(dict.fromkeys((*(mains or ()), *own)))
        streamed = [block for block in needed if block.index >= 0 and not block.travels_in_parts]
        table = needed[0] if [bool(block.row_bytes) for block in needed] == [True] and looks_rows_up(module) else None
        all_experts = self._site_of_all(module, name, needed[0], inventory) if len(needed) == 1 else None
        encloses = any(inner in self._mains for inner in module.modules() if inner is not module)
        return Site(
            self._engine.passes,
            self._engine.lending,
            name or type(module).__name__,
            tuple(streamed),
            main=mains is not None and table is None and all_experts is None,
            encloses=encloses,
            table=table,
            all_experts=all_experts,
            adapts=adapts_experts(module),
        )

    def _site_of_all(self, module: nn.Module, name: str, block: Block, inventory: Inventory) -> Site | None:
        """The site of a call that needs all experts of the block, beside what the module around it has bound."""
        if block.experts is None:
            return None
        around: tuple[Block, ...] = ()
        outer = inventory.parents.get(module)
        while outer is not None and not around:
            around = tuple(one for one in self._mains.get(outer, ()) if not one.travels_in_parts)
            outer = inventory.parents.get(outer)
        return Site(self._engine.passes, self._engine.lending, name, (*around, block), main=True, encloses=False)
