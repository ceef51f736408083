"""What will a run hold in each tier, and how long will a step take? Plain numbers about models and machines."""

from headrace.planning.cost.configs import is_counted, read_config, shape_of_config, stored_bits
from headrace.planning.cost.hardware import (
    DRIVES,
    MACHINES,
    PEERS,
    Hardware,
    machine,
    nearest,
)
from headrace.planning.cost.modules import is_module, shape_of_module
from headrace.planning.cost.run_plan import RunPlan, compare_text, plan_run
from headrace.planning.cost.shape import BlockKind, BlockShape, ModelShape
from headrace.planning.cost.wanted import METHODS, wanted
from headrace.planning.cost.work import Activations, Case, Method, Overlap, Place, Spread, Training, Work

__all__ = [
    "DRIVES",
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
    "compare_text",
    "is_counted",
    "is_module",
    "machine",
    "nearest",
    "plan_run",
    "read_config",
    "shape_of_config",
    "shape_of_module",
    "stored_bits",
    "wanted",
]
