"""Which arguments of a `GPipe` train fastest, and fit."""

from tfgpipe.plans.machine import MACHINES, Machine
from tfgpipe.plans.plan import Plan, SizedModel, plan, sized
from tfgpipe.plans.prediction import Prediction, Setting, predict
from tfgpipe.plans.search import PlanProblem, prediction_that_fits

__all__ = [
    "MACHINES",
    "Machine",
    "Plan",
    "PlanProblem",
    "Prediction",
    "Setting",
    "SizedModel",
    "plan",
    "predict",
    "prediction_that_fits",
    "sized",
]
