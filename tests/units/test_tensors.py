"""Are tensors found, and replaced, in what models pass around, however it is made?"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import headrace
from headrace.runtime.tensors import containers_in, map_tensors, tensors_in


@dataclass
class Node:
    value: Any
    around: Any = None


@dataclass
class Guarded:
    """As transformers' configs whose layers differ: some fields are not to be asked for."""

    size: int = 3
    weight: Any = None

    def __getattribute__(self, name: str) -> Any:
        if name == "size":
            raise RuntimeError("'size' differs from layer to layer")
        return object.__getattribute__(self, name)


@dataclass(slots=True)
class Slots:
    weight: Any
    unset: Any = field(init=False)


def cyclic(tensor: torch.Tensor) -> Node:
    node = Node(tensor, [])
    node.around.append({"back": node})
    return node


def test_fields_are_not_asked_for() -> None:
    tensor, other = torch.ones(2), torch.zeros(2)
    for holder in (Guarded(weight=[tensor]), Slots([tensor])):
        assert list(tensors_in(holder)) == [tensor]
        changed = map_tensors(holder, lambda _: other)
        assert type(changed) is type(holder)
        assert changed.weight == [other]
        assert map_tensors(holder, lambda same: same) is holder


def test_what_contains_itself_is_searched_once() -> None:
    tensor, other = torch.ones(2), torch.zeros(2)
    node = cyclic(tensor)
    assert list(tensors_in([node, node])) == [tensor, tensor]
    assert [type(one) for one in containers_in(node)] == [Node, list, dict]
    assert map_tensors(node, lambda same: same) is node
    assert map_tensors(node, lambda _: other).value is other


def test_a_model_may_have_such_attributes_and_arguments() -> None:
    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor, config: Any = None) -> torch.Tensor:
            return super().forward(x)

    model = Model(*(nn.Linear(16, 16) for _ in range(4)))
    model.config, model.tree = Guarded(), cyclic(torch.ones(2))
    x = torch.randn(2, 16)
    expected = model(x)
    with headrace.offload(model, device="cpu", device_memory="2200B") as handle:
        assert torch.equal(model(x, config=Guarded(weight=cyclic(x))), expected)
        assert handle.stats().onload_bytes


@dataclass
class SetLater:
    given: torch.Tensor
    later: Any = field(init=False, default=None)


def test_fields_that_are_set_later_are_kept() -> None:
    one = SetLater(torch.ones(1))
    one.later = [torch.ones(2)]
    mapped = map_tensors(one, torch.neg)
    assert [mapped.given.tolist(), mapped.later[0].tolist()] == [[-1], [-1, -1]]
    assert [one.given.tolist(), one.later[0].tolist()] == [[1], [1, 1]]
