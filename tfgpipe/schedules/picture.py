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

from tfgpipe.schedules.task import KINDS, Task

LETTERS = dict(zip(KINDS, "FRBIW", strict=True))
_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_LABEL = re.compile(r"\s*device\s+(\d+)(?!\S)")
_TASK = re.compile(r"([FRBIW])(\d+)(?:\.(\d+))?\+?-*")
_AT = re.compile(r"at position (\d+) of device (\d+)")


def drawn(program: Any, times: Sequence[tuple[float, float]]) -> str:
    """The rows of devices, and in comments what follows from them.

    Args:
        program: The `Program`.
        times: Start and end of each of its operations, in units.
    """
    kinds = {op.kind for op in program.ops}
    words = [
        f"{letter} {kind.replace('_', ' ')}"
        for kind, letter in LETTERS.items()
        if kind in kinds
    ]
    if any(op.keeps for op in program.ops):
        words.append("+ keeps what the backward pass needs")
    held = ", ".join(map(str, program.held()))
    lines = [
        *_rows(program.ops, times, program.num_devices),
        f"# {', '.join(words)}",
        f"# bubble {program.bubble():.0%} if cells take equal times; "
        f"micro-batches that devices hold: {held}",
    ]
    return "\n".join([*lines, f"# {program.note}"] if program.note else lines)


def _rows(
    ops: Sequence[Any], times: Sequence[tuple[float, float]], num_devices: int
) -> list[str]:
    """The rows of devices."""
    cells = {(op.device, op.cell) for op in ops}
    is_plain = all(device == cell for device, cell in cells)

    def word(op: Any) -> str:
        number = op.micro_batch if is_plain else f"{op.cell}.{op.micro_batch}"
        return f"{LETTERS[op.kind]}{number}{'+' * op.keeps}"

    width = 1 + max(len(word(op)) for op in ops)
    rows = [""] * num_devices
    for op, (start, end) in zip(ops, times):
        row = rows[op.device].ljust(int(start) * width)
        taken = word(op).ljust(int(end - start) * width - 1, "-") + " "
        if end - start == 1:
            taken = word(op).ljust(width)
        rows[op.device] = row + taken
    digits = len(str(num_devices - 1))
    return [
        f"device {d:{digits}}  {row}".rstrip() for d, row in enumerate(rows)
    ]


def read(text: str, make: Callable[[Any], Any]) -> Any:
    """What is made of the tasks that a text says.

    Args:
        text: As `drawn` writes it; what follows a `#` is left out. Without
            names of devices, rows are devices 0, 1 and so on. Where no cell is
            said, it is the device's index.
        make: Makes it of a list of tasks for each device. What it refuses at
            some position of a device is marked in the text.

    Raises:
        ValueError: If the text says something else, or `make` refuses it.
    """
    lines = text.splitlines()
    rows: dict[int, list[_Word]] = {}
    for number, line in enumerate(lines):
        written = line.partition("#")[0]
        label = _LABEL.match(written)
        start = label.end() if label else 0
        if not written[start:].strip() and label is None:
            continue
        device = int(label[1]) if label else len(rows)
        if device in rows:
            raise ValueError(
                "A schedule must have one row a device. Received: device "
                f"{device} again.\n{_marked(lines, number, len(written))}"
            )
        rows[device] = [*_words(lines, number, written, start, device)]
    if sorted(rows) != [*range(len(rows))]:
        raise ValueError(
            "A schedule must have a row for each device, from 0. Received: "
            f"rows of the devices {sorted(rows)}."
        )
    try:
        return make([[word.task for word in rows[d]] for d in sorted(rows)])
    except ValueError as error:
        found = _AT.search(str(error))
        if found is None:
            raise
        position, device = map(int, found.groups())
        word = rows[device][position]
        marked = _marked(lines, word.line, word.end)
        raise ValueError(f"{error}\n{marked}") from None


class _Word(NamedTuple):
    """A task, and where it is written."""

    task: Task
    line: int
    end: int


def _words(
    lines: list[str], number: int, written: str, start: int, device: int
) -> Iterator[_Word]:
    """The tasks of a row, which begin at `start`."""
    for found in re.finditer(r"\S+", written[start:]):
        end = start + found.end()
        word = _TASK.fullmatch(found[0])
        if word is None:
            raise ValueError(
                "A task must be one of the letters "
                f"{', '.join(LETTERS.values())}, and its micro-batch or its "
                "cell and micro-batch, as in F0 or F3.0. Received: "
                f"{found[0]!r}.\n{_marked(lines, number, end)}"
            )
        letter, one, other = word.groups()
        k, m = (device, one) if other is None else (one, other)
        yield _Word(Task(_KINDS[letter], int(k), int(m)), number, end)


def _marked(lines: list[str], number: int, end: int) -> str:
    """The rows, with a mark behind a place in one of them."""
    shown = [*lines]
    shown[number] = f"{lines[number][:end]} <-- here{lines[number][end:]}"
    return "\n".join(line for line in shown if line.strip())
