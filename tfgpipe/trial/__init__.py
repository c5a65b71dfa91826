"""Tries a model on a few rows, before a pipeline trains with it.

Whether a layer treats a batch as it treats its parts cannot be read from what
it is made of; it can be tried. `trial.py` tries each phase of a model once,
`phase.py` one of them, unit by unit on some rows. `rows.py` has the rows,
`units.py` what is tried one by one and what need not be, `tried_graph.py` runs
it, `compare.py` tells what differs, `distance.py` how far; `conditions.py`
reads what the graph alone shows.
"""

from tfgpipe.trial.distance import (
    change_distance,
    gradient_distance,
    largest,
    limit_of,
    output_distance,
)
from tfgpipe.trial.trial import TRIALS, Trial

__all__ = [
    "TRIALS",
    "Trial",
    "change_distance",
    "gradient_distance",
    "largest",
    "limit_of",
    "output_distance",
]
