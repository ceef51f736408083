"""Which names does a user import? These and no others; `headrace/__init__.py` hands them out."""

from headrace.activation_offloading import ActivationOffloading, offload_activations
from headrace.activations.recomputing import checkpoint_contexts
from headrace.activations.selection import mark_not_offload
from headrace.ahead import HardwareNotFound, plan
from headrace.api import Offloaded, offload
from headrace.errors import (
    BudgetError,
    CheckpointError,
    DiskError,
    HeadraceError,
    LayoutError,
    RankError,
    StateError,
    WeightChangedError,
)
from headrace.integrations.diffusers import offload_pipeline
from headrace.integrations.transformers import from_pretrained
from headrace.loading import load
from headrace.memory.shared_budget import SharedBudget, budget
from headrace.own_experts import experts
from headrace.planning.cost import Hardware, RunPlan
from headrace.probing import Probe, probe
from headrace.report import ActivationStats, Stats
from headrace.saving import Saving, save

__all__ = [
    "ActivationOffloading",
    "ActivationStats",
    "BudgetError",
    "CheckpointError",
    "DiskError",
    "Hardware",
    "HardwareNotFound",
    "HeadraceError",
    "LayoutError",
    "Offloaded",
    "Probe",
    "RankError",
    "RunPlan",
    "Saving",
    "SharedBudget",
    "StateError",
    "Stats",
    "WeightChangedError",
    "budget",
    "checkpoint_contexts",
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
