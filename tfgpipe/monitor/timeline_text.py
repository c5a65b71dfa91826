"""A timeline as text: for a terminal, and for the viewers of Chrome traces."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from tfgpipe import timeline
from tfgpipe.timeline import Event

LETTERS = {
    "forward": "F",
    "recompute": "R",
    "backward": "B",
    "input_gradient": "I",
    "weight_gradient": "W",
    "head": "H",
    "update": "U",
}
_IDLE = "."
# The nearest to the picture's of the colours that chrome://tracing knows.
# Perfetto chooses its own, by the names of the tasks.
_CHROME_COLORS = {
    "forward": "rail_response",
    "recompute": "thread_state_runnable",
    "backward": "thread_state_iowait",
    "input_gradient": "terrible",
    "weight_gradient": "yellow",
    "head": "good",
    "update": "grey",
}


def text(events: Sequence[Event], width: int = 100) -> str:
    """Draws the events with letters: a row a device, a letter a time slot.

    In every row, each letter has the share of the slots that its tasks have of
    the time. Where a device has several cells, every second one of them has
    small letters.

    Args:
        events: What ran. At least one.
        width: The most characters in a line.
    """
    num_devices = 1 + max(event.device for event in events)
    heads = [f"device {device}" for device in range(num_devices)]
    indent = max(map(len, heads)) + 2
    total = max(event.end for event in events)
    num_slots = _num_slots(events, width - indent)
    small = {k: place % 2 for k, place in timeline.places(events).items()}
    lines = []
    for device, head in enumerate(heads):
        own = [event for event in events if event.device == device]
        row = _row(own, total / num_slots, num_slots, small)
        lines.append(f"{head:{indent}}{row}")
    end = timeline.seconds(total)
    axis = f"{' ' * indent}0{end:>{max(num_slots - 1, len(end) + 1)}}"
    slot = f"one letter: {timeline.seconds(total / num_slots)}"
    return "\n".join([*lines, axis, "", *_legend(events, small, slot, width)])


def _num_slots(events: Sequence[Event], most: int) -> int:
    """One slot a forward task if all tasks are multiples of one, or `most`."""
    unit = timeline.forward_time(events)
    total = max(event.end for event in events)
    if not unit or round(total / unit) > most:
        return most
    times = [time / unit for event in events for time in event[2:]]
    is_even = all(abs(time - round(time)) < 0.01 for time in times)
    return round(total / unit) if is_even else most


def _row(
    events: Iterable[Event], slot: float, num_slots: int, small: dict[int, int]
) -> str:
    """The letters of one device."""
    # How much of each slot is taken, by letter.
    shares: list[dict[str, float]] = [{} for _ in range(num_slots)]
    updates = []
    for task, _, start, end in events:
        letter = LETTERS[task.kind]
        if task.kind == "update":
            updates.append(min(round(start / slot), num_slots - 1))
        elif small[task.cell]:
            letter = letter.lower()
        for index in range(int(start / slot), num_slots):
            share = min(end / slot, index + 1) - max(start / slot, index)
            if share <= 0:
                break
            taken = shares[index]
            taken[letter] = taken.get(letter, 0) + share
    letters = []
    # What a letter got too little so far, it gets where it comes next: or
    # short tasks between long ones would not be seen.
    due: collections.Counter[str] = collections.Counter()
    for taken in shares:
        taken[_IDLE] = 1 - sum(taken.values())
        due.update(taken)
        there = [letter for letter in taken if taken[letter] > 1e-6]
        letters.append(max(there, key=due.__getitem__))
        due[letters[-1]] -= 1
    for index in updates:  # mostly too short to be seen otherwise
        letters[index] = LETTERS["update"]
    return "".join(letters)


def _legend(
    events: Sequence[Event], small: dict[int, int], slot: str, width: int
) -> list[str]:
    kinds = {event.task.kind for event in events}
    parts = [f"{LETTERS[k]} {timeline.name(k)}" for k in LETTERS if k in kinds]
    parts += [f"{_IDLE} idle", slot]
    if any(small.values()):
        parts.append("small letters: every second cell of a device")
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f"   {part}"
        else:
            lines.append(part)
    return lines


def chrome_trace(events: Sequence[Event], about: dict[str, Any]) -> dict:
    """The events in the format of chrome://tracing and Perfetto.

    Args:
        events: What ran. At least one.
        about: What to say about the whole.

    Returns:
        What is to be written as JSON.

    Reference: [Trace Event Format](https://docs.google.com/document/d/\
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU)
    """
    num_devices = 1 + max(event.device for event in events)
    made: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "step"}}
    ]
    for device in range(num_devices):
        for key, args in (
            ("thread_name", {"name": f"device {device}"}),
            ("thread_sort_index", {"sort_index": device}),
        ):
            made.append(
                {"ph": "M", "pid": 0, "tid": device, "name": key, "args": args}
            )
    made += [_chrome_event(event) for event in events]
    return {"traceEvents": made, "displayTimeUnit": "ms", "otherData": about}


def _chrome_event(event: Event) -> dict[str, Any]:
    kind, cell, micro_batch = event.task
    name, is_update = timeline.name(kind), kind == "update"
    return {
        "ph": "X",
        "name": name if is_update else f"{name} {micro_batch}",
        "cat": kind,
        "pid": 0,
        "tid": event.device,
        "ts": round(1e6 * event.start, 3),  # microseconds
        "dur": round(1e6 * (event.end - event.start), 3),
        "cname": _CHROME_COLORS[kind],
        "args": {} if is_update else {"cell": cell, "micro_batch": micro_batch},
    }
