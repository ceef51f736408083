"""Which modules does a user mean by `layers` and `modules`? And which are a model's layers?"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from headrace.config import ActivationConfig

_Chosen = list[nn.Module] | None  # None: no restriction


def find_targets(model: nn.Module, config: ActivationConfig) -> tuple[_Chosen, _Chosen]:
    """The `layers` and the `modules` that a user means. Raises ValueError for what the model does not have."""
    layers = config.layers
    if not isinstance(layers, int):
        return _chosen(model, layers, "layers"), _chosen(model, config.modules, "modules")
    known = list(named_layers(model))
    if layers > len(known):
        raise ValueError(f"layers={layers}, but the model has {len(known)} layers in lists; give at most that many")
    return known[:layers], _chosen(model, config.modules, "modules")


def named_layers(model: nn.Module) -> dict[nn.Module, str]:
    """The elements of the model's outermost lists of modules, in the order of registration, with their names."""
    found: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        for child_name, child in module.named_children():
            found[child] = f"{name}.{child_name}" if name else child_name
            inside.update(child.modules())
    return found


def _chosen(model: nn.Module, wanted: Sequence[nn.Module | str] | None, setting: str) -> _Chosen:
    """The modules that are named, or match a pattern."""
    if wanted is None:
        return None
    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, None] = {}
    for item in wanted:
        if isinstance(item, nn.Module):
            if item not in names:
                raise ValueError(f"{setting} names a {type(item).__name__} that is not a module of the model")
            found[item] = None
            continue
        matches = [module for module, name in names.items() if fnmatchcase(name, item)]
        if not matches:
            raise ValueError(f"{setting}: no module of the model is named {item!r}; see model.named_modules()")
        found.update(dict.fromkeys(matches))
    return list(found)
