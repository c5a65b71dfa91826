"""Which arguments of a `GPipe` train fastest, and fit."""

from tfgpipe.plans.machine import MACHINES, Machine, machine_of
from tfgpipe.plans.plan import Plan
from tfgpipe.plans.planner import plan
from tfgpipe.plans.prediction import Prediction, Setting, predict
from tfgpipe.plans.search import PlanProblem, prediction_that_fits

__all__ = [
    "MACHINES",
    "Machine",
    "Plan",
    "PlanProblem",
    "Prediction",
    "Setting",
    "machine_of",
    "plan",
    "predict",
    "prediction_that_fits",
]
