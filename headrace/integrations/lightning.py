"""How do Lightning's Trainer and Fabric train a model on several ranks whose gradients headrace averages?"""

import contextlib
from collections.abc import Generator
from typing import Any

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed, nn

from headrace.errors import StateError
from headrace.integrations.ranks import is_averaged, no_sync
from headrace.runtime.ranks import Ranks

__all__ = ["FabricMeshStrategy", "MeshStrategy"]


class MeshStrategy(DDPStrategy):  # type: ignore[misc]  # lightning is not followed
    """Lightning's DDPStrategy without the wrapper, for `Trainer(strategy=MeshStrategy())`.

    Offload the model with `mesh=` in `configure_model`, on all ranks. The settings are those of DDPStrategy; those of
    the wrapper, such as `ddp_comm_hook`, have no effect. Training parameters that were not offloaded with `mesh=`
    raises StateError. If the first rank cannot save a checkpoint, all ranks raise.
    """

    def configure_ddp(self) -> None:
        """Leaves the model as it is."""
        _check(self.model)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Within this context, backward does not average."""
        with no_sync(self.model):
            yield

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """The first rank writes. If it raises, all ranks do."""
        with _as_one(self, filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)


class FabricMeshStrategy(FabricDDPStrategy):  # type: ignore[misc]
    """The same for `Fabric(strategy=FabricMeshStrategy())`: offload before `fabric.setup(model, ...)`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._backward_sync_control = self

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Leaves the model as it is."""
        _check(module)
        return module

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Within this context, backward does not average, if `enabled`."""
        return no_sync(module) if enabled else contextlib.nullcontext()

    def save_checkpoint(self, path: Any, *args: Any, **named: Any) -> None:
        """The first rank writes. If it raises, all ranks do."""
        with _as_one(self, path):
            super().save_checkpoint(path, *args, **named)


def _as_one(strategy: Any, path: Any) -> contextlib.AbstractContextManager[None]:
    return Ranks(distributed.group.WORLD, strategy.root_device.type).as_one(f"save {path}")


def _check(model: nn.Module) -> None:
    if not is_averaged(model):
        raise StateError(
            f"the {type(model).__name__} was not offloaded with mesh=, so nobody would average its gradients; call"
            " headrace.offload(model, mesh=mesh) before, or give another strategy"
        )
