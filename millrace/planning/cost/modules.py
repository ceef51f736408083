"""Which blocks does a live model have? Counted from its parameters, by name; nothing is read or allocated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from millrace.planning.cost.configs import read_config, shape_of_config
from millrace.planning.cost.shape import BlockKind, BlockShape, ModelShape

__all__ = ["is_module", "shape_of_module"]

_REPEATED = re.compile(r"(.*?\.)?(\d+)\.")


class Module(Protocol):
    """What is asked of a torch.nn.Module."""

    def named_parameters(self) -> Iterator[tuple[str, Any]]: ...


def is_module(model: object) -> bool:
    return hasattr(model, "named_parameters")


def shape_of_module(model: Module) -> ModelShape:
    """The blocks of `model`: one for each index of its repeated layers, one for what comes before and one for the rest.

    Sizes, dtypes and what is trained are counted exactly. Operations and activations are those of its transformers
    config when it has one; otherwise each parameter of a matrix counts one multiplication per token, and a block's
    activations are the inputs and outputs of its matrices.
    """
    counted: dict[str, list[tuple[tuple[int, ...], int, bool]]] = {}
    for name, parameter in model.named_parameters():
        found = _REPEATED.match(name)
        key = found[0] if found else "rest"
        size = tuple(int(length) for length in parameter.shape)
        counted.setdefault(key, []).append((size, int(parameter.nbytes), bool(parameter.requires_grad)))
    name = type(model).__name__
    blocks = tuple(_block(key.rstrip("."), parameters) for key, parameters in counted.items())
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        return _guided(ModelShape(name=name, blocks=blocks), shape_of_config(read_config(config)))
    return ModelShape(name=name, blocks=blocks)


def _block(name: str, parameters: list[tuple[tuple[int, ...], int, bool]]) -> BlockShape:
    total = sum(_count(size) for size, _, _ in parameters)
    matrices = [size for size, _, _ in parameters if len(size) >= 2]
    ends = [(_count(size[1:]), size[0]) for size in matrices]
    return BlockShape(
        name=name,
        kind=BlockKind.LAYER,
        parameters=total,
        active_parameters=total,
        trainable=sum(_count(size) for size, _, trained in parameters if trained),
        weight_bits=8.0 * sum(nbytes for _, nbytes, _ in parameters) / total if total else 16.0,
        saved_elements=float(sum(wide for wide, _ in ends)),
        input_elements=ends[0][0] if ends else 0,
        adapter_sizes=sum(wide + high for wide, high in ends),
        last_parameters=_count(matrices[-1]) if matrices else 0,
    )


def _guided(counted: ModelShape, described: ModelShape) -> ModelShape:
    """The described blocks, with trained parameters and bits as counted. Layers meet in order."""
    layers = [block for block in counted.blocks if re.search(r"\d+$", block.name)]
    rest = [block for block in counted.blocks if block not in layers]
    plain = [block for block in described.blocks if block.kind is BlockKind.LAYER]
    if len(layers) != len(plain):
        return counted
    met = iter(layers)
    share = sum(b.trainable for b in rest) / max(1, sum(b.parameters for b in rest))
    bits = rest[0].weight_bits if rest else 16.0
    blocks = []
    for block in described.blocks:
        if block.kind is BlockKind.LAYER:
            own = next(met)
            blocks.append(
                replace(block, parameters=own.parameters, trainable=own.trainable, weight_bits=own.weight_bits)
            )
        else:
            blocks.append(replace(block, trainable=round(block.parameters * share), weight_bits=bits))
    return ModelShape(name=counted.name, blocks=tuple(blocks), tied=described.tied)


def _count(size: tuple[int, ...]) -> int:
    total = 1
    for length in size:
        total *= length
    return total
