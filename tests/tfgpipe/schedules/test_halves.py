"""Weight gradients where a device would wait, or is full."""

from tfgpipe.schedules.orders import SCHEDULES, filled


def orders(k, m):
    """Of "1f1b", with input gradients alone."""
    return [
        [
            task._replace(kind="input_gradient")
            if task.kind == "backward"
            else task
            for task in own
        ]
        for own in SCHEDULES["1f1b"](k, m).tasks
    ]


def words(schedule, device):
    return " ".join(f"{kind[0]}{m}" for kind, _, m in schedule.tasks[device])


def test_weight_gradients_come_where_the_device_would_wait():
    schedule = filled(orders(2, 3), [2, 2])
    assert words(schedule, 0) == "f0 f1 i0 w0 f2 i1 w1 i2 w2"
    # It waits for nothing but the end, and for being full.
    assert words(schedule, 1) == "f0 i0 f1 i1 w0 f2 i2 w1 w2"


def test_what_a_device_may_hold_is_kept_to():
    for most in (1, 2, 3, 9):
        schedule = filled(orders(1, 9), [most])
        assert schedule.held() == [most]


def test_an_order_that_needs_more_than_may_be_held_is_run():
    assert filled(orders(4, 4), [1] * 4).held() == [4, 3, 2, 1]
