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
    def is_backward(self) -> bool:
        """Returns whether it is of the backward pass."""
        return KINDS[self.kind].is_backward


def units(op: Op) -> float:
    """Returns how long an operation takes among equal cells."""
    return KINDS[op.kind].units


class Program:
    """The operations of one step.

    Args:
        ops: All operations, none before one that it needs, or it is an error.
        num_devices: How many devices there are, in all replicas.
        sizes: How many operations run together, turn by turn: the same of
            replicas that normalise together. None: each runs alone.
        shards: The cells that are shards of a layer.

    Attributes:
        ops: All operations.
        num_devices: How many devices there are.
        note: What is to be printed besides, in one line.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        num_devices: int,
        sizes: Sequence[int] | None = None,
        shards: Mapping[int, Shard] | None = None,
    ):
        self._shards = shards or {}
        self.ops = ops
        self.num_devices = num_devices
        self.note = ""
        self._sizes = sizes
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
        rows = {
            (d, "compute"): f"device {d:{digits}}  "
            for d in range(self.num_devices)
        }
        begin = len(rows[0, "compute"])
        for op, (start, end) in zip(self.ops, self.simulate(units)):
            lane = op.device, self.lane(op)
            row = rows.get(lane, f"  {lane[1]}".ljust(begin))
            taken = word(op).ljust(width)
            if end - start > 1:
                taken = word(op).ljust(int(end - start) * width - 1, "-") + " "
            rows[lane] = row.ljust(begin + int(start * width)) + taken
        # What goes beside is below what is computed.
        lanes = ["compute", BESIDE, *(kind.lane for kind in KINDS.values())]
        order = sorted(rows, key=lambda lane: (lane[0], lanes.index(lane[1])))
        kinds = {op.kind for op in self.ops}
        words = [
            f"{kind.letter} {name.replace('_', ' ')}"
            for name, kind in KINDS.items()
            if name in kinds
        ]
        if any(op.keeps for op in self.ops):
            words.append("+ keeps what the backward pass needs")
        held = ", ".join(map(str, self.held()))
        lines = [
            *(rows[lane].rstrip() for lane in order),
            f"# {', '.join(words)}",
            f"# bubble {self.bubble():.0%} if cells take equal times; "
            f"micro-batches that devices hold: {held}",
        ]
        return "\n".join(lines + [f"# {self.note}"] * bool(self.note))

    @property
    def turns(self) -> list[list[Op]]:
        """The operations, those that run together in a list."""
        return [[self.ops[i] for i in turn] for turn in self._places_of_turns()]

    def lane(self, op: Op) -> str:
        """Returns the lane of a device that an operation takes: see `Kind`."""
        shard, lane = self._shards.get(op.cell), KINDS[op.kind].lane
        is_beside = shard is not None and shard.is_beside
        return BESIDE if is_beside and lane == "compute" else lane

    def _near(self, k: int, offset: int) -> range:
        """Returns the cells that give a cell what it takes; shards do together.

        With an offset of 1 those that take what it gives; with 0 it itself.
        """
        if not offset:
            return range(k, k + 1)
        shard = self._shards.get(k)
        if shard is not None:
            k = shard.cells.start if offset < 0 else shard.cells.stop - 1
        near = self._shards.get(k + offset)
        return range(k + offset, k + offset + 1) if near is None else near.cells

    def _places_of_turns(self) -> Iterator[Sequence[int]]:
        """Yields the places in `ops` of operations that run together."""
        first = 0
        for size in self._sizes or itertools.repeat(1, len(self.ops)):
            yield range(first, first + size)
            first += size

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
        of_last = [op for op in self.ops if op.cell == last]
        begin = [*itertools.takewhile(lambda op: not op.is_backward, of_last)]
        counts = [
            [op.kind for op in o].count("forward") for o in (begin, of_last)
        ]
        return counts[0] == counts[1]

    def simulate(
        self,
        duration: Callable[[Op], float],
        link: Callable[[Op], float] | None = None,
    ) -> list[tuple[float, float]]:
        """Simulates when operations run, if only they and transfers take time.

        Args:
            duration: How long an operation takes, in any unit.
            link: How long what an operation hands on is under way to another
                device, in this unit; no device is busy meanwhile. None: no
                time.

        Returns:
            Start and end of each of `ops`: as early as its device, the
            operations it needs and its partners' allow.
        """
        free: dict[tuple[int, str], float] = {}
        times: list[tuple[float, float]] = []

        def ready(i: int) -> float:
            op = self.ops[i]
            start = free.get((op.device, self.lane(op)), 0)
            for awaited in self._awaited[i]:
                there = times[awaited][1]
                if link is not None and self.ops[awaited].device != op.device:
                    there += link(self.ops[awaited])
                start = max(start, there)
            return start

        for turn in self._places_of_turns():
            start = max(map(ready, turn))  # partners wait for each other
            for op in (self.ops[i] for i in turn):
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
        needs = {
            name: [(n.offset, other) for n in kind.needs for other in n.kinds]
            for name, kind in KINDS.items()
        }
        for i, op in enumerate(self.ops):
            name, k, m, device, _ = op
            awaited = []
            for near, other in (
                (near, other)
                for offset, other in needs[name]
                for near in self._near(k, offset)
            ):
                place = places.get((other, near, m))
                if place is None:
                    continue
                before = self.ops[place]
                if place > i:
                    raise ValueError(
                        "`ops` must have every operation after those that it "
                        f"needs. Received: {op.task}, number {i}, before "
                        f"{before.task}, number {place}, which it needs. Move "
                        "the one behind the other."
                    )
                is_beside = self.lane(before) != self.lane(op)
                if is_beside or before.device != device:
                    awaited.append(place)
            if (shard := self._shards.get(k)) is not None:
                device += shard.caller - shard.device
            if self.lane(op) == "compute":
                computed[device] = i
            elif device in computed:
                awaited.append(computed[device])
            yield awaited

    def length(
        self,
        duration: Callable[[Op], float] = units,
        link: Callable[[Op], float] | None = None,
    ) -> float:
        """Returns when the last operation ends; see `simulate`."""
        return max(end for _, end in self.simulate(duration, link))

    def bubble(
        self,
        duration: Callable[[Op], float] = units,
        link: Callable[[Op], float] | None = None,
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

    def held(self, sizes: Sequence[float] | None = None) -> list[float]:
        """Returns what every device holds at most, of micro-batches.

        One counts, once a cell, from its forward pass to the end of its last
        backward operation. What has no backward pass is not held.

        Args:
            sizes: What it takes to hold one in each cell. Defaults to 1.
        """
        return [most_held(ops, sizes) for ops in self.by_device]


def most_held(ops: Sequence[Op], sizes: Sequence[float] | None = None) -> float:
    """Returns what a device holds at most that runs these, see `held`."""
    trained = {op.cell for op in ops if KINDS[op.kind].ends}
    now = most = 0.0 if sizes else 0
    for op in ops:
        if op.cell in trained:
            kind = KINDS[op.kind]
            size = sizes[op.cell] if sizes else 1
            now += size * (kind.begins - kind.ends - kind.leaves)
            most = max(most, now)
    return most
