"""Exactness: one step of a user's model beside plain Keras on the host.

`check` runs it. `recorder.py` notes what each layer gets and gives on its
device in a step that Python runs, and computes the same on the host.
`layers.py` compares them, and the micro-batches of a layer with all rows at
once; `fit_step.py` has the loss, and what `fit` runs. What differs is in the
`Report`.
"""

from tfgpipe.exactness.check import check
from tfgpipe.exactness.report import Report

__all__ = [
    "Report",
    "check",
]
