"""Flags of the programs."""

import doctest

import pytest
from absl import flags as absl_flags

from tools import flags


def test_lists_can_be_given_by_name_and_number():
    assert doctest.testmod(flags).failed == 0
    values = flags.new_flags(rounds=3)
    flags.define(
        values,
        size=([1.5], "Sizes."),
        color=(["red"], "Colors.", ["red", "blue"]),
        word=(["a", "b"], "Any."),
        share=(0.5, "Any.", None),
        count=(int, "None."),
        kind=("x", "Some.", ["x", "y"]),
    )
    values(["program"])
    assert (values.rounds, values.size, values.color) == (3, [1.5], ["red"])
    assert (values.count, values.word) == (None, ["a", "b"])
    values(["program", "--size=0,2", "--color=blue,red", "--share=-1"])
    assert (values.size, values.color) == ([0, 2], ["blue", "red"])
    for word in ("--color=", "--count=0", "--kind=z", "--size=-1"):
        with pytest.raises(absl_flags.IllegalFlagValueError):
            values(["program", word])
