"""A step as letters, and as a Chrome trace."""

import json

import pytest
from simulated import events

from tfgpipe.monitor import timeline_text
from tfgpipe.timeline import Event


def test_text_of_a_small_schedule_has_a_letter_a_task_time():
    assert timeline_text.text(events()) == "\n".join(
        [
            "device 0  FFF...BBRBBRBB",
            "device 1  .FFFBBRBBRBB..",
            "          0       14.0 s",
            "",
            "F forward   R recompute   B backward   . idle   "
            "one letter: 1,000 ms",
        ]
    )


def test_text_shows_chunks_and_gradients_and_updates():
    rows = timeline_text.text(events("interleaved", 2, 2, 2)).splitlines()
    assert rows[0] == "device 0  FFff..bbr.bbBBRBB"
    assert rows[-1].endswith("small letters: every second cell of a device")
    rows = timeline_text.text(events("zero_bubble", updates=True, remat=False))
    letters = set("".join(row[10:] for row in rows.splitlines()[:2]))
    assert letters == set("FIWU.")


@pytest.mark.parametrize(
    ("k", "m", "chunks"), [(8, 32, 1), (16, 64, 1), (8, 32, 2), (1, 1, 1)]
)
def test_text_fits_100_columns_and_shows_each_kind_by_its_share(k, m, chunks):
    made = events("interleaved", k, m, chunks, updates=True)
    lines = timeline_text.text(made).splitlines()
    assert max(map(len, lines)) <= 100
    total = max(event.end for event in made)
    for device in range(k):
        row = lines[device].split()[-1].upper()
        for kind, letter in timeline_text.LETTERS.items():
            time = sum(
                event.end - event.start
                for event in made
                if event.device == device and event.task.kind == kind
            )
            assert abs(row.count(letter) - time / total * len(row)) <= 2


def test_text_of_uneven_times_uses_the_whole_width():
    made = [
        Event(task, device, start * 1.07, end * 1.07 - start % 0.13)
        for task, device, start, end in events()
    ]
    lines = timeline_text.text(made, width=60).splitlines()
    assert len(lines[0]) == 60
    assert max(map(len, lines)) <= 60


def test_chrome_trace_has_an_event_a_task_on_the_devices_thread():
    made = events(updates=True)
    trace = timeline_text.chrome_trace(made, {"title": "a step"})
    trace = json.loads(json.dumps(trace))
    assert trace["otherData"] == {"title": "a step"}
    boxes = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(boxes) == len(made)
    assert all(box["cname"] for box in boxes)
    (box,) = (b for b in boxes if b["name"] == "backward 2" and b["tid"] == 1)
    assert (box["ts"], box["dur"]) == (4e6, 2e6)
    assert box["args"] == {"cell": 1, "micro_batch": 2}
    names = {
        e["tid"]: e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert names == {0: "device 0", 1: "device 1"}
