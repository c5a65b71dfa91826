"""The experiments by name."""

from params import names
from params.experiment import Experiment

HOW_TO_LIST = "`python -m tools.train --list` shows all."
_EXPERIMENTS: dict[str, Experiment] = {}


def register(experiment: Experiment) -> Experiment:
    """Makes an experiment known by its name; returns it.

    Args:
        experiment: Its name says field and model: "image.amoebanet_d_demo".

    Raises:
        ValueError: If another experiment has the name.
    """
    if experiment.name in _EXPERIMENTS:
        raise ValueError(
            "`experiment` must have a name of its own. Received: "
            f"name={experiment.name!r}, which is registered already."
        )
    _EXPERIMENTS[experiment.name] = experiment
    return experiment


def get(name: str) -> Experiment:
    """Returns the experiment called `name`.

    Args:
        name: Such as "image.amoebanet_d_demo".

    Raises:
        ValueError: If there is none; the nearest name is suggested.
    """
    if name not in _EXPERIMENTS:
        raise ValueError(
            names.unknown("params", name, _EXPERIMENTS, HOW_TO_LIST)
        )
    return _EXPERIMENTS[name]


def all_experiments() -> list[Experiment]:
    """Returns every experiment, ordered by name."""
    return [_EXPERIMENTS[name] for name in sorted(_EXPERIMENTS)]
