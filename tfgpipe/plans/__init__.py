"""Which arguments of a `GPipe` train fastest, and fit."""

from tfgpipe.plans.plan import Plan, SizedModel, machine_here, plan, sized
from tfgpipe.plans.prediction import (
    DeviceMemory,
    Prediction,
    Setting,
    predict,
)
from tfgpipe.plans.search import PlanProblem, prediction_that_fits
from tfgpipe.plans.workload import MACHINES, Machine
