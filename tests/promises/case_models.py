"""The models of a case: plain Keras, and pipelines.

Plain Keras is `keras.Sequential`, which hands `training` to every layer that
takes it. A model whose `call` only runs the layers does not: there `training`
is what the layer before has left in Keras's context. It runs eagerly, which is
faster for a few steps.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import keras
import layer_kinds
import mid_run
import objectives
from case import Case, Options
from data_sources import SHAPES
from device_names import names
from kinds import Plain
from with_columns import shards_of

import tfgpipe
from tfgpipe.schedules import CHUNKS

NUM_DEVICES = 8
RULES = ("never", "always", "except_last")


def layers(case: Case, explicit_input: bool, is_plain: bool = False) -> Any:
    """New layers, the same ones every time; or a functional model."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(case.seed)
    if case.outputs:
        # Steps and losses are a pipeline's own.
        has_own = is_plain or case.override in mid_run.IN_MODEL
        override = case.override if has_own else None
        cls = mid_run.overridden(override, keras.Model)
        return graph(case, cls)
    found = layer_kinds.make(case.layers, case.frozen)
    if explicit_input:
        dtype = "int32" if case.inputs == "tokens" else case.dtype
        found.insert(0, keras.Input(SHAPES[case.inputs], dtype=dtype))
    return found


def graph(case: Case, cls: type[keras.Model]) -> Any:
    """A functional model of a class: each layer called on what it takes."""
    shape = SHAPES.get(case.inputs, (4,))
    if case.length is not None:
        shape = (None, *shape[1:])
    shapes = [shape] * (1 + (case.inputs in ("pair", "names")))
    inputs = [
        keras.Input(shape, dtype=case.dtype, name=f"x{i}")
        for i, shape in enumerate(shapes)
    ]
    tensors: dict[str, Any] = {f"x{i}": x for i, x in enumerate(inputs)}
    made: dict[str, Any] = {}
    for spec in case.layers:
        taken = [tensors[name] for name in spec.takes]
        if spec.kind == "model":
            ends = (tensors[spec.options[end]] for end in ("first", "last"))
            made[spec.name] = keras.Model(*ends, name=spec.name)
            layer = made[spec.name]
        else:
            layer = layer_kinds.make_one(spec, made)
        tensors[spec.name] = layer(taken if len(taken) > 1 else taken[0])
    for name in case.frozen:
        made[name].trainable = False
    outputs = [tensors[name] for name in case.outputs or ()]
    return cls(
        inputs if len(inputs) > 1 else inputs[0],
        outputs if len(outputs) > 1 else outputs[0],
        name="graph",
    )


def plain(
    case: Case, eagerly: bool | None = None, jit_compile: bool = False
) -> Any:
    """What a pipeline has to be equal to; compiled.

    Of several outputs, Keras weighs the losses in its logs by rows only if it
    runs eagerly, where it knows the rows of a batch.
    """
    found = layers(case, case.explicit_input, is_plain=True)
    cls = mid_run.overridden(case.override, _reference(case))
    model = found if case.outputs else cls(found)
    _change(case, model, found)
    if eagerly is None:
        # What is trained is what it was when the step was traced. Float8 does
        # not run eagerly.
        in_graph = case.toggle == "trainable" or "float8" in str(case)
        # Rows are known where Keras runs eagerly.
        in_graph |= any(spec.options.get("axis") == 0 for spec in case.layers)
        eagerly = isinstance(case.losses, str) and not in_graph
    model.compile(
        **objectives.arguments(case),
        run_eagerly=eagerly,
        jit_compile=jit_compile,
    )
    return model


def _change(case: Case, model: Any, found: Any) -> None:
    """Builds a model, and then changes its layers, where a case has that."""
    if not mid_run.is_changed(case):
        return
    if not model.built:
        model.build((None, *SHAPES[case.inputs]))
    own = found.layers if case.outputs else found
    mid_run.change(case, [x for x in own if isinstance(x, keras.Layer)])


def _reference(case: Case) -> Any:
    """`keras.Sequential`, but where it lets `training` leak.

    Of one tensor it is a functional model, which tells each layer; of a nest a
    loop, which tells those that take `training`. Another one gets what a layer
    before it told its own layers.
    """
    leaks = case.inputs == "dict" and '"fixed"' in str(case)
    return Plain if leaks else keras.Sequential


def scope(case: Case, num_partitions: int, schedule: str) -> Any:
    """Where pipelines of several replicas are made."""
    if case.num_replicas == 1:
        return contextlib.nullcontext()
    width = num_devices(num_partitions, schedule)
    return tfgpipe.PipelineStrategy(case.num_replicas, width).scope()


def num_devices(num_partitions: int, schedule: str) -> int:
    """Those of a replica."""
    if CHUNKS[schedule] == 1:
        return num_partitions
    return 1 if num_partitions % 2 else num_partitions // 2


def cut(case: Case, num_partitions: int, count: int) -> list[int] | None:
    """`layers_per_cell` for a number of layers, or None."""
    if case.cells and len(case.cells) == num_partitions:
        rest = count - sum(case.cells)
        if rest >= 0:
            return [*case.cells[:-1], case.cells[-1] + rest]
    if not case.cut_seed:
        return None
    spare = count - num_partitions * case.remat_groups
    if spare < 0:
        return None
    rng = random.Random(case.cut_seed + num_partitions)
    sizes = [case.remat_groups] * num_partitions
    for _ in range(spare):
        sizes[rng.randrange(num_partitions)] += 1
    return sizes


def partitions(case: Case, wanted: int) -> int:
    """K: no more than there are layers and devices."""
    most = min(
        len(case.layers) // case.remat_groups,
        NUM_DEVICES // case.num_replicas,
    )
    return max(1, min(wanted, most))


def pipeline(
    case: Case,
    num_partitions: int,
    schedule: str,
    remat: str,
    explicit_input: bool | None = None,
    **compile_arguments: Any,
) -> Any:
    """A `GPipe` of the case; compiled."""
    if num_partitions % (CHUNKS[schedule] or 1):
        schedule = "zero_bubble_2p"  # it needs two cells for each device
    explicit = case.explicit_input if explicit_input is None else explicit_input
    arguments: Options = {
        "num_micro_batches": case.num_micro_batches,
        "num_partitions": num_partitions,
        "schedule": schedule,
        "remat": remat,
        "remat_groups": case.remat_groups,
        "weights_on": case.weights_on,
        "head_parts": case.head_parts,
        "skip_nonfinite": case.bad_row is not None,
    }
    if remat == "mixed":
        arguments["remat"] = {
            k: RULES[k % len(RULES)] for k in range(num_partitions)
        }
    if CHUNKS[schedule] is None and case.num_replicas == 1:
        count = num_devices(num_partitions, schedule)
        arguments["devices"] = names(count)
    found = layers(case, explicit)
    if case.shards > 1:
        own = found.layers if case.outputs else found
        devices = names(8)[-case.num_replicas * case.shards :]
        arguments["shards"] = shards_of(own, devices, case.shards)
    count = len(tfgpipe.layers_of(found) if case.outputs else case.layers)
    arguments["layers_per_cell"] = cut(case, num_partitions, count)
    in_model = case.outputs and case.override in mid_run.IN_MODEL
    override = None if in_model else case.override
    with scope(case, num_partitions, schedule):
        cls = mid_run.overridden(override, tfgpipe.GPipe)
        model = cls(found, **arguments)
    _change(case, model, found)
    model.compile(
        **objectives.arguments(case),
        jit_compile=case.jit_compile,
        **compile_arguments,
    )
    return model
