"""What is loaded when, evicted, kept? Decided ahead, as frozen data, from plain numbers (no torch here)."""

from millrace.planning.activations import ActivationPlan, ActivationProblem, Saved, plan_activations
from millrace.planning.bounds import bytes_bound, lower_bound
from millrace.planning.errors import BudgetTooSmall
from millrace.planning.keeping import Keeping, Key, passes_through
from millrace.planning.plan import Plan, Prediction, Step
from millrace.planning.planner import make_plan, make_run
from millrace.planning.problem import Problem
from millrace.planning.simulator import Simulation, simulate
from millrace.planning.visit import Phase, Visit

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
