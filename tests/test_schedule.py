import pytest

from tfgpipe.schedule import (
    SCHEDULES,
    Task,
    bubble,
    forward_only,
    gpipe,
    in_order,
)


def simulate(tasks, duration=1):
    """Earliest end of the last task, every device one task at a time."""
    num_cells = 1 + max(task.cell for device in tasks for task in device)
    end, free = {}, [0] * len(tasks)
    for task in in_order(tasks):
        device = next(i for i, own in enumerate(tasks) if task in own)
        start = max([free[device]] + [end[t] for t in task.needs(num_cells)])
        end[task] = free[device] = start + duration
    return max(end.values())


CASES = [(k, m) for k in range(1, 9) for m in (1, 2, 3, 8, 32)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("k", "m"), CASES)
def test_schedule_runs_every_task_once_after_what_it_needs(name, k, m):
    tasks = SCHEDULES[name](k, m)
    order = list(in_order(tasks))
    expected = {
        Task(kind, cell, micro_batch)
        for kind in ("forward", "backward")
        for cell in range(k)
        for micro_batch in range(m)
    }
    assert len(order) == len(expected)
    assert set(order) == expected
    position = {task: i for i, task in enumerate(order)}
    for task in order:
        assert all(position[t] < position[task] for t in task.needs(k))


@pytest.mark.parametrize(("k", "m"), CASES)
def test_length_of_gpipe_is_that_of_its_bubble(k, m):
    length = simulate(gpipe(k, m))
    assert length == 2 * (m + k - 1)
    assert bubble(k, m) == pytest.approx(1 - 2 * m / length)


@pytest.mark.parametrize(("k", "m"), CASES)
def test_forward_only_has_the_same_bubble(k, m):
    assert simulate(forward_only(k, m)) == m + k - 1


def test_gpipe_runs_backward_in_reverse():
    backward = [m for kind, _, m in gpipe(2, 4)[1] if kind == "backward"]
    assert backward == [3, 2, 1, 0]


def test_in_order_takes_a_micro_batch_through_all_cells_first():
    order = list(in_order(gpipe(3, 2)))
    assert [t.cell for t in order[:6]] == [0, 1, 2, 0, 1, 2]


def test_in_order_of_devices_that_wait_for_each_other_names_the_tasks():
    tasks = [
        [Task("forward", 0, 1), Task("forward", 0, 0)],
        [Task("forward", 1, 0), Task("forward", 1, 1)],
    ]
    assert len(list(in_order(tasks))) == 4
    tasks[0].insert(0, Task("backward", 0, 0))
    with pytest.raises(ValueError, match=r"backward.*cell=0, micro_batch=0"):
        list(in_order(tasks))
