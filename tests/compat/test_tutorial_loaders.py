"""Do the tutorial's loaders, packing, compression and prefetch depths give what they say, without its faults?"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import headrace
from headrace.compat.tutorial import (
    DoubleBufferedLoader,
    OffloadSystemConfig,
    OffloadTier,
    OverlappedOffloader,
    TripleBufferedLoader,
    UnifiedOffloadManager,
    compress_parameter,
    compute_optimal_prefetch,
    decompress_parameter,
    pack_layers_sequentially,
)
from tests.support.models import linears

pytestmark = pytest.mark.core(device="emu")

WIDTH = 32


def weights(count: int, dtype: torch.dtype = torch.float32, scale: float = 0.2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(WIDTH, WIDTH, generator=generator) * scale).to(dtype) for _ in range(count)]


def stack(count: int = 4) -> nn.Sequential:
    model = linears(count, WIDTH)
    for layer, weight in zip(model, weights(count), strict=True):
        layer.weight.data.copy_(weight)
        layer.bias.data.fill_(0.5)
    return model


# DoubleBufferedLoader ------------------------------------------------------------------------------------------------
def test_double_buffering_computes_what_plain_does(device: torch.device) -> None:
    """Each load begins when compute has done what used its buffer; the emulator reports any race."""
    layers = weights(7)
    loader = DoubleBufferedLoader(device)
    x = torch.ones(4, WIDTH)
    ours = x.to(device)
    loader.start_next_load(layers[0], layers[0].shape)
    for index in range(len(layers)):
        loader.swap_buffers()
        if index + 1 < len(layers):
            loader.start_next_load(layers[index + 1], layers[index + 1].shape)
        ours = ours @ loader.get_current_buffer()
        x = x @ layers[index]
    assert torch.equal(ours.cpu(), x)
    assert sum(buffer.nbytes for buffer in loader.buffers if buffer is not None) == 2 * layers[0].nbytes


def test_double_buffering_copies_in_the_background(emulator: Any) -> None:
    loader = DoubleBufferedLoader("emu")
    source = torch.ones(WIDTH).pin_memory()
    emulator.reset_stats()
    for _ in range(3):
        loader.start_next_load(source)
        loader.swap_buffers()
        loader.get_current_buffer().add_(1)
    assert emulator.stats()["host_syncs"] == 0  # the tutorial's swap waits on the host


def test_another_dtype_gets_another_buffer(device: torch.device) -> None:
    """The tutorial compares shapes alone: float32 weights become float16 in the buffer of a layer before."""
    loader = DoubleBufferedLoader(device)
    for value in (torch.full((3,), 0.1, dtype=torch.float16), torch.full((3,), 0.1), torch.full((3,), 0.3)):
        for _ in range(2):
            loader.start_next_load(value, value.shape)
            loader.swap_buffers()
            assert torch.equal(loader.get_current_buffer().cpu(), value)


def test_double_buffering_refuses_what_has_no_meaning(device: torch.device) -> None:
    loader = DoubleBufferedLoader(device)
    with pytest.raises(headrace.StateError, match="nothing was loaded yet"):
        loader.get_current_buffer()
    with pytest.raises(headrace.StateError, match="no load was started"):
        loader.swap_buffers()
    with pytest.raises(ValueError, match="has not the elements of shape"):
        loader.start_next_load(torch.ones(3), (2, 3))  # the tutorial repeats them
    loader.start_next_load(torch.ones(3))
    with pytest.raises(headrace.StateError, match="waits for swap_buffers"):
        loader.start_next_load(torch.ones(3))


# TripleBufferedLoader ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8])
def test_triple_buffering_computes_what_plain_does(device: torch.device, count: int) -> None:
    layers = weights(count)
    loader = TripleBufferedLoader(WIDTH * WIDTH, torch.float32, device)
    with torch.no_grad():
        x = torch.ones(4, WIDTH)
        product = lambda x, weight: x @ weight.view(WIDTH, WIDTH)  # noqa: E731
        ours = loader.forward_with_triple_buffer([product] * count, [layer.flatten() for layer in layers], x.to(device))
        for layer in layers:
            x = x @ layer
    assert torch.equal(ours.cpu(), x)


def test_smaller_layers_come_in_their_shape(device: torch.device) -> None:
    loader = TripleBufferedLoader(WIDTH * WIDTH, torch.float32, device)
    shaped = [torch.ones(WIDTH, 8), torch.ones(8, 2), torch.ones(2)]
    out = loader.forward_with_triple_buffer([torch.matmul] * 3, shaped, torch.ones(1, WIDTH, device=device))
    assert out.tolist() == [WIDTH * 8 * 2]


def test_triple_buffering_waits_and_refuses(device: torch.device) -> None:
    loader = TripleBufferedLoader(8, torch.float16, device)
    event = loader.prefetch_layer(0, 1, torch.full((8,), 3.0, dtype=torch.float16))
    event.synchronize()
    assert loader.buffer_ready == [False, True, False]
    assert loader.buffers[1].tolist() == [3.0] * 8
    with pytest.raises(ValueError, match=r"layer 2 has 9 elements of torch.float16; the buffers have 8"):
        loader.prefetch_layer(2, 0, torch.ones(9, dtype=torch.float16))
    with pytest.raises(ValueError, match="make the loader for the largest layer, and in its dtype"):
        loader.prefetch_layer(2, 0, torch.ones(8))  # the tutorial rounds them
    with pytest.raises(ValueError, match="2 layers with parameters for 1"):
        loader.forward_with_triple_buffer([torch.mul] * 2, [torch.ones(8, dtype=torch.float16)], torch.ones(8))


def test_backward_through_overwritten_buffers_is_an_error(device: torch.device) -> None:
    layers = [weight.flatten() for weight in weights(5)]
    loader = TripleBufferedLoader(WIDTH * WIDTH, torch.float32, device)
    x = torch.ones(1, WIDTH, device=device, requires_grad=True)
    out = loader.forward_with_triple_buffer([lambda x, w: x @ w.view(WIDTH, WIDTH)] * 5, layers, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# OverlappedOffloader --------------------------------------------------------------------------------------------------
def test_steps_in_order_and_out_of_it(device: torch.device) -> None:
    """The tutorial's first layer is never loaded, its last one loads past the end, and compute waits for no load."""
    model, plain = stack(), stack()
    offloader = OverlappedOffloader(model, device)
    x = torch.ones(3, WIDTH)
    with torch.no_grad():
        for order in (range(4), range(4), [3, 1, 2, 0]):
            ours, expected = x.to(device), x
            for index in order:
                ours, expected = offloader.step(index, ours), plain[index](expected)
            assert torch.equal(ours.cpu(), expected)
        model[2].weight.mul_(2)
        plain[2].weight.mul_(2)
        assert torch.equal(offloader.step(2, x.to(device)).cpu(), plain[2](x))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    with pytest.raises(IndexError, match="layer 4 of 4"):
        offloader.step(4, x)


# pack_layers_sequentially ---------------------------------------------------------------------------------------------
def test_packed_layers_lie_in_order_and_say_what_they_are(tmp_path: Path) -> None:
    model = stack()
    model[1].to(torch.bfloat16)  # for which the tutorial raises TypeError
    path = tmp_path / "layers.safetensors"
    order, total = pack_layers_sequentially(model, str(path))
    named = dict(model.named_parameters())
    assert [entry["name"] for entry in order] == list(named)
    assert total == sum(parameter.nbytes for parameter in named.values())
    raw = path.read_bytes()
    ends = [entry["offset"] + entry["size"] for entry in order]
    assert [entry["offset"] for entry in order[1:]] == ends[:-1]
    assert (order[0]["offset"] % 4096, ends[-1]) == (0, len(raw))
    loaded = load_file(path)
    for entry in order:
        value = named[entry["name"]].detach()
        dtype = getattr(torch, entry["dtype"])
        found = torch.frombuffer(bytearray(raw[entry["offset"] :][: entry["size"]]), dtype=dtype)
        assert torch.equal(found.view(entry["shape"]), value)
        assert torch.equal(loaded[entry["name"]], value)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_packed_layers_are_offloaded_in_place(device: torch.device, tmp_path: Path) -> None:
    plain = stack()
    pack_layers_sequentially(plain, tmp_path / "layers.safetensors")
    with torch.device("meta"):
        model = linears(4, WIDTH)
    headrace.offload(model, device=device, checkpoint=tmp_path / "layers.safetensors")
    with torch.no_grad():
        assert torch.equal(model(torch.ones(1, WIDTH)).cpu(), plain(torch.ones(1, WIDTH)))


def test_what_cannot_be_packed_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "layers"
    path.write_text("before")
    model = nn.Linear(2, 2, dtype=torch.complex128)
    with pytest.raises(TypeError, match=r"'weight': safetensors files have no"):
        pack_layers_sequentially(model, path)
    assert path.read_text() == "before"


# compression ----------------------------------------------------------------------------------------------------------
SAMPLES = [
    *(weights(1, dtype)[0] for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    torch.zeros(1000, dtype=torch.bfloat16),
    torch.arange(-50, 50, dtype=torch.int8),
    torch.tensor([True, False, True]),
    torch.tensor(3.25),
    torch.empty(0, 3),
    weights(1)[0].t(),
    torch.randint(-(2**62), 2**62, (500,)),
    torch.tensor([float("nan"), -0.0, float("inf")]),
]


@pytest.mark.parametrize("tensor", SAMPLES, ids=lambda t: f"{t.dtype}-{tuple(t.shape)}")
def test_compression_keeps_every_bit(tensor: torch.Tensor) -> None:
    compressed = compress_parameter(tensor)
    assert len(compressed) <= tensor.nbytes + 64  # never larger but for what says what it is
    again = decompress_parameter(compressed, tuple(tensor.shape), tensor.dtype)
    assert again.dtype == tensor.dtype
    assert torch.equal(again.reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8))


def test_compression_on_a_device_and_of_weights_that_train(device: torch.device) -> None:
    """`tensor.numpy()` raises for both."""
    parameter = nn.Parameter(weights(1, torch.bfloat16)[0].to(device))
    again = decompress_parameter(compress_parameter(parameter), (WIDTH, WIDTH), torch.bfloat16)
    assert torch.equal(again, parameter.detach().cpu())


def test_bfloat16_weights_become_smaller() -> None:
    """LZ4 alone makes them 1.00 times smaller: their bytes repeat by significance, not in sequence."""
    tensor = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    assert tensor.nbytes / len(compress_parameter(tensor)) > 1.3
    assert len(compress_parameter(torch.zeros(1 << 16))) < 2000


def test_what_does_not_fit_is_refused() -> None:
    tensor = weights(1, torch.float16)[0]
    compressed = compress_parameter(tensor)
    assert torch.equal(decompress_parameter(compressed, (WIDTH, WIDTH), np.float16), tensor)
    for shape, dtype in [((WIDTH,), torch.float16), ((WIDTH, WIDTH), np.int16), ((WIDTH, WIDTH), torch.bfloat16)]:
        with pytest.raises(ValueError, match="give its own shape and dtype"):
            decompress_parameter(compressed, shape, dtype)
    for at in (60, len(compressed) // 2, len(compressed) - 1):
        damaged = bytearray(compressed)
        damaged[at] ^= 1
        with pytest.raises(ValueError, match=r"damaged|a byte changed"):
            decompress_parameter(bytes(damaged), (WIDTH, WIDTH), torch.float16)
    with pytest.raises(ValueError, match="are not what compress_parameter returned"):
        decompress_parameter(b"abc", (1,), torch.float16)
    with pytest.raises(TypeError, match="is not plain bytes"):
        compress_parameter(torch.eye(3).to_sparse())


@pytest.mark.parametrize("use_compression", [True, False])
def test_bfloat16_weights_rest_packed_on_disk(device: torch.device, tmp_path: Path, use_compression: bool) -> None:
    """Fewer bytes from the drive, and the same ones for compute."""
    model = linears(3, 256, bias=False, dtype=torch.bfloat16)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    size = model[0].weight.nbytes
    config = OffloadSystemConfig(
        size,
        1 << 20,
        prefetch_count=0,
        nvme_path=str(tmp_path),
        offload_parameters=True,
        use_compression=use_compression,
    )
    config.parameter_offload_tier = OffloadTier.NVME
    with UnifiedOffloadManager(model, config, device=device) as manager:
        for _ in range(2):
            for name in before:
                tensor = manager.ensure_gpu(name)
                assert torch.equal(tensor.cpu(), before[name])
                manager.offload(name, tensor * 2)
                before[name] *= 2
                del tensor
        read = manager.tiers.disk.meter.fetch_bytes
    assert read < 6 * size * 0.9 if use_compression else read == 6 * size
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


# compute_optimal_prefetch ---------------------------------------------------------------------------------------------
def stalls(loads: list[float], times: list[float], depths: list[int], passes: int = 6) -> float:
    """Seconds that compute waits in the last pass: one link, loads in order, each asked for `depths` layers ahead."""
    count = len(loads)
    begins: list[float] = []
    arrived, clock, stalled = 0.0, 0.0, 0.0
    for index in range(passes * count):
        asked = begins[index - depths[index % count]] if index >= depths[index % count] else 0.0
        arrived = max(arrived, asked) + loads[index % count]
        wait = max(0.0, arrived - clock)
        stalled += wait if index >= (passes - 1) * count else 0.0
        begins.append(clock + wait)
        clock += wait + times[index % count]
    return stalled


@pytest.mark.parametrize("seed", range(6))
def test_depths_hide_all_loads_and_are_the_least(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    loads = [float(value) for value in torch.rand(5, generator=generator)]
    times = [float(value) + 0.6 for value in torch.rand(5, generator=generator)]
    depths = compute_optimal_prefetch([int(load * 1e9) for load in loads], 1e9, times)
    loads = [int(load * 1e9) / 1e9 for load in loads]
    assert stalls(loads, times, depths) == pytest.approx(0, abs=1e-6)
    for smaller in itertools.product(*(range(1, depth + 1) for depth in depths)):
        if sum(smaller) < sum(depths):
            assert stalls(loads, times, list(smaller)) > 1e-9


def test_a_large_layer_among_small_ones_is_asked_for_earlier() -> None:
    """The tutorial divides by the layer's own compute time, while it arrives during that of those before."""
    assert compute_optimal_prefetch([10, 10, 300, 10], 100, [1.0, 1.0, 1.0, 1.0]) == [2, 3, 3, 1]


def test_where_the_link_is_slower_no_depth_helps() -> None:
    """2 GB over 32 GB/s beside 50 ms: the tutorial says 2 hides it, which takes a link of 40 GB/s."""
    assert compute_optimal_prefetch([2 * 10**9] * 3, 32e9, [0.05] * 3) == [1, 1, 1]
    for size in range(10**8, 3 * 10**8, 10**7):  # a load takes as long as a computation, but for rounding
        assert compute_optimal_prefetch([size] * 7, 1e9, [size / 1e9] * 7) == [1] * 7
    deeper, one = (stalls([0.0625] * 3, [0.05] * 3, [depth] * 3) for depth in (2, 1))
    assert deeper == pytest.approx(one)


def test_numbers_that_make_no_sense_are_refused() -> None:
    for arguments in (([1], 0.0, [1.0]), ([1, 2], 1.0, [1.0]), ([1], 1.0, [0.0])):
        with pytest.raises(ValueError, match="give one time above 0"):
            compute_optimal_prefetch(*arguments)
    assert compute_optimal_prefetch([], 1.0, []) == []
