"""How long tasks should take."""

from tfgpipe.schedules import Task
from tfgpipe.timeline import Event
from tools.timeline.runs import mean_durations


def test_mean_duration_is_that_of_a_kind_in_a_cell():
    made = [
        Event(Task("forward", 0, 0), 0, 0.0, 1.0),
        Event(Task("forward", 0, 1), 0, 2.0, 5.0),
        Event(Task("forward", 1, 0), 1, 2.0, 9.0),
    ]
    duration = mean_durations(made)
    assert duration(Task("forward", 0, 1)) == 2
    assert duration(Task("forward", 1, 1)) == 7
