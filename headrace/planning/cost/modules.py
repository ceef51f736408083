"""Which blocks does a live model have? Counted from its parameters, by name; nothing is read or allocated."""

import math
import re
from collections.abc import Collection, Iterator
from typing import Any, Protocol

from headrace.planning.cost.configs import experts_of_config, read_config
from headrace.planning.cost.shape import BlockKind, BlockShape, ModelShape

_REPEATED = re.compile(r"(.*?\.)?\d+(?=\.)")
_EXPERTS = re.compile(r"(.*\.|^)experts\.")
_REST = "rest"

_Counted = tuple[str, tuple[int, ...], int, bool]  # name, size, bytes, and whether it is trained


class Module(Protocol):
    """The part of torch.nn.Module that is used here."""

    def named_parameters(self) -> Iterator[tuple[str, Any]]: ...


def layers_of(model: Module) -> list[str]:
    """The names of the repeated layers, as far as they have parameters."""
    found = (_REPEATED.match(name) for name, _ in model.named_parameters())
    return list(dict.fromkeys(match[0] for match in found if match))


def adapted_of(model: Module) -> frozenset[str]:
    """The names of the layers' matrices that get adapters. The modules that hold experts get none."""
    matrices = [name for name, parameter in model.named_parameters() if len(parameter.shape) >= 2]
    beside = tuple({found[1] for name in matrices if (found := _EXPERTS.match(name))}) or ("\0",)
    return frozenset(name for name in matrices if _REPEATED.match(name) and not name.startswith(beside))


def shape_of_module(model: Module, *, first: Collection[str] | None = None) -> ModelShape:
    """The blocks of `model`: one for each index of its repeated layers, named by it, and one called "rest".

    `first`: the names of modules that are called before all layers; with these, there is a block called "embedding"
    before the layers, and one called "head" behind them, instead of the rest. Sizes, dtypes and what is trained are
    counted exactly. Each parameter counts one multiplication per token (for experts, only the share that a token
    meets), and a block's activations are the inputs of its matrices.
    """
    config = getattr(model, "config", None)
    experts, routed = experts_of_config(read_config(config) if hasattr(config, "to_dict") else {})
    counted: dict[str, list[_Counted]] = {} if first is None else {"embedding": []}
    for name, parameter in model.named_parameters():
        found = _REPEATED.match(name)
        key = found[0] if found else _REST
        if not found and first is not None:
            key = "embedding" if name.rpartition(".")[0] in first else "head"
        size = tuple(int(length) for length in parameter.shape)
        counted.setdefault(key, []).append((name, size, int(parameter.nbytes), bool(parameter.requires_grad)))
    if first is not None:
        counted["head"] = counted.pop("head", [])  # moved to the end
    adapted = adapted_of(model)
    blocks = tuple(_block(key, parameters, experts, routed, adapted) for key, parameters in counted.items())
    return ModelShape(name=type(model).__name__, blocks=blocks)


def _block(key: str, parameters: list[_Counted], experts: int, routed: int, adapted: frozenset[str]) -> BlockShape:
    total = sum(math.prod(size) for _, size, _, _ in parameters)
    matrices = [(name, (math.prod(size[1:]), size[0])) for name, size, _, _ in parameters if len(size) >= 2]
    own = [size for name, size, _, _ in parameters if _EXPERTS.match(name)]
    owned = sum(math.prod(size) for size in own)
    is_stacked = bool(own) and all(size[:1] == (experts,) for size in own)
    bits = 8.0 * sum(nbytes for _, _, nbytes, _ in parameters) / total if total else 16.0
    element_bytes = 4 if bits > 16 else 2
    kind = {"embedding": BlockKind.EMBEDDING, "head": BlockKind.HEAD}.get(key, BlockKind.LAYER)
    is_layer = kind is BlockKind.LAYER
    return BlockShape(
        name=key,
        kind=kind,
        parameters=total,
        active_parameters=total - owned + round(owned * routed / experts),
        trainable=sum(math.prod(size) for _, size, _, trained in parameters if trained),
        weight_bits=bits,
        saved_bytes=element_bytes * float(sum(wide for _, (wide, _) in matrices)),
        input_bytes=element_bytes * float(matrices[0][1][0] if matrices else 0),
        adapter_sizes=sum(sum(ends) for name, ends in matrices if name in adapted),
        last_parameters=math.prod(matrices[-1][1]) if matrices and is_layer and not own else 0,
        expert_parameters=owned,
        experts=experts if is_stacked else 0,
        experts_per_token=routed if is_stacked else 1,
    )
