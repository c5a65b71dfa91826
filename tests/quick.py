"""Which cases of `pytest.mark.parametrize` run in `make test`."""

import pytest


def quick(cases, chosen):
    """The cases; those that are not chosen are slow tests.

    What they test is tested by those that are, at another point or by another
    name of the same kind.
    """
    cases, chosen = list(cases), list(chosen)
    assert all(case in cases for case in chosen)
    return [
        case
        if case in chosen
        else pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=pytest.mark.slow,
        )
        for case in cases
    ]
