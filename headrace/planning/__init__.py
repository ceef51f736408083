"""What is loaded when, evicted, kept? Decided ahead, as frozen data, from plain numbers (no torch here)."""

from headrace.planning.activations import ActivationPlan, ActivationProblem, Saved, plan_activations
from headrace.planning.bounds import bytes_bound, lower_bound
from headrace.planning.errors import BudgetTooSmall
from headrace.planning.keeping import Keeping, Key, passes_through
from headrace.planning.plan import Plan, Prediction, Step
from headrace.planning.planner import make_plan, make_run
from headrace.planning.problem import Problem
from headrace.planning.simulator import Simulation, simulate
from headrace.planning.visit import Phase, Visit

__all__ = [
    "ActivationPlan",
    "ActivationProblem",
    "BudgetTooSmall",
    "Keeping",
    "Key",
    "Phase",
    "Plan",
    "Prediction",
    "Problem",
    "Saved",
    "Simulation",
    "Step",
    "Visit",
    "bytes_bound",
    "lower_bound",
    "make_plan",
    "make_run",
    "passes_through",
    "plan_activations",
    "simulate",
]
