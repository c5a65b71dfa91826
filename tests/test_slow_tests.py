"""The list of tests that are left out of a quick run."""

import pathlib
import re

import slow_tests

ROOT = pathlib.Path(__file__).parent.parent


def test_slow_tests_of_the_list_are_there():
    """One that was renamed would be quick again without a word."""
    for name in slow_tests.slow_tests():
        path, function, *_ = re.split(r"::|\[", name)
        assert f"def {function}(" in (ROOT / path).read_text(), name


def test_times_become_a_list_of_slow_tests():
    text = """
2.50s call     tests/test_a.py::test_one[x y]
0.60s setup    tests/test_a.py::test_one[x y]
2.00s call     tests/test_a.py::test_two
9.00s call     tests/journeys/test_distillation.py::test_kept
"""
    found = slow_tests.measured(text, 3.0)
    assert found == {"tests/test_a.py::test_one[x y]"}
