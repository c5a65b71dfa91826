"""Time and memory of consecutive layers, for a micro-batch; machines.

`Workload` adds up what the layers of a cell take. Where nobody has measured
that, by `tfgpipe.profile`, it follows from FLOPs and bytes, and the figures of
an accelerator, a `Machine`: makers' peaks, and `efficiency`, the share of the
peak rate that layers are taken to reach.

Pure Python: nothing here knows TensorFlow.

References, for the figures of `MACHINES`:
    * [P100](https://images.nvidia.com/content/tesla/pdf/nvidia-tesla-p100-PCIe-datasheet.pdf)
    * [V100](https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf)
    * [T4](https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf)
    * [A100](https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf)
    * [H100](https://www.nvidia.com/en-us/data-center/h100/), SXM
    * [H200](https://www.nvidia.com/en-us/data-center/h200/), SXM
    * [B200](https://resources.nvidia.com/en-us-blackwell-architecture), HGX
    * [L4](https://www.nvidia.com/en-us/data-center/l4/)
    * [L40S](https://www.nvidia.com/en-us/data-center/l40s/)
    * [RTX 4090](https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf)
    * [TPU v2 and v3](https://doi.org/10.1145/3360307), Jouppi et al., 2020,
      table 3; a chip has two cores
    * [TPU v4 to v6e](https://docs.cloud.google.com/tpu/docs/v6e), and the pages
      of the others beside it
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfgpipe.checks import is_amount
from tfgpipe.costs import LayerSize
from tfgpipe.partition import partition, steps_of_head
from tfgpipe.profiles import CellSeconds
from tfgpipe.schedules import CellFacts


@dataclasses.dataclass(frozen=True)
class Machine:
    """One kind of accelerator, and what joins it to others.

    Attributes:
        flops: Peak floating-point operations a second, of float32 as TensorFlow
            multiplies it by default, and of what is not in `flops_by_dtype`.
        memory: Bytes.
        memory_bandwidth: Bytes a second to and from its memory.
        bandwidth: Bytes a second to another accelerator, one way.
        latency: Seconds that a transfer takes besides.
        host_bandwidth: Bytes a second to and from its host, one way.
        task_seconds: Seconds that a task takes besides its operations.
        efficiency: Share of `flops` that layers reach.
        name: Of the kind.
        flops_by_dtype: Other peaks, by the dtype in which a layer computes:
            "bfloat16" and "float16".

    Raises:
        ValueError: If a figure is no positive number.

    Example:

    >>> import dataclasses
    >>> machine = Machine(
    ...     flops=20e12,
    ...     memory=24e9,
    ...     memory_bandwidth=600e9,
    ...     bandwidth=12e9,
    ...     name="mine",
    ... )
    >>> dataclasses.replace(MACHINES["a100"], memory=40 * 2**30).name
    'a100'
    """

    flops: float
    memory: float
    memory_bandwidth: float
    bandwidth: float
    latency: float = 10e-6
    host_bandwidth: float = 12e9
    task_seconds: float = 100e-6
    efficiency: float = 0.5
    name: str = "machine"
    flops_by_dtype: Mapping[str, float] = dataclasses.field(
        default_factory=dict, hash=False
    )

    def __post_init__(self) -> None:
        figures = {**vars(self), **self.flops_by_dtype}
        for name in figures.keys() - {"name", "flops_by_dtype"}:
            is_time = name in ("latency", "task_seconds")
            value = figures[name]
            if not is_amount(value) or not (value or is_time):
                raise ValueError(
                    f"`{name}` of a machine must be a positive number, in "
                    "bytes, seconds, or operations or bytes a second. "
                    f"Received: {name}={value!r}."
                )

    @property
    def device_type(self) -> str:
        """TensorFlow's type of such devices."""
        return "TPU" if self.name.startswith("tpu") else "GPU"

    def seconds(self, flops: float, dtype: str) -> float:
        """Returns how long so many operations take that layers have."""
        peak = self.flops_by_dtype.get(dtype, self.flops)
        return flops / (peak * self.efficiency)


def _both(peak: float) -> dict[str, float]:
    return {"bfloat16": peak, "float16": peak}


MACHINES = {
    name: Machine(
        flops=flops * 1e12,
        memory=gib * 2**30,
        memory_bandwidth=memory * 1e9,
        bandwidth=link * 1e9,
        host_bandwidth=host * 1e9,
        name=name,
        flops_by_dtype={dtype: other * 1e12 for dtype, other in others.items()},
    )
    for name, flops, gib, memory, link, host, others in (
        # TFLOP/s, GiB; GB/s of the memory, to another one, and to the host;
        # then TFLOP/s of other dtypes, dense. NVIDIA prints sparse ones, twice
        # as many, for most kinds since the H100.
        ("p100", 9.3, 16.0, 732, 16.0, 12, {"float16": 18.7}),
        ("v100", 15.7, 32.0, 900, 150.0, 12, {"float16": 125.0}),
        ("t4", 8.1, 16.0, 320, 16.0, 12, {"float16": 65.0}),
        ("l4", 60.0, 24.0, 300, 32.0, 24, _both(121)),
        ("l40s", 183.0, 48.0, 864, 32.0, 24, _both(362)),
        ("rtx_4090", 82.6, 24.0, 1008, 32.0, 24, _both(165)),
        ("a100", 156.0, 80.0, 2039, 300.0, 24, _both(312)),
        ("h100", 494.0, 80.0, 3350, 450.0, 48, _both(989)),
        ("h200", 494.0, 141.0, 4800, 450.0, 48, _both(989)),
        ("b200", 1100.0, 180.0, 7700, 900.0, 48, _both(2250)),
        ("tpu_v2_core", 23.0, 8.0, 350, 62.0, 12, {}),
        ("tpu_v3_core", 61.5, 16.0, 450, 82.0, 12, {}),
        ("tpu_v4", 275.0, 32.0, 1200, 50.0, 12, {}),
        ("tpu_v5e", 197.0, 16.0, 819, 50.0, 12, {}),
        ("tpu_v5p", 459.0, 95.0, 2765, 100.0, 12, {}),
        ("tpu_v6e", 918.0, 32.0, 1638, 100.0, 48, {}),
    )
}
"""Kinds of accelerators that `plan` knows, by their names.

`flops` are for float32 as TensorFlow multiplies it: TF32 on GPUs since the
A100, bfloat16 on TPUs. `bandwidth` is NVLink's where the kind has it, a link
between neighbours of a TPU, else PCI express. `host_bandwidth` is three
quarters of PCI express's, of the third generation where the maker does not say.

Example:

>>> tfgpipe.MACHINES["t4"].memory / 2**30
16.0
"""


# One that sends and updates at once.
IN_NO_TIME = Machine(1.0, 1.0, 1e300, 1e300, 0.0, 1e300)


def machine_of(machine: str | Machine) -> Machine:
    """Returns a machine, or the one of this name.

    Raises:
        ValueError: If there is none.
    """
    if isinstance(machine, Machine):
        return machine
    if isinstance(machine, str) and machine in MACHINES:
        return MACHINES[machine]
    raise ValueError(
        f"`machine` must be one of {sorted(MACHINES)}, or a "
        f"`tfgpipe.Machine`. Received: machine={machine!r}."
    )


def machine_named(name: str) -> Machine | None:
    """Returns the machine that a maker's name of a device means, or None.

    The figures are the kind's; the memory is the name's, if it says.

    Example:

    >>> machine_named("NVIDIA A100-SXM4-40GB").memory / 2**30
    40.0
    >>> machine_named("Radeon VII")
    """
    words = re.split(r"[^a-z0-9]+", name.lower())
    pairs = map("_".join, itertools.pairwise(words))
    kinds = [word for word in (*words, *pairs) if word in MACHINES]
    # A part of one, and slower ones of the same name.
    if not kinds or {"mig", "laptop", "d"} & {*words}:
        return None
    known = MACHINES[kinds[0]]
    size = re.search(r"\b(\d+) ?gb\b", name.lower())
    if size is None:
        return known
    return dataclasses.replace(known, memory=int(size[1]) * 2.0**30)


# -------------------------------------------------------------------- workloads
def seconds_by_flops(
    size: LayerSize, rows: float, machine: Machine
) -> dict[str, float]:
    """Estimates a layer's seconds, by its FLOPs, or by its bytes if more.

    A backward pass has twice the operations of a forward pass: a matrix product
    has two gradients, of its input and of its weights. A layer whose weights
    are frozen computes one of them. The last layer of a cell is not computed
    again if it keeps nothing but its inputs. A micro-batch has so many `rows`.
    """
    read, results = (
        sum(tensor.size.at(rows) for tensor in activations if tensor.by == 0)
        for activations in (size.memory.inputs, size.memory.made)
    )
    moved = size.weight_bytes + read + results
    forward = max(
        machine.seconds(rows * size.flops, size.dtype),
        moved / machine.memory_bandwidth,
    )
    of_weights = forward if size.num_params else 0.0
    of_inputs = forward if size.num_values else 2 * forward
    backward = of_weights + of_inputs
    return {
        "forward": forward,
        "recompute": forward,
        "recompute_last": forward if results else 0.0,
        "backward": backward,
        "input_gradient": of_inputs,
        "weight_gradient": of_weights,
        "backward_first": backward,
    }


# Tasks that take what is kept.
_BACKWARD = {"backward", "backward_first", "input_gradient", "weight_gradient"}


class CellNeeds(NamedTuple):
    """The needs of consecutive layers for a micro-batch, most in bytes.

    Attributes:
        seconds: By the kind of the task.
        facts: What a program has to know of them.
        parts: In how many parts rows go through a head; 1 for other layers.
        inputs: What comes in.
        outputs: What goes out.
        gradient_bytes: Gradients of what comes in.
        kept: What the backward pass needs, inputs among it.
        kept_inputs: The inputs among that.
        crossing: What gradients of inputs keep for gradients of weights.
        sparse: Slices of gradients, which are not added up.
        forward: What a forward task needs besides, while it runs.
        backward: What a backward task needs besides.
        gradients: One gradient of each weight.
    """

    seconds: dict[str, float]
    facts: CellFacts
    inputs: float
    outputs: float
    gradient_bytes: float
    kept: float
    kept_inputs: float
    crossing: float
    sparse: float
    forward: float
    backward: float
    weights: int
    slots: int
    gradients: int
    parts: int = 1

    def as_head(self, parts: int) -> CellNeeds:
        """Returns the needs of a head, which goes forward and back at once.

        While it runs, it has the activations of a part.
        """
        seconds = self.seconds
        both = seconds["forward"] + seconds["backward"]
        return self._replace(
            seconds={**seconds, "head": both},
            facts=self.facts._replace(
                has_halves=False, recomputes=False, is_head=True
            ),
            parts=parts,
        )

    def at_share(self, share: float) -> CellNeeds:
        """Returns the needs where a share is kept, besides the inputs.

        What is dropped is there again while the backward task runs. What is
        cheapest is dropped first, and a few operations take most of the
        seconds: so the seconds are taken to be a recomputation's,
        times the third power of the share that is dropped.
        """
        dropped = (1 - share) * (self.kept - self.kept_inputs)
        again = (1 - share) ** 3 * self.seconds["recompute"]
        return self._replace(
            kept=self.kept - dropped,
            backward=self.backward + dropped,
            seconds={
                kind: seconds + again * (kind in _BACKWARD)
                for kind, seconds in self.seconds.items()
            },
        )


class Workload:
    """The layers of a model, for micro-batches of some size.

    A row of the last outputs has `output_bytes`; each layer's tasks take
    `seconds`, to which a task adds `task_seconds`. If XLA compiles,
    recomputations are part of the backward tasks, and `regions_of` tells where
    regions begin or end, by the number of micro-batches and by whether any are
    computed again.
    """

    def __init__(
        self,
        sizes: Sequence[LayerSize],
        output_bytes: float,
        seconds: Sequence[Mapping[str, float]],
        task_seconds: float,
        rows: float,
        regions_of: Callable[[int, bool], Sequence[int]] | None = None,
    ):
        self.regions_of = regions_of
        self.sizes = sizes
        self.rows = rows
        self.seconds = CellSeconds(
            seconds, (size.num_params > 0 for size in sizes), task_seconds
        )
        live = [rows * size.live_bytes for size in sizes]
        self._live = [*live, rows * output_bytes]
        # Of each tensor that is kept: its maker, its first taker, its bytes.
        self._made = np.array(
            [
                (i, i + tensor.by, tensor.size.at(rows))
                for i, size in enumerate(sizes)
                for tensor in size.memory.made
            ]
        ).reshape(-1, 3)
        self._table = np.array(
            [
                (
                    size.memory.crossing.at(rows),
                    size.memory.sparse.at(rows),
                    size.weight_bytes,
                    size.slot_bytes,
                    size.gradient_bytes,
                    # Its inputs are there, too.
                    before + size.memory.forward.at(rows),
                    size.memory.backward.at(rows),
                )
                for before, size in zip(live, sizes)
            ]
        )
        # How far back the gradients of each go.
        reaches = [size.memory.reaches for size in sizes]
        self._sources = np.arange(len(sizes)) - reaches
        # The loss turns the outputs into their gradient in place.
        last = self._table[-1]
        last[-1] = max(0.0, last[-1] - self._live[-1])
        self.cells = functools.cache(self._cells)

    @property
    def is_compiled(self) -> bool:
        """Returns whether XLA compiles the tasks."""
        return self.regions_of is not None

    @functools.cached_property
    def costs(self) -> list[float]:
        """Seconds of each layer's tasks, for the cut."""
        return self.seconds.costs()

    @functools.cached_property
    def shares_of_bytes(self) -> np.ndarray:
        """Each layer's share of all weights, slots and gradients."""
        held = self._table[:, 2:5].sum(axis=1)
        return held / (held.sum() or 1.0)

    def _cells(
        self,
        layers_per_cell: tuple[int, ...],
        num_groups: int | None = 1,
        head_parts: int = 1,
        regions: tuple[int, ...] = (),
    ) -> list[list[CellNeeds]]:
        """Returns the needs of the groups of each cell, as `GPipe` cuts them.

        `regions` are where those begin or end that XLA compiles. They are the
        groups, or if `num_groups` are asked for, these begin there.
        """
        cells, start = [], 0
        for count in layers_per_cell:
            groups = self._groups(start, start + count, num_groups, regions)
            start += count
            if head_parts > 1 and start == len(self.sizes):
                *others, last = groups
                live = self._live[start - last : start]
                of_head = steps_of_head(live, self._live[start])
                groups = [*others, last - of_head, of_head]
            stops = [*itertools.accumulate(groups, initial=start - count)]
            bounds = itertools.pairwise(dict.fromkeys(stops))
            cells.append([self.cell(*pair) for pair in bounds])
        if head_parts > 1:
            cells[-1][-1] = cells[-1][-1].as_head(head_parts)
        return cells

    def _groups(
        self,
        start: int,
        stop: int,
        num_groups: int | None,
        regions: tuple[int, ...],
    ) -> list[int]:
        """Returns how many layers each group of a cell has."""
        if num_groups is None:
            inner = [i for i in regions if start < i < stop]
            return [b - a for a, b in itertools.pairwise([start, *inner, stop])]
        return partition(self.costs[start:stop], num_groups)

    def cell(self, start: int, stop: int) -> CellNeeds:
        """Returns the needs of the layers from `start` to before `stop`."""
        first, memory = self.seconds.first, self.sizes[start].memory
        # The loss, behind the last layer, is taken to keep the outputs.
        end = stop + (stop == len(self.sizes))
        before = self._live[start]
        taken_inputs = sum(
            tensor.size.at(self.rows)
            for tensor in memory.inputs
            if start + tensor.by < end
        )
        made, taken, sizes = self._made.T  # in the order of their makers
        here = slice(*np.searchsorted(made, (start, stop)))
        kept = sizes[here][taken[here] < end]
        layers = self._table[start:stop]
        *summed, _, _ = layers.sum(axis=0).tolist()
        crossing, sparse, weights, slots, gradients = summed
        *_, forward, backward = layers.max(axis=0).tolist()
        seconds = self.seconds.of_cell(start, stop)
        seconds["recompute"] *= bool(kept.size)
        has_dx = bool((self._sources[start:stop] < start).any())
        can_be_split = self.seconds.has_halves(start, stop)
        return CellNeeds(
            seconds,
            CellFacts(
                has_backward=stop > first,
                needs_dx=start > first,
                has_halves=start > first and has_dx and can_be_split,
                recomputes=stop > first
                and bool(kept.size)
                and not self.is_compiled,
            ),
            inputs=before,
            outputs=self._live[stop],
            gradient_bytes=before if start > first else 0.0,
            kept=taken_inputs + float(kept.sum()),
            kept_inputs=taken_inputs,
            crossing=crossing,
            sparse=sparse,
            forward=forward,
            backward=backward,
            weights=int(weights),
            slots=int(slots),
            gradients=int(gradients),
        )
