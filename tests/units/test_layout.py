"""Do parameters lie in a block as they must: aligned, apart, complete, and sharing what they shared before?"""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headrace.errors import LayoutError
from headrace.memory.arena import ALIGNMENT_BYTES, KERNEL_ALIGNMENT_BYTES, aligned
from headrace.weights.model.inventory import take_inventory
from headrace.weights.model.layout import lay_out, travel_dtype
from headrace.weights.model.managed_param import Layout
from tests.support.compare import same

SETTINGS = settings(derandomize=True, max_examples=40)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.complex64)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
members = st.tuples(shapes, st.sampled_from(DTYPES), st.randoms(use_true_random=False))


def parameter(shape: tuple[int, ...], dtype: torch.dtype, random: Any = None) -> nn.Parameter:
    """Of random bits, with its dimensions in a random order of memory."""
    order = list(range(len(shape)))
    if random is not None:
        random.shuffle(order)
    count = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.tensor([(7 * index + 1) % 120 for index in range(count)], dtype=torch.uint8).view(dtype)
    tensor = memory.view([shape[place] for place in order])
    return nn.Parameter(tensor.permute([order.index(place) for place in range(len(shape))]), requires_grad=False)


def shared(storage: torch.Tensor, *slices: tuple[int, int]) -> list[nn.Parameter]:
    return [nn.Parameter(storage[begin:end]) for begin, end in slices]


def filled(parameters: list[nn.Parameter], layouts: list[Layout], nbytes: int) -> torch.Tensor:
    """A block that holds all parameters."""
    block = torch.full((nbytes,), 255, dtype=torch.uint8)
    for one, layout in zip(parameters, layouts, strict=True):
        layout.view(block).copy_(one.detach())
    return block


@SETTINGS
@given(st.lists(members, min_size=1, max_size=8))
def test_parameters_of_any_kind_lie_apart_and_come_back(drawn: list[Any]) -> None:
    parameters = [parameter(*member) for member in drawn]
    layouts, nbytes = lay_out(parameters, None)
    assert nbytes == sum(aligned(one.nbytes) for one in parameters)
    for one, layout in zip(parameters, layouts, strict=True):
        alignment = KERNEL_ALIGNMENT_BYTES if layout.nbytes >= KERNEL_ALIGNMENT_BYTES else ALIGNMENT_BYTES
        assert layout.offset % alignment == 0
        assert (layout.dtype, layout.shape, layout.nbytes) == (one.dtype, one.shape, one.nbytes)
        assert not one.numel() or layout.stride == one.stride()
    ends = sorted((layout.offset, layout.offset + aligned(layout.nbytes)) for layout in layouts)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ends))
    assert not ends or ends[-1][1] == nbytes
    block = filled(parameters, layouts, nbytes)
    for one, layout in zip(parameters, layouts, strict=True):
        assert same(layout.view(block), one)


@SETTINGS
@given(st.lists(members, min_size=1, max_size=6), st.sampled_from([torch.bfloat16, torch.float32]))
def test_param_dtype_is_for_wide_floating_point_parameters(drawn: list[Any], dtype: torch.dtype) -> None:
    parameters = [parameter(*member) for member in drawn]
    layouts, nbytes = lay_out(parameters, dtype)
    assert nbytes == sum(aligned(layout.nbytes) for layout in layouts)
    for one, layout in zip(parameters, layouts, strict=True):
        casts = one.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        assert layout.dtype == travel_dtype(one, dtype) == (dtype if casts else one.dtype)
        assert layout.nbytes == one.numel() * layout.dtype.itemsize


@SETTINGS
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), min_size=2, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_shared_storages_keep_their_distances(drawn: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """A write through one parameter is seen through the others, as before."""
    storage = torch.arange(120, dtype=dtype)
    parameters = shared(storage, *((begin, begin + length) for begin, length in drawn))
    between = parameter((3,), torch.float32)
    layouts, nbytes = lay_out([parameters[0], between, *parameters[1:]], None)
    lone = layouts.pop(1)
    for (begin, _), layout in zip(drawn, layouts, strict=True):
        assert layout.offset - layouts[0].offset == (begin - drawn[0][0]) * dtype.itemsize
        assert layout.offset % dtype.itemsize == 0
        assert layout.region == layouts[0].region
        assert layout.region[0] <= layout.offset
        assert layout.offset + layout.nbytes <= layout.region[1] <= nbytes
    assert lone.offset >= layouts[0].region[1] or lone.offset + lone.nbytes <= layouts[0].region[0]
    block = filled([*parameters, between], [*layouts, lone], nbytes)
    for one, layout in zip(parameters, layouts, strict=True):
        assert same(layout.view(block), one)
        region = block[slice(*layout.region)]
        assert same(layout.view(region, first_byte=layout.region[0]), one)


def test_memory_of_several_elements_is_made_dense() -> None:
    """Expanded and cut-out parameters travel without what lies between."""
    expanded = nn.Parameter(torch.ones(1).expand(100))
    cut_out = nn.Parameter(torch.zeros(10, 100)[:, :3])
    (first, second), nbytes = lay_out([expanded, cut_out], None)
    assert (first.stride, first.nbytes) == ((1,), 400)
    assert (second.stride, second.nbytes) == ((3, 1), 120)
    assert nbytes == aligned(400) + aligned(120)


def test_channels_last_is_kept() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    (layout,), _ = lay_out([weight], None)
    assert layout.view(torch.zeros(4096, dtype=torch.uint8)).is_contiguous(memory_format=torch.channels_last)


def test_nothing_needs_no_bytes() -> None:
    assert lay_out([], None) == ([], 0)
    (layout,), nbytes = lay_out([nn.Parameter(torch.empty(0, 5))], None)
    assert nbytes == layout.nbytes == 0
    assert layout.view(torch.empty(0, dtype=torch.uint8)).shape == (0, 5)


@pytest.mark.parametrize("share", ["overlapping", "far apart", "no"])
def test_the_inventory_counts_the_bytes_that_a_block_will_have(share: str) -> None:
    """Budgets are checked, and models cut, by the inventory's numbers, before any block is made."""
    storage = torch.zeros(10_000)
    slices = {"overlapping": ((0, 600), (300, 900)), "far apart": ((0, 10), (9_000, 9_010)), "no": ((5, 95),)}[share]
    model = nn.Module()
    for index, one in enumerate([*shared(storage, *slices), parameter((7,), torch.bfloat16)]):
        model.register_parameter(f"p{index}", one)
    for dtype in (None, torch.bfloat16):
        inventory = take_inventory(model, param_dtype=dtype)
        assert inventory.nbytes(list(inventory.members)) == lay_out(list(model.parameters()), dtype)[1]


class Special(nn.Parameter):
    """A Parameter subclass, as bitsandbytes' weights are."""


class Opaque(torch.Tensor):
    """A tensor subclass without memory of its own, which does not say what it is made of."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Opaque":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=False)  # type: ignore[no-any-return,attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


def quantised() -> nn.Parameter:
    return nn.Parameter(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), requires_grad=False)


@pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning", "ignore:.*quant:UserWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Parameter(torch.empty(4, device="meta")), r"meta device and has no bytes; load the weights first"),
        (lambda: nn.Parameter(torch.eye(4).to_sparse()), r"layout is torch.sparse_coo; call to_dense\(\)"),
        (lambda: nn.Parameter(torch.eye(4).to_sparse_csr()), r"layout is torch.sparse_csr; call to_dense\(\)"),
        (quantised, r"torch.qint8 is quantised; call dequantize\(\) on it"),
        (nn.parameter.UninitializedParameter, r"not initialised yet; run the lazy module once"),
        (
            lambda: nn.Parameter(Opaque(torch.ones(4)), False),
            r"it is a Opaque, and PyTorch cannot say of which tensors",
        ),
        (lambda: Special(torch.ones(4)), r"it is a Special that is trained, .*requires_grad_\(False\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_what_has_no_plain_bytes_is_refused_with_the_reason(make: Any, reason: str) -> None:
    layer = nn.Module()
    layer.register_parameter("weight", make())
    with pytest.raises(LayoutError, match=rf"parameter 'weight' cannot be offloaded: .*{reason}"):
        take_inventory(layer)
