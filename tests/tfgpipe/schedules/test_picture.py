"""Programs as text, and back."""

import pytest

from tfgpipe.schedules.lowering import Facts
from tfgpipe.schedules.named import CHUNKS, SCHEDULES
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


def test_many_devices_are_aligned():
    rows = str(SCHEDULES["gpipe"](11, 1).program()).splitlines()
    assert rows[0].startswith("device  0  F0+")
    assert rows[10].startswith("device 10  ")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("devices", "m"), [(1, 1), (2, 3), (3, 12)])
def test_text_can_be_read_back(name, devices, m):
    schedule = SCHEDULES[name](devices, m, CHUNKS[name] or 2)
    facts = [Facts()] * schedule.num_cells
    program = schedule.program(facts=facts)
    assert Schedule(str(program)) == schedule
    always = Schedule(str(schedule.program("always", facts)))
    assert Schedule(str(Program(always.ops, devices))) == always
    kinds = [task.kind for task in always.order()]
    assert kinds.count("recompute") == m * schedule.num_cells


def test_rows_without_names_are_devices_in_order():
    named = Schedule("device 1  F0 B0\n\n# then the other\ndevice 0  F0 B0")
    assert (
        named == Schedule("F0 B0 # first\nF0 B0\n") == SCHEDULES["gpipe"](2, 1)
    )


REFUSED = {
    "kind": ("F0 X0", r"'X0'\.\nF0 X0 <-- here$"),
    "no_number": ("F0 B", r"'B'\.\nF0 B <-- here$"),
    "words": ("gpipe", r"Received: 'gpipe'\.\ngpipe <-- here$"),
    "twice": ("F0 F0 B0", r"every task once.*\nF0 <-- here F0 B0$"),
    "second_row": (
        "device 0  F0 B0\ndevice 1  F0 F1 B0",
        r"no forward\(cell=0, micro_batch=1\)",
    ),
    "too_early": (
        "F0 B1 F1 B0",
        r"after the tasks it needs.*\nF0 B1 <-- here F1 B0$",
    ),
    "device_twice": (
        "device 0  F0 B0\ndevice 0  F0 B0",
        r"device 0 again\.\ndevice 0  F0 B0\ndevice 0  F0 B0 <-- here$",
    ),
    "device_missing": ("device 1  F0 B0", r"rows of the devices \[1\]"),
    "nothing": ("", "must be one list of tasks a device"),
    "empty_row": ("device 0\ndevice 1  F1.0 B1.0", "none of them empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_texts_are_marked(name):
    text, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        Schedule(text)
