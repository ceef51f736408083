"""Does more of anything ever predict a slower step? More memory, faster links, drives, memory and compute."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace
from headrace.planning.cost import MACHINES, Hardware
from tests.cost.conftest import LLAMA_8B

LAYERS = {"num_hidden_layers": 6, "vocab_size": 32_000}
SLACK = 1.021  # a simpler strategy is taken when it is nearly as fast (2%)
MORE = {
    "device memory": ("device_memory_bytes",),
    "host memory": ("host_memory_bytes",),
    "link": ("onload_bytes_per_second", "offload_bytes_per_second"),
    "drive": ("disk_read_bytes_per_second", "disk_write_bytes_per_second"),
    "DRAM": ("dram_bytes_per_second", "update_bytes_per_second"),
    "compute": ("flops_per_second",),
}


def seconds(hardware: Hardware, **work: Any) -> float:
    """Of a step; infinite when nothing fits."""
    taken = headrace.plan(LLAMA_8B | LAYERS, hardware=hardware, **work).step_seconds
    return float("inf") if taken is None else taken


@pytest.mark.extended
@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("what", MORE)
@settings(max_examples=8, derandomize=True, database=None)
@given(st.data())
def test_more_is_never_slower(what: str, data: st.DataObject) -> None:
    hardware = MACHINES["4090"].changed(
        device_memory_bytes=data.draw(st.integers(3, 24)) * 10**9,
        host_memory_bytes=data.draw(st.integers(8, 64)) * 10**9,
        onload_bytes_per_second=data.draw(st.sampled_from([3e9, 12e9, 25e9])),
        offload_bytes_per_second=data.draw(st.sampled_from([3e9, 12e9, 25e9])),
    )
    work = {
        "training": data.draw(st.sampled_from(["full", "full", "adapter", "inference"])),
        "batch_size": data.draw(st.sampled_from([1, 8])),
        "sequence_length": 512,
    }
    if work["training"] != "inference":  # which updates nothing
        work["overlap"] = data.draw(st.sampled_from(["none", "forward", "backward"]))
    factor = data.draw(st.sampled_from([1.1, 1.5, 4.0]))
    more = hardware.changed(
        **{name: type(getattr(hardware, name))(getattr(hardware, name) * factor) for name in MORE[what]}
    )
    assert seconds(more, **work) <= seconds(hardware, **work) * SLACK
