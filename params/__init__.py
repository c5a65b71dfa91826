"""Experiments: what to train, on what, how, and what should come out.

Importing this package registers all of them.
"""

from params import image, lm, mt
from params.experiment import Experiment
from params.overrides import override
from params.registry import all_experiments, get, register

__all__ = [
    "Experiment",
    "all_experiments",
    "get",
    "image",
    "lm",
    "mt",
    "override",
    "register",
]
