"""What follows from the events of a step."""

import pytest
from simulated import events, seconds

from tfgpipe.monitor import statistics
from tfgpipe.schedules import SCHEDULES, CellFacts
from tfgpipe.timeline import simulated


def test_numbers_are_those_of_the_schedule():
    made = events(k=4, m=8)
    program = statistics.program_of(made)
    assert simulated(program, seconds) == made
    assert statistics.length(made) == program.length(seconds)
    assert statistics.bubble(made) == pytest.approx(program.bubble(seconds))
    assert statistics.idle_shares(made) == pytest.approx([9 / 40] * 4)


def test_updates_are_in_no_number():
    for function in (
        statistics.length,
        statistics.bubble,
        statistics.idle_shares,
        lambda made: statistics.program_of(made).ops,
    ):
        assert function(events(updates=True)) == function(events())


def test_order_of_tasks_that_take_no_time_is_kept():
    program = SCHEDULES["zero_bubble"](2, 3).program(facts=[CellFacts()] * 2)
    made = simulated(program, lambda op: float(op.kind != "input_gradient"))
    found = statistics.program_of(made)
    assert sorted(op.task for op in found.ops) == sorted(
        op.task for op in program.ops
    )
    for own, expected in zip(found.by_device, program.by_device, strict=True):
        assert [op.task for op in own] == [op.task for op in expected]
