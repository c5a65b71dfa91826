"""A setting of a `GPipe`: its seconds, and its bytes at the peak.

A step is the operations of its program, each as long as its layers take,
between transfers; then the update.

Memory is followed through the operations of a device:

    forward     keeps what the backward pass needs, or only the cell's inputs
    recompute   adds what the backward pass needs
    backward    frees all; if it is split, its weight gradient does

beside weights, slots, one sum of gradients, and what the running operation
needs: a backward pass that adds to a sum makes a new one beside it.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfgpipe.plans.workload import IN_NO_TIME, CellNeeds, Machine, Workload
from tfgpipe.schedules import (
    KINDS,
    SCHEDULES,
    Op,
    Program,
    Remat,
    Rule,
    Schedule,
    devices_of_cells,
    lower,
)

# While so many operations of a device run, it has what it sends to the host.
_ON_THE_WAY = 2


class Prediction(NamedTuple):
    """The time and memory of a setting.

    Attributes:
        bubble: Share of the pipeline's time in which devices wait.
        memory: Of each device of a replica.
    """

    setting: Setting
    step_seconds: float
    bubble: float
    memory: list[DeviceMemory]

    @property
    def device_bytes(self) -> list[int]:
        """The bytes of each device of a replica, in all."""
        return [device.total for device in self.memory]


def predict(
    workload: Workload, setting: Setting, machine: Machine | None
) -> Prediction:
    """Predicts a setting, for layers sized for its micro-batches.

    Without a machine, sending and updating take no time.
    """
    machine = machine or IN_NO_TIME
    cells = setting.cells(workload)
    groups = [*itertools.chain(*cells)]
    program = setting.program(workload)
    # There are no sums yet to which these add gradients.
    first: dict[int, int] = {}
    there = set()  # what a backward task needs not compute by itself
    for op in program.ops:
        if KINDS[op.kind].ends:
            first.setdefault(op.cell, op.micro_batch)
        elif op.keeps or op.kind == "recompute":
            there.add((op.cell, op.micro_batch))

    def duration(op: Op) -> float:
        group, kind = groups[op.cell], KINDS[op.kind]
        if kind.lane != "compute":
            sent = group.kept - group.kept_inputs
            return sent / machine.host_bandwidth
        seconds = group.seconds[op.kind]
        # It computes first what the forward pass has dropped.
        is_missing = (op.cell, op.micro_batch) not in there
        if kind.sends == "gradients" and is_missing and op.kind != "head":
            seconds += group.seconds["recompute"]
        if kind.ends and first[op.cell] == op.micro_batch:
            seconds -= group.seconds["backward"]
            seconds += group.seconds["backward_first"]
        return max(0.0, seconds)

    def link(op: Op) -> float:
        """For which what an operation hands on is under way."""
        group = groups[op.cell]
        sends_outputs = KINDS[op.kind].sends == "outputs"
        count = group.outputs if sends_outputs else group.gradient_bytes
        return machine.latency + count / machine.bandwidth

    #     device 0   F0 F1 . . . B1 B0 u       free: when the last B ends
    #     device 1      F0 F1 B1 B0 u          u: the update, each by itself
    times = program.simulate(duration, link)
    # Seconds by device: in tasks, and until the last end.
    busy, free = np.zeros((2, program.num_devices))
    for op, (start, end) in zip(program.ops, times):
        busy[op.device] += (end - start) * (KINDS[op.kind].lane == "compute")
        free[op.device] = end
    held = memory(workload, setting)
    replicas = setting.num_replicas
    updates = [_update_seconds(own, replicas, machine) for own in held]
    if setting.weights_on != "devices":
        # The host gets all gradients; its memory is as fast as its links. Of
        # more than two cells a device gets weights for each of their passes.
        moved = sum(2 * (g.gradients + g.weights + g.slots) for g in groups)
        updates = [moved / machine.host_bandwidth] * len(held)
        passes = 1 if setting.chunks <= 2 else 2
        weights = [passes * sum(g.weights for g in cell) for cell in cells]
        sent = np.bincount(setting.devices, weights)
        free = np.maximum(free, sent / machine.host_bandwidth)
    length = free.max()
    return Prediction(
        setting,
        float((free + updates).max()),
        float(1 - busy.mean() / length) if length else 0.0,
        held,
    )


def _update_seconds(
    held: DeviceMemory, num_replicas: int, machine: Machine
) -> float:
    """Reads gradients, reads and writes weights and slots; replicas share it.

    Each replica sends what others have of the gradients, and gets their
    weights.
    """
    moved = (held.gradients + 2 * held.weights) / num_replicas + 2 * held.slots
    sent = 2 * held.gradients * (num_replicas - 1) / num_replicas
    latency = machine.latency if num_replicas > 1 else 0.0
    return moved / machine.memory_bandwidth + sent / machine.bandwidth + latency


class DeviceMemory(NamedTuple):
    """The bytes of a device at the peak of a step.

    Attributes:
        gradients: One sum of gradients.
        activations: What it keeps of the micro-batches.
        working: What the task needs that runs then.
    """

    weights: int
    slots: int
    gradients: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        """All that the device holds then."""
        return sum(self)


def memory(workload: Workload, setting: Setting) -> list[DeviceMemory]:
    """Predicts what each device holds at its peak."""
    cells = setting.cells(workload)
    groups = [*itertools.chain(*cells)]
    memory_of_devices = []
    for device, ops in enumerate(setting.program(workload).by_device):
        here = [
            group
            for place, of_cell in zip(setting.devices, cells)
            for group in of_cell
            if place == device
        ]
        slots = sum(group.slots for group in here)
        weights = [group.weights for group in here]
        gradients = [group.gradients for group in here]
        if setting.weights_on != "devices":
            # Of two cells, and the sums of their gradients.
            slots = 0
            weights = sorted(weights)[-2:]
            gradients = sorted(gradients)[-2:]
        memory_of_devices.append(
            DeviceMemory(
                sum(weights),
                -(-slots // setting.num_replicas),  # shared out
                sum(gradients),
                *map(round, _peak(ops, groups)),
            )
        )
    return memory_of_devices


def _peak(
    ops: Sequence[Op], groups: Sequence[CellNeeds]
) -> tuple[float, float]:
    """Returns the bytes kept and needed by the operation at the peak."""
    now = 0.0
    most = (0.0, 0.0)
    held: dict[tuple[int, int], float] = {}  # of a group and micro-batch
    there: set[tuple[int, int]] = set()  # whose activations are
    has_sum: set[int] = set()
    # What goes to the host: operations until it is there.
    leaving: dict[tuple[int, int], int] = {}

    def hold(at: tuple[int, int], more: float) -> None:
        nonlocal now
        now += more
        held[at] = held.get(at, 0.0) + more

    # What a micro-batch holds, after each of its operations:
    #
    #     forward          inputs, or all that is kept
    #     offload          inputs, when it is there
    #     recompute, fetch all that is kept
    #     input_gradient   that, and what the other half takes of it
    #     the last one     slices of sparse gradients
    for kind, k, m, _, keeps in ops:
        group, at = groups[k], (k, m)
        working = group.backward
        if kind == "offload":
            leaving[at] = _ON_THE_WAY
            continue
        if kind == "fetch":
            hold(at, group.kept - group.kept_inputs)
            continue
        if kind == "head":
            # What comes in is there until it ends, and a part's activations.
            kept = group.kept - group.kept_inputs
            working = group.inputs + group.gradient_bytes
            working += (kept + group.backward) / group.parts
        elif kind == "forward":
            working = group.outputs if keeps else group.forward
            if group.facts.has_backward:
                hold(at, group.kept if keeps else group.inputs)
        elif at not in there and group.kept > group.kept_inputs:
            # Recomputed now, by itself or within.
            hold(at, group.kept - group.kept_inputs)
            is_alone = kind == "recompute"
            working = group.forward if is_alone else max(working, group.forward)
        if keeps or kind != "forward":
            there.add(at)
        # The parts of a head add to sums, each to that before it.
        if KINDS[kind].ends and (k in has_sum or group.parts > 1):
            working += group.gradients
        most = max(most, (now, working), key=sum)
        for key in leaving:
            leaving[key] -= 1
            if not leaving[key]:
                hold(key, groups[key[0]].kept_inputs - groups[key[0]].kept)
        if kind == "input_gradient":
            hold(at, group.crossing)
        elif KINDS[kind].ends:
            now += group.sparse - held.pop(at, 0.0)
            has_sum.add(k)
    return most


class Setting(NamedTuple):
    """Arguments of a `GPipe` that a plan chooses.

    Attributes:
        num_devices: Of a replica.
        num_micro_batches: M, of a replica.
        schedule: Its name.
        remat: The rule of each cell.
        remat_groups: Groups of layers of a cell; None for the regions that XLA
            compiles.
        head_parts: Parts of the rows that go through the head.
        weights_on: Where weights are.
    """

    num_replicas: int
    num_devices: int
    layers_per_cell: tuple[int, ...]
    num_micro_batches: int
    schedule: str
    remat: tuple[Rule, ...]
    remat_groups: int | None = 1
    head_parts: int = 1
    weights_on: str = "devices"

    def cells(self, workload: Workload) -> list[list[CellNeeds]]:
        """Returns the needs of the groups of each cell, at their shares."""
        regions: Sequence[int] = ()
        if workload.regions_of is not None and self.weights_on == "devices":
            m = self.num_micro_batches
            regions = workload.regions_of(m, self.recomputes)
        cells = workload.cells(
            self.layers_per_cell,
            self.remat_groups,
            self.head_parts,
            tuple(regions),
        )
        return [
            groups
            if isinstance(rule, str)
            else [g if g.facts.is_head else g.at_share(rule) for g in groups]
            for rule, groups in zip(self.remat, cells, strict=True)
        ]

    @property
    def recomputes(self) -> bool:
        """Returns whether a cell computes whole micro-batches again."""
        return any(rule in ("except_last", "always") for rule in self.remat)

    @property
    def num_partitions(self) -> int:
        """K, the number of cells."""
        return len(self.layers_per_cell)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `GPipe`, except the layers and the devices."""
        is_one_rule = len({*self.remat}) == 1
        return {
            "num_partitions": self.num_partitions,
            "num_micro_batches": self.num_micro_batches,
            "layers_per_cell": list(self.layers_per_cell),
            "schedule": self.schedule,
            "remat": self.remat[0]
            if is_one_rule
            else dict(enumerate(self.remat)),
            "remat_groups": self.remat_groups,
            "head_parts": self.head_parts,
            "weights_on": self.weights_on,
        }

    @property
    def chunks(self) -> int:
        """How many cells each device has."""
        return self.num_partitions // self.num_devices

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each cell."""
        return devices_of_cells(self.schedule, self.num_devices, self.chunks)

    def program(self, workload: Workload) -> Program:
        """Returns what runs in a replica."""
        return _program(self, workload)


# A search asks for the same again and again, before it goes to the next: the
# memory of a program, then its seconds; and other rules of the same schedule.
@functools.lru_cache(maxsize=2)
def _program(setting: Setting, workload: Workload) -> Program:
    cells = setting.cells(workload)
    facts = [group.facts for group in itertools.chain(*cells)]
    rules, m = dict(enumerate(setting.remat)), setting.num_micro_batches
    remat = Remat.by_group(rules, [*map(len, cells)], (), facts[-1].is_head)
    if workload.is_compiled:
        remat = remat.compiled(m)
    shape = setting.num_devices, m, setting.chunks
    schedule = _schedule(setting.schedule, *shape)
    return lower(lambda _: schedule, facts, remat, [m])


@functools.lru_cache(maxsize=2)
def _schedule(name: str, *shape: int) -> Schedule:
    return SCHEDULES[name](*shape)
