"""What will a run hold in each tier, and how long will a step take? Plain numbers about models and machines."""

from millrace.planning.cost.catalogue import DEVICES, DRIVES, HOSTS, MACHINES, machine, nearest, with_drives
from millrace.planning.cost.configs import is_counted, read_config, shape_of_config, stored_bits
from millrace.planning.cost.hardware import PEERS, Hardware
from millrace.planning.cost.modules import is_module, shape_of_module
from millrace.planning.cost.nodes import all_devices, with_peers
from millrace.planning.cost.run_plan import RunPlan, plan_run
from millrace.planning.cost.run_text import compare_text
from millrace.planning.cost.shape import BlockKind, BlockShape, ModelShape
from millrace.planning.cost.wanted import METHODS, wanted
from millrace.planning.cost.work import Activations, Method, Overlap, Place, Spread, Training, Work

__all__ = [
    "DEVICES",
    "DRIVES",
    "HOSTS",
    "MACHINES",
    "METHODS",
    "PEERS",
    "Activations",
    "BlockKind",
    "BlockShape",
    "Hardware",
    "Method",
    "ModelShape",
    "Overlap",
    "Place",
    "RunPlan",
    "Spread",
    "Training",
    "Work",
    "all_devices",
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
    "with_drives",
    "with_peers",
]
