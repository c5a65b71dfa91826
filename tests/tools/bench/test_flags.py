"""Lists as flags."""

import pytest
from absl import flags

from tools.bench.flags import define_choices, define_numbers, new_flags


def test_lists_can_be_given_by_name_and_number():
    values = new_flags(rounds=3)
    define_numbers(values, "size", [1.5], "Sizes.", 0, float)
    define_choices(values, "color", ["red"], ["red", "blue"], "Colors.")
    values(["program"])
    assert (values.rounds, values.size, values.color) == (3, [1.5], ["red"])
    values(["program", "--size=0,2", "--color=blue,red"])
    assert (values.size, values.color) == ([0, 2], ["blue", "red"])
    with pytest.raises(flags.IllegalFlagValueError):
        values(["program", "--color="])
