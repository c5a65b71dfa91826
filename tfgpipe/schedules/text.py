"""Programs as text, and schedules read from it.

    device 0  F0  F1+         B1----- R0  B0-----
    device 1      F0  F1+ B1----- R0  B0-----

A row is a device, a place in it a unit of time. An operation is a letter and
its micro-batch, or its cell and micro-batch where cells are not numbered as
their devices, as in `F3.0`; `+` says that it keeps what the backward pass
needs, and `-` that it takes longer than a unit.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tfgpipe.schedules.task import BESIDE, KINDS, Task, scheduled_kinds

_LABEL = re.compile(r"\s*device\s+([0-9]+)(?!\S)")

_AT = re.compile(r"at position (\d+) of device (\d+)")

_ON = re.compile(r"on device (\d+)")


def text_of(program: Any, times: Sequence[tuple[float, float]]) -> str:
    """Returns the rows of devices, and in comments what follows from them.

    `times` are start and end of each operation of a `Program`, in units.
    """
    kinds = {op.kind for op in program.ops}
    words = [
        f"{KINDS[kind].letter} {kind.replace('_', ' ')}"
        for kind in KINDS
        if kind in kinds
    ]
    if any(op.keeps for op in program.ops):
        words.append("+ keeps what the backward pass needs")
    held = ", ".join(map(str, program.held()))
    lines = [
        *_rows(program.ops, times, program.num_devices, program.lane),
        f"# {', '.join(words)}",
        f"# bubble {program.bubble():.0%} if cells take equal times; "
        f"micro-batches that devices hold: {held}",
    ]
    return "\n".join([*lines, f"# {program.note}"] if program.note else lines)


def _rows(
    ops: Sequence[Any],
    times: Sequence[tuple[float, float]],
    num_devices: int,
    lane_of: Callable[[Any], str],
) -> list[str]:
    """Returns the rows of devices."""
    cells = {(op.device, op.cell) for op in ops}
    is_plain = all(device == cell for device, cell in cells)

    def word(op: Any) -> str:
        number = op.micro_batch if is_plain else f"{op.cell}.{op.micro_batch}"
        return f"{KINDS[op.kind].letter}{number}{'+' * op.keeps}"

    width = 1 + max(len(word(op)) for op in ops)
    digits = len(str(num_devices - 1))
    rows = {
        (d, "compute"): f"device {d:{digits}}  " for d in range(num_devices)
    }
    begin = len(rows[0, "compute"])
    for op, (start, end) in zip(ops, times):
        lane = op.device, lane_of(op)
        row = rows.get(lane, f"  {lane[1]}".ljust(begin))
        taken = word(op).ljust(int(end - start) * width - 1, "-") + " "
        if end - start <= 1:
            taken = word(op).ljust(width)
        rows[lane] = row.ljust(begin + int(start * width)) + taken
    # What goes beside is below what is computed.
    lanes = ["compute", BESIDE, *(kind.lane for kind in KINDS.values())]
    order = sorted(rows, key=lambda lane: (lane[0], lanes.index(lane[1])))
    return [rows[lane].rstrip() for lane in order]


def tasks_of_text(text: str, make: Callable[[Any, Any], Any]) -> Any:
    """Makes something of the tasks that a text says.

    Args:
        text: As `text_of` writes it; what follows a `#` is left out. Without
            names of devices, rows are devices 0, 1 and so on. Where no cell is
            said, it is the device's index.
        make: Makes it of a list of tasks for each device, and the (cell,
            micro-batch) whose forward task keeps, or None where that is not
            said. What it refuses at some position of a device is marked in the
            text.

    Raises:
        ValueError: If the text says something else, or `make` refuses it.
    """
    lines = text.splitlines()
    rows: dict[int, _Row] = {}
    for number, line in enumerate(lines):
        written = line.partition("#")[0]
        label = _LABEL.match(written)
        start = label.end() if label else 0
        if not written[start:].strip() and label is None:
            continue
        device = int(label[1]) if label else len(rows)
        end = len(written.rstrip())
        words = [*_words(lines, number, written, start, device)]
        if device in rows or not words:
            received = (
                f"device {device} again" if words else "a row without tasks"
            )
            raise ValueError(
                "`tasks` must have one row of tasks a device. Received: "
                f"{received}.\n{_marked(lines, number, end)}"
            )
        rows[device] = _Row(words, number, end)
    missing = {*range(len(rows) or 1)} - {*rows}
    if missing:
        number = max(rows, default=0)
        raise ValueError(
            "`tasks` must have a row for each device, from 0. Received: "
            f"no row of device {min(missing)}."
            + (f"\n{_marked(lines, *rows[number][1:])}" if rows else "")
        )
    in_order = [rows[device] for device in range(len(rows))]
    kept = _kept(lines, [word for row in in_order for word in row.words])
    try:
        return make(
            [[word.task for word in row.words] for row in in_order], kept
        )
    except ValueError as error:
        marked = _marked(lines, *_place(str(error), in_order))
        raise ValueError(f"{error}\n{marked}") from None


class _Row(NamedTuple):
    """The tasks of a device, and where they end."""

    words: list[_Word]
    line: int
    end: int


def _place(error: str, rows: list[_Row]) -> tuple[int, int]:
    """Returns the line of which an error speaks, and how far."""
    if match := _AT.search(error):
        position, device = map(int, match.groups())
        word = rows[device].words[position]
        return word.line, word.end
    match = _ON.search(error)
    row = rows[int(match[1]) if match else -1]
    return row.line, row.end


class _Word(NamedTuple):
    """A task, whether it keeps, and where it is written."""

    task: Task
    keeps: bool
    line: int
    end: int


def _words(
    lines: list[str], number: int, written: str, start: int, device: int
) -> Iterator[_Word]:
    """Reads the tasks of a row, which begin at `start`."""
    kinds = {KINDS[kind].letter: kind for kind in scheduled_kinds()}
    task_word = rf"([{''.join(kinds)}])([0-9]+)(?:\.([0-9]+))?(\+?)-*"
    for match in re.finditer(r"\S+", written[start:]):
        end = start + match.end()
        word = re.fullmatch(task_word, match[0])
        if word is None:
            raise ValueError(
                f"`tasks` must be one of the letters {', '.join(kinds)} each, "
                "and its micro-batch or its cell and micro-batch, as in F0 or "
                "F3.0. Received: "
                f"{match[0]!r}.\n{_marked(lines, number, end)}"
            )
        letter, first, second, plus = word.groups()
        k, m = (device, first) if second is None else (first, second)
        task = Task(kinds[letter], int(k), int(m))
        yield _Word(task, bool(plus), number, end)


def _kept(
    lines: list[str], words: list[_Word]
) -> frozenset[tuple[int, int]] | None:
    """Reads which forward tasks keep: cells and micro-batches, or None."""
    kept = {word.task: word for word in words if word.keeps}
    again = {word.task[1:] for word in words if word.task.kind == "recompute"}
    for task, word in kept.items():
        if task.kind != "forward" or task[1:] in again:
            raise ValueError(
                "A + must be at a forward task, which keeps what the backward "
                "pass needs, and of which there is no recomputation. Received: "
                f"one at {task}. Take it, or the R, out.\n"
                f"{_marked(lines, word.line, word.end)}"
            )
    return frozenset(task[1:] for task in kept) if kept else None


def _marked(lines: list[str], number: int, end: int) -> str:
    """Returns the rows, with a mark behind a place in one of them."""
    shown = [*lines]
    shown[number] = f"{lines[number][:end]} <-- here{lines[number][end:]}"
    return "\n".join(line for line in shown if line.strip())
