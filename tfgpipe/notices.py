"""Warnings that come for each model, and not once a process.

Python shows a text once for the line that warns: a second model with a layer of
the same name would not be warned of.
"""

from __future__ import annotations

import inspect
import logging
import warnings


def warn(message: str) -> None:
    """Warns, also if the same was said before."""
    frame = inspect.currentframe()
    caller = frame.f_back if frame is not None else None
    warnings.warn_explicit(
        message,
        UserWarning,
        __file__ if caller is None else caller.f_code.co_filename,
        1 if caller is None else caller.f_lineno,
        module="tfgpipe",
        registry=None,
    )


def inform(message: str) -> None:
    """Says what no user needs to act on, in the log named `tfgpipe`."""
    logging.getLogger("tfgpipe").info(message)
