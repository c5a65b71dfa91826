"""Orders for unequal cells: never worse than those with names, and within."""

import itertools
import math
import random

import pytest

from tfgpipe.schedules import SCHEDULES, Schedule, search
from tfgpipe.schedules.orders import CHUNKS, devices_of_cells

EQUAL = [(1, 1, 1)] * 4


def cases(seed, count):
    """Random cells, one a device or two in a V, with and without limits."""
    rng = random.Random(seed)
    for _ in range(count):
        k, m = rng.randint(2, 8), rng.randint(1, 12)
        devices = None
        if k % 2 == 0 and rng.random() < 0.5:
            devices = [*range(k // 2), *reversed(range(k // 2))]
        durations = [
            [rng.choice([0.0, 0.5, 1.0, 2.0, rng.random()]) for _ in range(3)]
            for _ in range(k)
        ]
        memory = rng.choice([math.inf, k, k + 2, 2 * k])
        yield durations, m, memory, devices


def duration_of(durations):
    kinds = ("forward", "input_gradient", "weight_gradient")

    def duration(task):
        own = durations[task.cell]
        if task.kind == "backward":
            return own[1] + own[2]
        return own[kinds.index(task.kind)]

    return duration


def check(durations, m, memory, devices):
    found = search(durations, m, memory, devices=devices)
    duration, places = duration_of(durations), devices or range(len(durations))
    assert found.num_micro_batches == m
    assert [*map(found.device_of, range(len(durations)))] == [*places]
    assert max(found.held()) <= memory
    length = found.length(duration)
    num_devices = 1 + max(places)
    chunks = len(durations) // num_devices
    for name, make in SCHEDULES.items():
        if CHUNKS[name] not in (None, chunks) or [
            *devices_of_cells(name, num_devices, chunks)
        ] != [*places]:
            continue
        named = make(num_devices, m, chunks)
        if max(named.held()) <= memory:
            named_length = named.length(duration)
            assert length <= named_length * (1 + 1e-12), name
    return length


def test_no_named_schedule_is_shorter():
    for case in cases(0, 4):
        check(*case)


@pytest.mark.slow
def test_no_named_schedule_is_shorter_in_a_thousand_cases():
    for case in cases(1, 1000):
        check(*case)


def test_equal_cells_have_the_bound_of_zero_bubble():
    assert search(EQUAL, 8).length(duration_of(EQUAL)) == 3 * 8 + 3
    v = [0, 1, 1, 0]
    assert search(EQUAL, 8, 4, devices=v).length(duration_of(EQUAL)) == 49


def test_orders_are_the_best_of_all_where_all_can_be_tried():
    """Two cells, two micro-batches: every order of both devices."""
    durations = [(1.0, 0.7, 2.0), (0.4, 1.5, 0.3)]
    shortest = min(every_length(durations))
    found = search(durations, 2).length(duration_of(durations))
    assert found == pytest.approx(shortest)


def every_length(durations):
    """Lengths of all schedules of two cells and two micro-batches."""
    kinds = ("forward", "input_gradient", "weight_gradient")
    orders = [
        [
            *itertools.permutations(
                [(kind, k, m) for kind in kinds for m in (0, 1)]
            )
        ]
        for k in (0, 1)
    ]
    possible = [
        [
            o
            for o in own
            if all(
                o.index((a, k, m)) < o.index((b, k, m))
                for m in (0, 1)
                for a, b in itertools.pairwise(kinds)
            )
        ]
        for k, own in enumerate(orders)
    ]
    for pair in itertools.product(*possible):
        try:
            schedule = Schedule(pair)
        except ValueError:  # the devices would wait for each other
            continue
        yield schedule.length(duration_of(durations))


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (([], 2), {}, "each of the 0 cells"),
        (([(1, 1)], 2), {}, r"durations=\[\(1, 1\)\]"),
        (([(1, 1, -1)], 2), {}, "`durations` must have 3 numbers from 0"),
        (([3, 4], 2), {}, r"durations=\[3, 4\]"),
        ((EQUAL, 0), {}, "num_micro_batches=0"),
        ((EQUAL, 2, math.nan), {}, "memory="),
        ((EQUAL, 2), {"devices": [0, 0, 2, 2]}, "leave none out"),
        ((EQUAL, 2), {"devices": [0, 1]}, r"devices=\[0, 1\]"),
        ((EQUAL, 2), {"devices": [0, 1, 2, None]}, "devices="),
        ((EQUAL, 2, 0.5), {}, "enough to hold a micro-batch"),
    ],
)
def test_bad_arguments_are_refused(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        search(*arguments, **options)
