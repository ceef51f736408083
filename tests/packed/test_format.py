"""Does every bit come back, whatever the words are, and is little done where it does not pay?"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.memory.packed import Packed, available, pack, pack_into, unpack, unpack_in_place

from .conftest import weights
from .reference import pack as reference_pack
from .reference import unpack as reference_unpack


def bits(words: torch.Tensor) -> np.ndarray:
    return words.view(torch.int16).numpy().view(np.uint16)


def unpacked(memory: torch.Tensor) -> np.ndarray:
    packed = Packed.in_memory(memory)
    out = torch.full((packed.words,), 12345, dtype=torch.int16)
    unpack(packed, out)
    return out.numpy().view(np.uint16)


def test_the_native_code_is_built() -> None:
    assert available()


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("count", [1_000, 8_192, 100_001, 128 * 64 * 9 + 77])
def test_weights_come_back_from_three_quarters(count: int) -> None:
    words = weights(count)
    memory = pack(words)
    assert memory is not None
    assert np.array_equal(unpacked(memory), bits(words))
    assert np.array_equal(reference_unpack(memory.numpy()), bits(words))
    packed = Packed.in_memory(memory)
    assert 0 < packed.escapes < 0.004 * count
    assert memory.numel() == 64 + 192 * -(-count // 128) + 4 * packed.escapes


@pytest.mark.usefixtures("vectors")
def test_packing_is_what_the_format_says() -> None:
    words = weights(8_192)  # of which all are counted
    memory = pack(words)
    assert memory is not None
    assert np.array_equal(memory.numpy(), reference_pack(bits(words)))


@pytest.mark.usefixtures("vectors")
def test_every_bit_pattern_comes_back() -> None:
    """NaNs with their payloads, infinities, denormal numbers, both zeros: among weights, in any order."""
    generator = torch.Generator().manual_seed(1)
    every = torch.arange(65_536, dtype=torch.int32).to(torch.int16)[torch.randperm(65_536, generator=generator)]
    words = torch.cat([bits_of for part in every.split(256) for bits_of in (part, weights(4_096).view(torch.int16))])
    memory = pack(words)
    assert memory is not None
    assert np.array_equal(unpacked(memory), bits(words))
    assert Packed.in_memory(memory).escapes > 60_000


@pytest.mark.usefixtures("vectors")
def test_any_range_is_unpacked_alone() -> None:
    words = weights(40_000)
    memory = pack(words)
    assert memory is not None
    packed = Packed.in_memory(memory)
    places = [int(entry) >> 8 for entry in packed.escaped]
    ranges = [(0, 1), (5, 100), (127, 2), (128, 128), (129, 30_001), (39_997, 3), (64, 0), (40_000, 0)]
    ranges += [(place, 1) for place in places[:3]] + [(place + 1, 300) for place in places[:3]]
    for first, count in ranges:
        out = torch.full((count + 2,), 12345, dtype=torch.int16)
        unpack(packed, out[1 : count + 1], first)
        assert np.array_equal(bits(out[1 : count + 1]), bits(words[first : first + count])), (first, count)
        assert out[0] == out[-1] == 12345


def test_ranges_that_are_not_there_are_refused() -> None:
    memory = pack(weights(1_000))
    assert memory is not None
    with pytest.raises(ValueError, match=r"words 999 to 1001 are not within the 1000"):
        unpack(Packed.in_memory(memory), torch.empty(2, dtype=torch.int16), 999)


@pytest.mark.parametrize("count", [1_000, 100_000])
def test_what_does_not_pay_is_left_alone(count: int) -> None:
    """All exponents alike often: 15 of 256 are packed, the rest would escape."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**15), 2**15, (count,), generator=generator, dtype=torch.int16)
    before = words.clone()
    assert pack(words) is None
    assert torch.equal(words, before)
    assert pack_into(words, words.view(torch.uint8)) == 0


def test_where_packing_stops_to_pay() -> None:
    """0.75 of the bytes and 4 for each escape, of 0.9 at most."""
    most = (int(2 * 128_000 * 0.9) - 64 - 192_000) // 4
    for escapes in (most, most + 1):
        words = (torch.arange(128_000) % 15 << 7).to(torch.int16)
        words[-escapes:] = (torch.arange(escapes) % 100 + 100 << 7).to(torch.int16)
        memory = pack(words)
        assert (memory is None) == (escapes > most)
        if memory is not None:
            assert Packed.in_memory(memory).escapes == escapes
            assert np.array_equal(unpacked(memory), bits(words))


@pytest.mark.parametrize("count", [0, 1, 2, 127, 128])
def test_a_few_words_are_left_alone_or_come_back(count: int) -> None:
    words = weights(count)
    memory = pack(words)
    assert memory is None or np.array_equal(unpacked(memory), bits(words))


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("count", [1_000, 8_192, 40_001, 262_144])
def test_in_place(count: int) -> None:
    words = weights(count)
    memory = words.clone().view(torch.uint8)
    nbytes = pack_into(memory, memory)
    whole = pack(words)
    assert whole is not None
    assert torch.equal(memory[:nbytes], whole)
    slot_bytes = -(-2 * count // 4096) * 4096
    for begin in {(slot_bytes - nbytes) // 4096 * 4096, (slot_bytes - nbytes) // 64 * 64, 0}:
        slot = torch.zeros(slot_bytes, dtype=torch.uint8)
        slot[begin : begin + nbytes] = whole
        unpack_in_place(slot, begin)
        assert np.array_equal(bits(slot[: 2 * count]), bits(words)), begin


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60)
@given(st.integers(1, 5_000), st.integers(1, 20), st.integers(0, 2**32 - 1), st.data())
def test_any_words(count: int, exponents: int, seed: int, data: st.DataObject) -> None:
    generator = np.random.default_rng(seed)
    some = generator.integers(0, 256, exponents)
    words = (
        generator.integers(0, 2, count) << 15 | some[generator.integers(0, exponents, count)] << 7
    ) | generator.integers(0, 128, count)
    tensor = torch.from_numpy(words.astype(np.uint16).view(np.int16))
    memory = pack(tensor)
    if memory is None:
        return
    assert np.array_equal(unpacked(memory), bits(tensor))
    first = data.draw(st.integers(0, count))
    out = torch.empty(data.draw(st.integers(0, count - first)), dtype=torch.int16)
    unpack(Packed.in_memory(memory), out, first)
    assert np.array_equal(bits(out), bits(tensor[first : first + out.numel()]))
