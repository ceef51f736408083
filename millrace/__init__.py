"""Which names does a user import? These and no others."""

from millrace.activation_offloading import ActivationOffloading, offload_activations
from millrace.activations.selection import mark_not_offload
from millrace.ahead import HardwareNotFound, Probe, plan, probe
from millrace.api import Offloaded, offload
from millrace.errors import (
    BudgetError,
    CheckpointError,
    DiskError,
    LayoutError,
    MillraceError,
    RankError,
    StateError,
    WeightChangedError,
)
from millrace.integrations.diffusers import offload_pipeline
from millrace.integrations.transformers import from_pretrained
from millrace.loading import load
from millrace.one_by_one import experts
from millrace.planning.cost import Hardware, RunPlan
from millrace.report import ActivationStats, Stats
from millrace.saving import Saving, save

__version__ = "0.1.0"

__all__ = [
    "ActivationOffloading",
    "ActivationStats",
    "BudgetError",
    "CheckpointError",
    "DiskError",
    "Hardware",
    "HardwareNotFound",
    "LayoutError",
    "MillraceError",
    "Offloaded",
    "Probe",
    "RankError",
    "RunPlan",
    "Saving",
    "StateError",
    "Stats",
    "WeightChangedError",
    "__version__",
    "experts",
    "from_pretrained",
    "load",
    "mark_not_offload",
    "offload",
    "offload_activations",
    "offload_pipeline",
    "plan",
    "probe",
    "save",
]
