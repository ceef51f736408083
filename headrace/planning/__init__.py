"""What is loaded when, evicted, kept? Decided ahead, as frozen data, from plain numbers (no torch here)."""

from headrace.planning.activations import ActivationPlan, ActivationProblem, Saved, plan_activations
from headrace.planning.bounds import bytes_bound, lower_bound
from headrace.planning.caches import LAYERS_ON_DEVICE, LAYERS_STAGED, room_on_device, tokens_with_room
from headrace.planning.keeping import Keeping, Key, passes_through
from headrace.planning.plan import Plan, Prediction, Step
from headrace.planning.problem import Phase, Problem, Visit
from headrace.planning.recomputing import Fate, Recomputed, choose_kept
from headrace.planning.resting import on_disk
from headrace.planning.search import make_plan
from headrace.planning.tables import FEWEST_ROWS, goes_by_rows, kept_free_for_rows

__all__ = [
    "FEWEST_ROWS",
    "LAYERS_ON_DEVICE",
    "LAYERS_STAGED",
    "ActivationPlan",
    "ActivationProblem",
    "Fate",
    "Keeping",
    "Key",
    "Phase",
    "Plan",
    "Prediction",
    "Problem",
    "Recomputed",
    "Saved",
    "Step",
    "Visit",
    "bytes_bound",
    "choose_kept",
    "goes_by_rows",
    "kept_free_for_rows",
    "lower_bound",
    "make_plan",
    "on_disk",
    "passes_through",
    "plan_activations",
    "room_on_device",
    "tokens_with_room",
]
