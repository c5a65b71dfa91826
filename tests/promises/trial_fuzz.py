"""Random layers are tried: those that mix rows are named, and no others.

make fuzz FUZZ_FLAGS="--trial --count=500 --seed=0"

A layer runs drawn operations one after the other, in branches and loops, behind
layers of Keras; it returns what they make, adds it to the loss, keeps it as
state or gives it a metric. Whether it treats rows apart is found by running it
on many rows and on parts of them, with numbers that the trial does not draw.
What shows for some numbers only may be named or not.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl
from keras import tree
from row_operations import APART, AT_TIMES, MIXING, PLACES

from tfgpipe.cells import Cell, ModelCall, trace_model
from tfgpipe.graphs import TraceOptions
from tfgpipe.trial import Trial

SHAPES = ((4,), (3, 4), (None, 4))
USES = ("outputs", "outputs", "outputs", "loss", "state", "metric")
BEFORE: dict[str, Callable[[], Any]] = {
    "dense": lambda: kl.Dense(4, "tanh"),
    "layer_norm": kl.LayerNormalization,
    "batch_norm": kl.BatchNormalization,
    "dropout": lambda: kl.Dropout(0.3),
}
PARTS = ((4, 5), (1, 8), (7, 2))
# Relative ones: what is more is a difference, what is less is rounding.
SURE, ROUNDING = 1e-2, 1e-4


@dataclasses.dataclass(frozen=True)
class Composition:
    """A layer that is tried, as plain data.

    Attributes:
        shape: Of a row.
        before: Layers of Keras before it.
        operations: For each where it is, whether it mixes rows, and its name.
        use: What becomes of what they make.
        seed: Of numbers.
    """

    shape: tuple[int | None, ...]
    before: tuple[str, ...]
    operations: tuple[tuple[str, bool, str], ...]
    use: str = "outputs"
    seed: int = 0

    def __str__(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> Composition:
        """The inverse of `str(composition)`."""
        found = json.loads(text)
        found["operations"] = tuple(map(tuple, found["operations"]))
        for name in ("shape", "before"):
            found[name] = tuple(found[name])
        return cls(**found)

    def tags(self) -> list[str]:
        """The categories that it is in, for the table."""
        found = {f"use {self.use}", f"axes {len(self.shape) + 1}"}
        for place, mixes, name in self.operations:
            kind = "mixes" if mixes else "apart"
            found |= {f"{kind} {name}", f"in {place}"}
        return sorted(found)


def generate(seed: int, index: int) -> Composition:
    """The composition of a seed and an index; half of them mix rows."""
    rng = random.Random(f"{seed}:{index}:trial")
    operations = [
        (rng.choice(sorted(PLACES)), False, rng.choice(sorted(APART)))
        for _ in range(rng.choice((0, 1, 1, 2, 3)))
    ]
    if rng.random() < 0.5:
        one = rng.choice(sorted(PLACES)), True, rng.choice(sorted(MIXING))
        operations.insert(rng.randrange(len(operations) + 1), one)
    return Composition(
        rng.choice(SHAPES),
        tuple(rng.choices(sorted(BEFORE), k=rng.choice((0, 1, 2)))),
        tuple(operations),
        rng.choice(USES),
        rng.randrange(1000),
    )


# --------------------------------------------------------------------- a layer
class Composed(kl.Layer):
    """Runs the operations of a composition."""

    def __init__(self, composition: Composition, **kwargs: Any):
        super().__init__(**kwargs)
        self.composition = composition
        if composition.use == "metric":
            self.metric = keras.metrics.Mean(name="own_metric")

    def build(self, shape: Any) -> None:
        if self.composition.use == "state":
            self.kept = self.add_weight(
                shape=shape[-1:], initializer="zeros", trainable=False
            )

    def call(self, x: Any) -> Any:
        made, use = self.made(x), self.composition.use
        if use == "outputs":
            return made
        axes = tuple(range(len(made.shape) - 1))
        if use == "loss":
            self.add_loss(tf.reduce_mean(made**2))
        elif use == "state":
            self.kept.assign(tf.reduce_mean(made, axis=axes))
        else:
            self.metric.update_state(tf.reduce_mean(made, axis=-1))
        return x

    def made(self, x: Any) -> Any:
        """What the operations make."""
        for place, mixes, name in self.composition.operations:
            operation = (MIXING if mixes else APART)[name]
            x = tf.ensure_shape(PLACES[place](operation, x), x.shape)
        return x


def layers_of(composition: Composition) -> list[Any]:
    """New layers, with weights, the last of which is the composed one."""
    keras.utils.set_random_seed(composition.seed)
    found = [BEFORE[name]() for name in composition.before]
    layers = [*found, Composed(composition, name="composed")]
    for layer in layers:
        layer.build((None, *composition.shape))
    return layers


# ------------------------------------------------------------------- the trial
def said_of(layers: list[Any], shape: tuple[int | None, ...]) -> list[str]:
    """What a trial says of built layers; the shape is that of inputs."""
    spec = tf.TensorSpec(shape, "float32")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tried(layers, spec).tell()
    return [str(one.message) for one in found]


def tried(
    layers: list[Any],
    spec: Any,
    training: bool = True,
    data: Any = None,
    cast: Any = None,
    call: Any = None,
) -> Trial:
    """A trial of built layers, one after the other, on rows of data if any.

    Or as `call` calls them.
    """

    def in_turn(x: Any, training: bool) -> Any:
        for layer in layers:
            x = layer(x, training=training)
        return x

    own = ModelCall(call or in_turn, layers, training, is_split=True)
    trial = Trial("warn")
    if data is not None:
        trial.note_data(data, cast)
    cell = Cell(0, [], ["/device:CPU:0"])
    specs = tree.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), spec)
    traced = trace_model(own, specs, None, TraceOptions())
    trial.run(own, traced, [cell], spec, 2)
    return trial


def said(composition: Composition) -> list[str]:
    """What a trial says of the layers."""
    return said_of(layers_of(composition), (None, *composition.shape))


def differences(composition: Composition) -> list[float]:
    """How much parts of drawn rows differ from the whole, relatively."""
    layers = layers_of(composition)
    rng = np.random.default_rng(composition.seed)
    found = []
    for parts in PARTS:
        shape = [8 if size is None else size for size in composition.shape]
        x = tf.constant(rng.standard_normal((sum(parts), *shape)), "float32")
        for layer in layers[:-1]:
            x = layer(x, training=False)
        whole = _used(layers[-1], x)
        pieces = [_used(layers[-1], part) for part in tf.split(x, parts)]
        if composition.use == "outputs":
            joined = np.concatenate(pieces)
        else:
            shares = np.array(parts) / sum(parts)
            joined = sum(s * p for s, p in zip(shares, pieces))
        largest = np.abs(whole).max()
        found.append(float(np.abs(joined - whole).max() / max(largest, 1e-6)))
    return found


def _used(layer: Composed, x: Any) -> Any:
    """What the use of a layer makes, of some rows."""
    made, use = layer.made(x).numpy(), layer.composition.use
    if use == "outputs":
        return made
    if use == "loss":
        return (made**2).mean()
    return made.reshape(-1, 4).mean(0) if use == "state" else made.mean()


def run(composition: Composition) -> tuple[str, str]:
    """What becomes of a composition: "passed", "unclear" or "failed"; why."""
    try:
        found = differences(composition)
    except Exception as error:
        return "skipped", f"{type(error).__name__}: {error}"
    texts = said(composition)
    others = [text for text in texts if "'composed'" not in text]
    if others:
        return "failed", f"another layer is named: {others[0]}"
    differs, is_equal = min(found) > SURE, max(found) < ROUNDING
    if (differs and texts) or (is_equal and not texts):
        return "passed", f"{found}"
    names = {name for _, mixes, name in composition.operations if mixes}
    if names & AT_TIMES or not (differs or is_equal):
        return "unclear", f"{found}"
    what = f"it is named: {texts[0]}" if texts else "it is not named"
    return "failed", f"it differs by {found}; {what}"


def main(flags: argparse.Namespace) -> int:
    """Runs those that flags of `fuzz.py` ask for."""
    rows: Any = collections.defaultdict(collections.Counter)
    start = time.process_time()
    for name, composition in _asked(flags):
        kind, reason = run(composition)
        for tag in ("all", *composition.tags()):
            rows[tag][kind] += 1
        if kind == "failed" or flags.case:
            print(f"{name} {kind}: {reason}\n  --case='{composition}'")
    seconds = (time.process_time() - start) / max(1, rows["all"].total())
    kinds = ("passed", "unclear", "skipped", "failed")
    print("\n" + " " * 24, *(f"{kind:>9}" for kind in kinds))
    for tag in sorted(rows, key=lambda tag: (tag != "all", tag)):
        print(f"{tag:24}", *(f"{rows[tag][kind] or '':>9}" for kind in kinds))
    print(f"\n{seconds:.2f} CPU seconds a composition")
    return int(rows["all"]["failed"] > 0)


def _asked(flags: argparse.Namespace) -> Iterator[tuple[str, Composition]]:
    if flags.case and flags.case.startswith("{"):
        yield "it", Composition.parse(flags.case)
        return
    first, count = flags.first, flags.count
    if flags.case:
        flags.seed, first = map(int, flags.case.split(":"))
        count = 1
    for index in range(first, first + count):
        yield f"{flags.seed}:{index}", generate(flags.seed, index)
