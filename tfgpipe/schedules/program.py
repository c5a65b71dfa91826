"""The operations of one step, in an order in which they can run.

`lowering.py` makes a program of a schedule; the engine runs it, the planner
simulates it, and pictures are drawn of it.

    a schedule says   forward(0, 0)  forward(0, 1)  backward(0, 1)  ...
    a program says    F 0.0, keeps nothing, on device 0
                      F 0.1, keeps what the backward pass needs
                      B 0.1
                      R 0.0, recomputes it
                      B 0.0

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfgpipe.schedules.task import BESIDE, KINDS, Shard, Task


class Op(NamedTuple):
    """One computation of one micro-batch in one cell, on its device.

    Attributes:
        kind: One of `KINDS`.
        cell: Index of the cell; each group of layers that is computed again
            at once is a cell.
        micro_batch: Index of the micro-batch in the mini-batch.
        device: Index of the device; replica r of D devices has those from
            r D.
        keeps: Of a "forward", whether it keeps what the backward pass needs.
    """

    kind: str
    cell: int
    micro_batch: int
    device: int
    keeps: bool = False

    @property
    def task(self) -> Task:
        """The task, without the device."""
        return Task(self.kind, self.cell, self.micro_batch)

    @property
    def at(self) -> tuple[int, int]:
        """The cell and the micro-batch."""
        return self.cell, self.micro_batch

    @property
    def takes_gradient(self) -> bool:
        """Returns whether it takes one of what its cell gives."""
        return KINDS[self.kind].sends == "gradients"

    @property
    def is_backward(self) -> bool:
        """Returns whether it is of the backward pass."""
        return self.takes_gradient or KINDS[self.kind].ends


def units(op: Op) -> float:
    """Returns how long an operation takes among equal cells."""
    return KINDS[op.kind].units


class Program:
    """The operations of one step.

    Args:
        ops: All operations, none before one that it needs.
        num_devices: How many devices there are, in all replicas.
        shards: The cells that are shards of a layer.

    Attributes:
        ops: The same.
        num_devices: How many devices there are.
        note: What is to be printed besides, in one line.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        num_devices: int,
        shards: Mapping[int, Shard] | None = None,
    ):
        self._shards = shards or {}
        self.ops = ops
        self.num_devices = num_devices
        self.note = ""
        self._awaited = [*self._awaits()]

    def __str__(self) -> str:
        """Returns a row a device, and in comments what follows from them.

            device 0  F0  F1+         B1----- R0  B0-----
            device 1      F0  F1+ B1----- R0  B0-----

        A place in a row is a unit of time. An operation is a letter and its
        micro-batch, or its cell and micro-batch where cells are not numbered as
        their devices, as in `F3.0`; `+` says that it keeps what the backward
        pass needs, and `-` that it takes longer than a unit.
        """
        is_plain = all(op.device == op.cell for op in self.ops)

        def word(op: Op) -> str:
            m = op.micro_batch if is_plain else f"{op.cell}.{op.micro_batch}"
            return f"{KINDS[op.kind].letter}{m}{'+' * op.keeps}"

        width = 1 + max(len(word(op)) for op in self.ops)
        digits = len(str(self.num_devices - 1))
        # What goes beside is below what is computed.
        lanes = ["compute", BESIDE, *(kind.lane for kind in KINDS.values())]
        rows = {
            (d, 0): f"device {d:{digits}}  " for d in range(self.num_devices)
        }
        begin = len(rows[0, 0])
        for op, (start, end) in zip(self.ops, self.simulate(units)):
            lane = self.lane(op)
            key = op.device, lanes.index(lane)
            row = rows.get(key, f"  {lane}").ljust(begin + int(start * width))
            taken = word(op).ljust(width)
            if end - start > 1:
                taken = word(op).ljust(int(end - start) * width - 1, "-") + " "
            rows[key] = row + taken
        kinds = {op.kind for op in self.ops}
        words = [
            f"{kind.letter} {name.replace('_', ' ')}"
            for name, kind in KINDS.items()
            if name in kinds
        ]
        if any(op.keeps for op in self.ops):
            words.append("+ keeps what the backward pass needs")
        lines = [
            *(rows[key].rstrip() for key in sorted(rows)),
            f"# {', '.join(words)}",
            f"# bubble {self.bubble():.0%} if cells take equal times; "
            "micro-batches that devices hold: "
            f"{', '.join(map(str, self.held()))}",
        ]
        return "\n".join(lines + [f"# {self.note}"] * bool(self.note))

    def lane(self, op: Op) -> str:
        """Returns the lane of a device that an operation takes: see `Kind`."""
        shard, lane = self._shards.get(op.cell), KINDS[op.kind].lane
        is_beside = shard is not None and shard.is_beside
        return BESIDE if is_beside and lane == "compute" else lane

    def _near(self, k: int, offset: int) -> range:
        """Returns the cells that give a cell what it takes; shards do together.

        With an offset of 1 those that take what it gives; with 0 it itself.
        """
        shard = self._shards.get(k)
        if offset and shard is not None:
            k = shard.cells.start if offset < 0 else shard.cells.stop - 1
        near = self._shards.get(k + offset) if offset else None
        return range(k + offset, k + offset + 1) if near is None else near.cells

    @functools.cached_property
    def by_device(self) -> list[list[Op]]:
        """The operations of each device, in its order."""
        by_device: list[list[Op]] = [[] for _ in range(self.num_devices)]
        for op in self.ops:
            by_device[op.device].append(op)
        return by_device

    @property
    def is_forward_first(self) -> bool:
        """Returns whether the loss is known before a gradient is taken."""
        last = max(op.cell for op in self.ops)
        ways = [
            op.is_backward
            for op in self.ops
            if op.cell == last and (op.is_backward or op.kind == "forward")
        ]
        return ways == sorted(ways)

    def simulate(
        self,
        duration: Callable[[Op], float],
        link: Callable[[Op], float] = lambda op: 0,
    ) -> list[tuple[float, float]]:
        """Simulates when operations run, if only they and transfers take time.

        Args:
            duration: How long an operation takes, in any unit.
            link: How long what an operation hands on is under way to another
                device, in this unit; no device is busy meanwhile.

        Returns:
            Start and end of each of `ops`: as early as its device and the
            operations it needs allow.
        """
        free: dict[tuple[int, str], float] = {}
        times: list[tuple[float, float]] = []
        for op, awaited in zip(self.ops, self._awaited):
            start = free.get((op.device, self.lane(op)), 0)
            for i in awaited:
                there = times[i][1]
                if self.ops[i].device != op.device:
                    there += link(self.ops[i])
                start = max(start, there)
            end = start + duration(op)
            free[op.device, self.lane(op)] = end
            times.append((start, end))
        return times

    def _awaits(self) -> Iterator[list[int]]:
        """For each operation, the places of those that it waits for.

        What its own lane has run before it is not among them. What is beside
        what is computed waits for what was computed last.
        """
        computed: dict[int, int] = {}  # by device
        places = {op[:3]: i for i, op in enumerate(self.ops)}
        for i, op in enumerate(self.ops):
            awaited = []
            for kind, offset in KINDS[op.kind].needs:
                for near in self._near(op.cell, offset):
                    place = places.get((kind, near, op.micro_batch))
                    if place is not None:
                        before = self.ops[place]
                        is_beside = self.lane(before) != self.lane(op)
                        if is_beside or before.device != op.device:
                            awaited.append(place)
            device = op.device
            if (shard := self._shards.get(op.cell)) is not None:
                device += shard.caller - shard.device
            if self.lane(op) == "compute":
                computed[device] = i
            elif device in computed:
                awaited.append(computed[device])
            yield awaited

    def length(
        self,
        duration: Callable[[Op], float] = units,
        link: Callable[[Op], float] = lambda op: 0,
    ) -> float:
        """Returns when the last operation ends; see `simulate`."""
        return max(end for _, end in self.simulate(duration, link))

    def bubble(
        self,
        duration: Callable[[Op], float] = units,
        link: Callable[[Op], float] = lambda op: 0,
    ) -> float:
        """Returns the share of time in which devices idle; see `simulate`."""
        times = self.simulate(duration, link)
        work = 0.0
        until = [0.0] * self.num_devices  # what is beside counts once
        for op, (start, end) in sorted(
            zip(self.ops, times), key=lambda pair: pair[1]
        ):
            if KINDS[op.kind].lane == "compute" and end > until[op.device]:
                work += end - max(start, until[op.device])
                until[op.device] = end
        length = max(end for _, end in times)
        return 1 - work / (self.num_devices * length) if length else 0.0

    def held(self) -> list[int]:
        """Returns how many micro-batches every device holds at most.

        One counts, once a cell, from its forward pass to the end of its last
        backward operation. What has no backward pass is not held.
        """
        return [*map(most_held, self.by_device)]


def most_held(ops: Sequence[Op]) -> int:
    """Returns what a device holds at most that runs these, see `held`."""
    trained = {op.cell for op in ops if KINDS[op.kind].ends}
    changes = [KINDS[op.kind].holds for op in ops if op.cell in trained]
    return max(itertools.accumulate(changes), default=0)
