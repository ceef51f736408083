"""Which blocks does a live model have? Counted from its parameters, by name; nothing is read or allocated."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from headrace.planning.cost.configs import experts_of_config, read_config, shape_of_config
from headrace.planning.cost.shape import BlockKind, BlockShape, ModelShape

__all__ = ["is_module", "shape_of_module"]

_REPEATED = re.compile(r"(.*?\.)?(\d+)\.")
_EXPERTS = re.compile(r"(^|\.)experts\.")
_DESCRIBED = 0.02  # how far a config's parameters may be from those counted, and still describe the model

_Counted = tuple[tuple[int, ...], int, bool, float]  # size, bytes, trained, and the share that a token meets


class Module(Protocol):
    """The part of torch.nn.Module that is used here."""

    def named_parameters(self) -> Iterator[tuple[str, Any]]: ...


def is_module(model: object) -> bool:
    return hasattr(model, "named_parameters")


def shape_of_module(model: Module) -> ModelShape:
    """The blocks of `model`: one for each index of its repeated layers, one for what comes before and one for the rest.

    Sizes, dtypes and what is trained are counted exactly. Operations and activations are those of its transformers
    config when that describes the counted parameters. Otherwise each parameter counts one multiplication per token (for
    experts, only the share that a token meets), and a block's activations are the inputs of its matrices.
    """
    config = getattr(model, "config", None)
    told = read_config(config) if hasattr(config, "to_dict") else {}
    experts, routed = experts_of_config(told)
    counted: dict[str, list[_Counted]] = {}
    for name, parameter in model.named_parameters():
        found = _REPEATED.match(name)
        key = found[0] if found else "rest"
        size = tuple(int(length) for length in parameter.shape)
        share = routed / experts if _EXPERTS.search(name) else 1.0
        counted.setdefault(key, []).append((size, int(parameter.nbytes), bool(parameter.requires_grad), share))
    name = type(model).__name__
    blocks = tuple(_block(key.rstrip("."), parameters, experts, routed) for key, parameters in counted.items())
    shape = ModelShape(name=name, blocks=blocks)
    try:
        described = shape_of_config(told)
    except ValueError:  # no config, or not a decoder's: the counts are known all the same
        return shape
    return _guided(shape, described, is_packed=bool(told.get("quantization_config")))


def _block(name: str, parameters: list[_Counted], experts: int, routed: int) -> BlockShape:
    total = sum(math.prod(size) for size, _, _, _ in parameters)
    matrices = [size for size, _, _, _ in parameters if len(size) >= 2]
    own = [size for size, _, _, share in parameters if share < 1]
    is_stacked = bool(own) and all(size[:1] == (experts,) for size in own)
    ends = [(math.prod(size[1:]), size[0]) for size in matrices]
    return BlockShape(
        name=name,
        kind=BlockKind.LAYER,
        parameters=total,
        active_parameters=round(sum(math.prod(size) * share for size, _, _, share in parameters)),
        trainable=sum(math.prod(size) for size, _, trained, _ in parameters if trained),
        weight_bits=8.0 * sum(nbytes for _, nbytes, _, _ in parameters) / total if total else 16.0,
        saved_elements=float(sum(wide for wide, _ in ends)),
        input_elements=ends[0][0] if ends else 0,
        adapter_sizes=sum(wide + high for wide, high in ends),
        last_parameters=math.prod(matrices[-1]) if matrices else 0,
        expert_parameters=sum(map(math.prod, own)),
        experts=experts if is_stacked else 0,
        experts_per_token=routed if is_stacked else 1,
    )


def _guided(counted: ModelShape, described: ModelShape, *, is_packed: bool) -> ModelShape:
    """The described blocks, with trained parameters and bits as counted. What is not described is as counted.

    Layers are matched in order. `is_packed`: several weights share an element, so counts may differ from the config's.
    """
    layers = [block for block in counted.blocks if re.search(r"\d+$", block.name)]
    rest = [block for block in counted.blocks if block not in layers]
    plain = [block for block in described.blocks if block.kind is BlockKind.LAYER]
    if len(layers) != len(plain) or not (is_packed or _alike(counted.blocks, described.blocks, layers, plain)):
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


def _alike(
    counted: Sequence[BlockShape],
    described: Sequence[BlockShape],
    layers: Sequence[BlockShape],
    plain: Sequence[BlockShape],
) -> bool:
    """Whether the config describes what was counted, layer by layer and in all. Adapters come on top."""

    def near(own: Sequence[BlockShape], told: Sequence[BlockShape]) -> bool:
        found, expected = sum(block.parameters for block in own), sum(block.parameters for block in told)
        added = sum(block.trainable for block in own if block.trainable < block.parameters)
        return any(abs(number - expected) <= _DESCRIBED * found for number in (found, found - added))

    return near(counted, described) and all(near([own], [told]) for own, told in zip(layers, plain, strict=True))
