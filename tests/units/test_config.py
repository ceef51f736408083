"""Are sizes read and shown as people mean them, and settings that make no sense refused by name?"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import OffloadConfig, format_bytes, parse_bytes

SETTINGS = settings(derandomize=True, max_examples=60)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("123B", 123),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8G", 8 << 30),
        (" 1.5GiB ", 3 << 29),
        ("500MB", 500_000_000),
        ("2TB", 2 * 10**12),
        ("0.57KB", 570),
        ("1.1MB", 1_100_000),
        ("0.3B", 0),
    ],
)
def test_sizes_are_read(size: int | str, expected: int) -> None:
    assert parse_bytes(size) == expected


@SETTINGS
@given(st.integers(0, 2**80))
def test_bytes_as_text_are_the_same_number(nbytes: int) -> None:
    assert parse_bytes(str(nbytes)) == parse_bytes(f"{nbytes}B") == parse_bytes(nbytes) == nbytes


@SETTINGS
@given(st.integers(1, 4095), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_units_are_powers_of_1024(count: int, unit: str) -> None:
    exponent = ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert parse_bytes(f"{count}{unit}") == count * 1024**exponent


@SETTINGS
@given(st.integers(0, 2**60))
def test_what_is_shown_can_be_read_and_is_near(nbytes: int) -> None:
    """Three significant digits: within half a percent, and never in a form such as 1e+03 KiB."""
    shown = format_bytes(nbytes)
    assert abs(parse_bytes(shown) - nbytes) <= 0.005 * nbytes, shown
    assert "e" not in shown.lower().replace("b", ""), shown


@SETTINGS
@given(st.integers(0, 2**60))
def test_what_is_shown_as_a_minimum_is_one(nbytes: int) -> None:
    """An advice such as "raise it to at least 1.51 GiB" must be enough when it is followed."""
    shown = parse_bytes(format_bytes(nbytes, at_least=True))
    assert nbytes <= shown <= 1.011 * nbytes + 1


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1000 << 10, "1000 KiB"),
        (1023 << 10, "1023 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (3 << 29, "1.5 GiB"),
        (1536 << 40, "1536 TiB"),
        (-3 << 29, "-1.5 GiB"),
    ],
)
def test_sizes_are_shown(nbytes: int, shown: str) -> None:
    assert format_bytes(nbytes) == shown


@pytest.mark.parametrize("size", ["", "GiB", "8 Gi", "8GiBs", "8,5GiB", "1e9", "0x10", "nan", "inf"])
def test_text_that_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(ValueError, match="is not a size; give bytes as an int, or text such as") as error:
        parse_bytes(size, name="device_memory")
    assert f"device_memory={size!r}" in str(error.value)


@pytest.mark.parametrize("size", [None, 1.5, True, [8], b"8GiB"])
def test_what_is_neither_number_nor_text_is_refused(size: Any) -> None:
    with pytest.raises(TypeError, match=r"host_memory is .*give bytes as an int"):
        parse_bytes(size, name="host_memory")


def test_a_negative_size_is_refused_with_its_number() -> None:
    with pytest.raises(ValueError, match="host_memory=-5 is negative; give"):
        parse_bytes(-5, name="host_memory")


@pytest.mark.parametrize("name", ["param_dtype", "grad_dtype"])
@pytest.mark.parametrize("dtype", [torch.int8, "bfloat16", 16])
def test_a_dtype_must_be_a_floating_point_one(name: str, dtype: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name}=.* is not a floating-point torch.dtype; give one such as"):
        OffloadConfig(device=torch.device("cpu"), **{name: dtype})


def test_settings_are_frozen_and_keyword_only() -> None:
    config = OffloadConfig(device=torch.device("cpu"), prefetch_blocks=0)
    with pytest.raises(AttributeError):
        config.prefetch_blocks = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        OffloadConfig(torch.device("cpu"))  # type: ignore[misc]
