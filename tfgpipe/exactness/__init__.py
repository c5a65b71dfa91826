"""Exactness: one step of a user's model beside plain Keras on the host.

`check` runs it. `recorder.py` has what each layer gets and gives on its device
in a step by layers; `replay.py` computes the same on the host. `layers`
compares them, `rows` the micro-batches of a layer with all rows at once,
`loss_by_keras` the loss, and `graph_step` what `fit` runs. What differs is in
the `Report`.
"""

from tfgpipe.exactness.check import check
from tfgpipe.exactness.report import Compared, Finding, Report

__all__ = ["Compared", "Finding", "Report", "check"]
