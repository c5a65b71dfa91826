"""Tries a model on a few rows, before a pipeline trains with it.

Whether a layer treats a batch as it treats its parts cannot be read from what
it is made of; it can be tried. `trial.py` tries each phase of a model once,
`phase.py` one of them, unit by unit. `rows.py` has the rows, `units.py` what is
tried one by one and what need not be, `tried_graph.py` runs it, `compare.py`
tells what differs; `conditions.py` reads what the graph alone shows.
"""

from tfgpipe.trial.trial import TRIALS, Trial, try_all
from tfgpipe.trial.units import MIXES_ROWS, ROW_BY_ROW

__all__ = [
    "MIXES_ROWS",
    "ROW_BY_ROW",
    "TRIALS",
    "Trial",
    "try_all",
]
