"""Runs one mini-batch through the cells: tasks to tensors.

Begin with `pipeline.py`.
"""

from tfgpipe.run.chain import Chain
from tfgpipe.run.clock import Clock, Event
from tfgpipe.run.mini_batch import MiniBatch
from tfgpipe.run.pipeline import LossGradients, Pipeline
from tfgpipe.run.update import update_on_devices, updates_slices_alike
