"""Programs as text, and back."""

import pytest

from tfgpipe.schedules.lowering import REMAT, CellFacts
from tfgpipe.schedules.orders import CHUNKS, SCHEDULES
from tfgpipe.schedules.program import Program
from tfgpipe.schedules.schedule import Schedule


def test_program_is_a_row_a_device():
    assert str(SCHEDULES["1f1b"](2, 2).program("except_last")) == (
        "device 0  F0+ F1          B0----- R1      B1-----\n"
        "device 1      F0+ B0----- F1  R1  B1-----\n"
        "# F forward, R recompute, B backward, + keeps what the backward pass "
        "needs\n"
        "# bubble 30% if cells take equal times; micro-batches that devices "
        "hold: 2, 1"
    )


def test_cells_are_named_where_they_are_not_the_devices():
    program = SCHEDULES["interleaved"](1, 1, 2).program()
    first, *_ = str(program).splitlines()
    assert first == "device 0  F0.0+ F1.0+ B1.0------- B0.0-------"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("devices", "m"), [(1, 1), (2, 3), (3, 12)])
def test_text_can_be_read_back(name, devices, m):
    schedule = SCHEDULES[name](devices, m, CHUNKS[name] or 2)
    facts = [CellFacts()] * schedule.num_cells
    program = schedule.program(facts=facts)
    assert Schedule(str(program)).tasks == schedule.tasks
    always = Schedule(str(schedule.program("always", facts)))
    assert Schedule(str(Program(always.ops, devices))) == always
    kinds = [task.kind for task in always.order()]
    assert kinds.count("recompute") == m * schedule.num_cells


def test_rows_without_names_are_devices_in_order():
    named = Schedule("device 1  F0 B0\n\n# then the other\ndevice 0  F0 B0")
    assert (
        named == Schedule("F0 B0 # first\nF0 B0\n") == SCHEDULES["gpipe"](2, 1)
    )


@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("F0+ F1+ B1 B0", "F0+ F1+ B1----- B0-----"),
        ("F0+ F1 B1 B0", "F0+ F1  R1  B1----- B0-----"),
        ("F0 F1+ R0 B1 B0", "F0  F1+ R0  B1----- B0-----"),
        ("F0 F1 R0 R1 B1 B0", "F0 F1 R0 R1 B1--- B0---"),
    ],
)
def test_what_a_text_says_is_what_runs(text, runs, remat):
    """A `+` was ignored, and an R beside "never" was kept, too."""
    schedule = Schedule(text)
    program = schedule.program(remat)
    assert str(program).splitlines()[0] == f"device 0  {runs}"
    assert Schedule(str(schedule)) == schedule
    again = Schedule(str(program)).program(remat)
    assert again.ops == program.ops


REFUSED = {
    "digit": ("F\u0663 B\u0663", r"Received: 'F\u0663' in 'F\u0663 B\u0663'"),
    "device_digit": ("device \u0660  F0 B0", "Received: 'device' in"),
    "keeps_and_recomputes": (
        "F0 F1+ R1 B1 B0",
        r"no recomputation.*one at forward\(cell=0, micro_batch=1\)",
    ),
    "backward_keeps": ("F0 B0+", r"must be at a forward.*one at backward"),
    "kind": ("F0 X0", "'X0' in 'F0 X0'"),
    "no_number": ("F0 B", "'B' in 'F0 B'"),
    "twice": ("F0 F0 B0", "every task once.*position 1 of device 0"),
    "device_twice": (
        "device 0  F0 B0\ndevice 0  F1 B1",
        r"one row of tasks for each device.*of the devices \[0, 0\]",
    ),
    "device_missing": ("device 1  F0 B0", r"of the devices \[1\]"),
    "nothing": ("", "none of them empty"),
    "empty_row": (
        "device 0\ndevice 1  F1.0 B1.0",
        "one row of tasks for each device",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_texts_are_refused(name):
    text, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        Schedule(text)
