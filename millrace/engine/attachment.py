"""How is a model put under management, kept there when it changes, and let go again?

Owns the link between the user's modules and the engine: the managed classes, the device buffers of modules, and the
places of parameters. Adapters that are added later (PEFT) are taken in at the next outermost call.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from millrace.engine.block import Block, Member, Place
from millrace.engine.engine import Engine
from millrace.engine.home import Home
from millrace.engine.inventory import Inventory, take_inventory
from millrace.engine.layout import check_can_travel
from millrace.engine.managed import make_managed, make_plain, site_of
from millrace.engine.site import Site
from millrace.memory.ledger import Ledger, Tier

__all__ = ["Attachment"]


class _Registrations:
    """Counts registrations of parameters, buffers and modules anywhere, so that a changed model is noticed."""

    def __init__(self) -> None:
        self.count = 0
        self._users = 0
        self._handles: list[Any] = []

    def watch(self) -> None:
        self._users += 1
        if self._users == 1:
            self._handles = [
                torch_module.register_module_parameter_registration_hook(self._seen),
                torch_module.register_module_module_registration_hook(self._seen),
                torch_module.register_module_buffer_registration_hook(self._seen),
            ]

    def unwatch(self) -> None:
        self._users -= 1
        if self._users == 0:
            for handle in self._handles:
                handle.remove()

    def _seen(self, *_args: Any) -> None:
        self.count += 1


_registrations = _Registrations()


class Attachment:
    """The modules of one offloaded model."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        mains: dict[nn.Module, tuple[Block, ...]],
        ledger: Ledger,
        make_resident: Callable[[list[Member]], Block],
    ) -> None:
        self._model = weakref.ref(model)
        self._engine = engine
        self._ledger = ledger
        self._make_resident = make_resident
        self._block_of: dict[int, Block] = {}  # by the id of the home
        self._mains = weakref.WeakKeyDictionary(mains)
        self._seen = -1
        _registrations.watch()
        self._link(take_inventory(model, check=False))
        engine.before_call = self.follow

    def follow(self) -> None:
        """Takes in what was registered since the last call: adapters, replaced modules, new buffers."""
        model = self._model()
        if model is None or self._seen == _registrations.count:
            return
        for block in self._blocks():
            block.adopt_replacements()
        inventory = take_inventory(model, check=False)
        added = [member for member in inventory.members.values() if not isinstance(member.parameter, Home)]
        if added:
            for member in added:
                check_can_travel(member.name, member.parameter)
            self._engine.add_resident(self._make_resident(added))
        self._link(inventory)

    def keep_alive(self, companion: object) -> None:
        """`companion` lives at least as long as the model does, unless it is detached before."""
        model = self._model()
        site = None if model is None else site_of(model)
        if site is not None:
            site.companion = companion

    def detach(self) -> None:
        """The model is an ordinary CPU model again."""
        _registrations.unwatch()
        self._engine.before_call = lambda: None
        for block in self._blocks():
            block.release()
        model = self._model()
        for module in model.modules() if model is not None else ():
            if site_of(module) is not None:
                make_plain(module)
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to("cpu")

    def _link(self, inventory: Inventory) -> None:
        places: dict[int, list[Place]] = {key: member.places for key, member in inventory.members.items()}
        self._block_of = {id(slot.home): block for block in self._blocks() for slot in block.slots}
        for block in self._blocks():
            block.move_places(places)
        for module, name in inventory.names.items():
            if site_of(module) is None:
                make_managed(module, self._site(module, name, inventory))
            self._place_buffers(module)
        self._seen = _registrations.count

    def _site(self, module: nn.Module, name: str, inventory: Inventory) -> Site:
        own = [self._block_of[key] for key in inventory.owned.get(module, ()) if key in self._block_of]
        streamed = [block for block in dict.fromkeys((*self._mains.get(module, ()), *own)) if block.index >= 0]
        return Site(self._engine, name or type(module).__name__, tuple(streamed), main=module in self._mains)

    def _place_buffers(self, module: nn.Module) -> None:
        site = site_of(module)
        if site is None:
            return
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != self._engine.device:
                site.keep_buffer(module, name)
                self._ledger.add(Tier.DEVICE, "buffers", buffer.nbytes)

    def _blocks(self) -> list[Block]:
        return [*self._engine.blocks, *self._engine.residents]
