"""Runs one mini-batch through the cells: tasks to tensors."""

from tfgpipe.run.pipeline import REMAT, Pipeline
from tfgpipe.run.seeds import Seeds
from tfgpipe.run.weights import place_variables

__all__ = ["REMAT", "Pipeline", "Seeds", "place_variables"]
