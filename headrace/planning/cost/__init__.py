"""What will a run hold in each tier, and how long will a step take? Plain numbers about models and machines."""

from headrace.planning.cost.configs import (
    LLAMAS,
    check_config,
    read_config,
    shape_of_config,
    stored_bits,
    wide_bits,
)
from headrace.planning.cost.hardware import (
    DRIVES,
    MACHINES,
    PEERS,
    Hardware,
    machine,
    nearest,
)
from headrace.planning.cost.modules import adapted_of, layers_of, shape_of_module
from headrace.planning.cost.run_plan import RunPlan, compare_text, plan_run
from headrace.planning.cost.shape import BlockKind, BlockShape, ModelShape
from headrace.planning.cost.wanted import METHODS, wanted
from headrace.planning.cost.work import Activations, Case, Method, Overlap, Place, Spread, Training, Work

__all__ = [
    "DRIVES",
    "LLAMAS",
    "MACHINES",
    "METHODS",
    "PEERS",
    "Activations",
    "BlockKind",
    "BlockShape",
    "Case",
    "Hardware",
    "Method",
    "ModelShape",
    "Overlap",
    "Place",
    "RunPlan",
    "Spread",
    "Training",
    "Work",
    "adapted_of",
    "check_config",
    "compare_text",
    "layers_of",
    "machine",
    "nearest",
    "plan_run",
    "read_config",
    "shape_of_config",
    "shape_of_module",
    "stored_bits",
    "wanted",
    "wide_bits",
]
