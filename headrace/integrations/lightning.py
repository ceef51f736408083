"""How do Lightning's Trainer and Fabric train a model on several ranks whose gradients headrace averages?"""

import contextlib
from collections.abc import Generator
from typing import Any

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from headrace.errors import StateError
from headrace.integrations.ranks import is_averaged, no_sync

__all__ = ["FabricMeshStrategy", "MeshStrategy"]


class MeshStrategy(DDPStrategy):  # type: ignore[misc]  # lightning is not followed
    """Lightning's DDPStrategy without the wrapper, for `Trainer(strategy=MeshStrategy())`.

    Offload the model with `mesh=` in `configure_model`, on all ranks. The settings are those of DDPStrategy. Training
    parameters that were not offloaded with `mesh=` raises StateError.
    """

    def configure_ddp(self) -> None:
        """Leaves the model as it is."""
        _check(self.model)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Within this context, backward does not average."""
        with no_sync(self.model):
            yield


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


def _check(model: nn.Module) -> None:
    if not is_averaged(model):
        raise StateError(
            f"the {type(model).__name__} was not offloaded with mesh=, so nobody would average its gradients; call"
            " headrace.offload(model, mesh=mesh) before, or give another strategy"
        )
