"""How long does it take, does it hide, and what does it hold? Closed formulas on plain numbers, for estimates by hand.

Times in seconds, sizes in bytes, rates in bytes or operations per second. Each docstring names its source, and says
where that errs. `headrace.plan` uses them where a closed formula is enough, and simulates where it is not.
"""

from headrace.planning.cost.formulas import (
    ADAM_BYTES,
    Compression,
    adam_seconds,
    arithmetic_intensity,
    batch_multiplier,
    codec_cores,
    compression_break_even,
    efficiency,
    fraction_step_seconds,
    hideable_activation_share,
    layers_per_second,
    overlap,
    pipelined_seconds,
    prefetch_bytes,
    prefetch_depth,
    resident_fraction,
    step_seconds,
    tokens_to_hide,
    transfer_seconds,
    wear_steps,
)
from headrace.planning.cost.tables import (
    MemoryTable,
    Precision,
    Row,
    layer_activation_bytes,
    memory_table,
    power_of_two_bytes,
    reserved_peak_blocks,
    zero_bytes,
)

__all__ = [
    "ADAM_BYTES",
    "Compression",
    "MemoryTable",
    "Precision",
    "Row",
    "adam_seconds",
    "arithmetic_intensity",
    "batch_multiplier",
    "codec_cores",
    "compression_break_even",
    "efficiency",
    "fraction_step_seconds",
    "hideable_activation_share",
    "layer_activation_bytes",
    "layers_per_second",
    "memory_table",
    "overlap",
    "pipelined_seconds",
    "power_of_two_bytes",
    "prefetch_bytes",
    "prefetch_depth",
    "reserved_peak_blocks",
    "resident_fraction",
    "step_seconds",
    "tokens_to_hide",
    "transfer_seconds",
    "wear_steps",
    "zero_bytes",
]
