"""Draws a case: the same one for the same (seed, index), on any machine.

Each has a topic, mostly: layers, and what else they need to show. Weights are
read by odd ways, something is changed later, or rows are mixed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from case import Case, Options, flat
from data_sources import SOURCES, VOCABULARY
from growth import (
    ACTIVATIONS,
    Growth,
    alike,
    grow,
    grow_graph,
    read_aside,
    shape_of,
    summarise,
)
from mixing_layers import LENGTHS, PENALTIES, STATES
from mixing_layers import METRICS as IN_LAYERS
from objectives import (
    LOSSES,
    METRICS,
    OPTIMIZER_OPTIONS,
    OPTIMIZERS,
    SCHEDULES,
    STATEFUL,
    WHOLE,
    Suits,
)
from own_optimizers import NEW, OWN, SCALING
from row_operations import MIXING, PLACES
from storage_layers import SIZES

from tfgpipe.schedules import SCHEDULES as NAMED

THEN = ("another K",) * 3 + ("file",) * 3 + ("weights", "eager")
REMAT = ("except_last", "always", "never", "mixed")
READS = ("none", "before", "after")
EARLY = tuple(name for name in NAMED if name != "gpipe")
LENGTHS_DRAWN = (1, 2, 4, 4, 6, 8, 10, 12, 2050)


# ----------------------------------------------------------------------- topics
def _nothing(*_: Any) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Topic:
    """What a case is about.

    Attributes:
        grow: Adds layers.
        end: Changes a case that is drawn.
        is_graph: Whether the model is functional; None to draw it.
        inputs: What `x` is; None to draw it.
        is_first: Whether its layers come first.
    """

    grow: Callable[[Growth, Options], Any] = _nothing
    end: Callable[[random.Random, Options], Any] = _nothing
    is_graph: bool | None = None
    inputs: str | None = None
    is_first: bool = False


def _layer(kind: str, *needs: str, **options: Any) -> Any:
    """Adds a layer with options; lists and functions draw theirs.

    Args:
        kind: Of the layer.
        *needs: What it takes of the shape: "units" or "width".
        **options: Values; tuples to choose from, or a share of trues.
    """

    def add(g: Growth, found: Options) -> str:
        drawn = {
            name: g.rng.random() < value
            if isinstance(value, float)
            else g.rng.choice(value)
            for name, value in options.items()
        }
        return g.add(kind, **dict.fromkeys(needs, g.width), **drawn)

    return add


def _unfrozen(g: Growth, found: Options) -> None:
    options: Options = {"kernel_regularizer": g.rng.choice(("l1", "l2"))}
    if g.rng.random() < 0.7:
        options["built"] = [None, *g.shape]
    name = g.add("dense", units=g.width, **options)
    found["frozen"], found["unfreezes"] = (name,), True


def _made_frozen(g: Growth, found: Options) -> None:
    made = g.rng.random() < 0.4
    when = "later" if made else g.rng.choice(("at once", "later"))
    g.add("frozen_weight", made=made, when=when)


def _sized(g: Growth, found: Options) -> None:
    if len(g.shape) == 2:
        phase = g.rng.choice((None, None, True, False))
        sizes = g.rng.sample(sorted(SIZES), len(SIZES))
        size = next(s for s in sizes if SIZES[s](found["length"]))
        if g.rng.random() < 0.2:
            size = g.rng.choice(sorted(SIZES))
        g.add("sized", units=g.width, axis=1, size=size, phase=phase)


def _odd_state(g: Growth, found: Options) -> None:
    rule, reads = g.rng.choice(sorted(STATES)), g.rng.choice(READS)
    g.note("state", g.add("odd_state", rule=rule, reads=reads))


def _state_afar(g: Growth, found: Options) -> None:
    """A mean over rows that a later layer reads."""
    kind = g.rng.choice(("kept_average", "kept_queue", "odd_state"))
    options = {"rule": g.rng.choice(("mean", "last"))}
    name = g.add(kind, **(options if kind == "odd_state" else {}))
    for _ in range(g.rng.choice((0, 1, 2))):
        g.add("layer_norm")
    g.add("state_reader", keeps=False, of=name)


def _positions(g: Growth, found: Options) -> None:
    if len(g.shape) == 2:
        g.add("positions", by=g.rng.choice((*sorted(LENGTHS), "unique")))


def _drawn(g: Growth, found: Options) -> None:
    if g.rng.random() < 0.5:
        g.add("drawn_state", reads=g.rng.choice(READS))
    else:
        g.add("own_moments", momentum=0.8)


def _end_length(rng: random.Random, found: Options) -> None:
    found["infers"] = rng.random() < 0.5
    if found["length"] == max(LENGTHS_DRAWN):
        found.update(rows=5, batch_size=5, epochs=1)


def _end_rows(rng: random.Random, found: Options) -> None:
    """A number of rows that a step knows."""
    found["batch_size"] = 4
    found["source"] = rng.choice(("remainder", "remainder", "arrays"))


def _whole(found: Options, **values: Any) -> None:
    """No gradient begins before all outputs are there, and none is skipped."""
    found.update(schedule="gpipe", bad_row=None, **values)


def _end_loss(rng: random.Random, found: Options) -> None:
    name, losses = rng.choice(sorted(STATEFUL)), found["losses"]
    _whole(found)
    if isinstance(losses, str):
        weights = found.get("weights")
        found.update(
            losses=name,
            labels="real",
            metrics=(),
            weighted_metrics=(),
            weights=weights if weights != "classes" else None,
        )
    elif isinstance(losses, dict):
        found["losses"] = {**losses, "a": name}
    else:
        found["losses"] = [name, *losses[1:]]


def _end_scale(rng: random.Random, found: Options) -> None:
    name = rng.choice(sorted(SCALING))
    _whole(found, optimizer={"name": name, "options": {}})


def _end_inputs(rng: random.Random, found: Options) -> None:
    found["override"] = rng.choice(("loss of x", "loss of x", "metrics of x"))
    found["schedule"] = "gpipe"
    if isinstance(found["losses"], str):
        found["bad_row"] = None


def _end_positions(rng: random.Random, found: Options) -> None:
    """Of an optimizer that sees slices one by one."""
    if rng.random() < 0.8:
        name = rng.choice(("Adam", "Adagrad", "RMSprop"))
        found["optimizer"] = {"name": name, "options": {}}


def _without(found: Options, *names: str) -> Options:
    for name in names:
        found["optimizer"]["options"].pop(name, None)
    return found["optimizer"]["options"]


def _end_scaled(rng: random.Random, found: Options) -> None:
    _without(found, "use_ema", "loss_scale_factor")["scaled"] = True
    found["bad_row"] = None


def _end_policy(rng: random.Random, found: Options) -> None:
    _without(found, "loss_scale_factor", "scaled")
    _whole(found, override="own policy")


def _end_weights(rng: random.Random, found: Options) -> None:
    found["override"] = "own weights"
    found["then"] = rng.choice(("weights", "weights", "another K", "eager"))


def _end_resource(rng: random.Random, found: Options) -> None:
    _whole(found, override="assigns resources")


_router = _layer("router")
TOPICS = {
    "attribute that is changed": Topic(
        _layer("changed", "units", phase=0.3),
        lambda rng, found: found.update(infers=True),
        is_graph=True,
    ),
    "bytes": Topic(end=_end_inputs, is_graph=False, inputs="bytes"),
    "drawn state": Topic(_drawn),
    "loss that assigns or draws": Topic(end=_end_loss),
    "loss that is scaled": Topic(end=_end_scale),
    "made frozen": Topic(_made_frozen),
    "layer that is not built": Topic(_layer("spare", "units"), _end_scaled),
    "metric in a layer": Topic(
        _layer("odd_metric", rule=(*sorted(IN_LAYERS), "reset"), adds=0.3)
    ),
    "names": Topic(end=_end_inputs, is_graph=True, inputs="names"),
    "policy of the model": Topic(end=_end_policy, is_graph=True),
    "positions": Topic(
        _positions, _end_positions, inputs="sequence", is_first=True
    ),
    "resource": Topic(_layer("resource"), _end_resource),
    "router": Topic(_router),
    "router of tokens": Topic(_router, is_graph=False, inputs="tokens"),
    "rows mixed": Topic(
        _layer("mixed", how=sorted(MIXING), place=sorted(PLACES))
    ),
    # None, so that cases of others keep their numbers.
    "simple": Topic(),
    "size of a row": Topic(_sized, _end_length, True, "sequence", True),
    "size of a batch": Topic(
        _layer("sized", "units", axis=(0,), size=("even", "of four", "one")),
        _end_rows,
        is_graph=True,
    ),
    "state afar": Topic(_state_afar),
    "state that is no mean": Topic(_odd_state),
    "still simple": Topic(),
    "sum that is added": Topic(_layer("odd_penalty", rule=sorted(PENALTIES))),
    "tape inside": Topic(_layer("differentiating")),
    "unfrozen": Topic(_unfrozen),
    "weights of the model": Topic(end=_end_weights, is_graph=True),
}


# ------------------------------------------------------------------- a case
def generate(seed: int, index: int) -> Case:
    """Returns the case of a seed and an index."""
    rng = random.Random(f"{seed}:{index}")
    found: Options = {"seed": rng.randrange(1000)}
    has_topic = rng.random() < 0.95
    topic = TOPICS[rng.choice(sorted(TOPICS))] if has_topic else Topic()
    if topic.grow is _sized:
        found["length"] = rng.choice(LENGTHS_DRAWN)
    is_graph = rng.random() < 0.5
    if topic.is_graph is not None:
        is_graph = topic.is_graph
    growth = (_graph if is_graph else _list)(rng, found, topic)
    if rng.random() < 0.18:
        kinds = ["compute_loss", "more loss", "losses"]
        found["override"] = rng.choice(kinds)
        if rng.random() < 0.5:
            growth.add("idle")
    _objective(rng, growth, found)
    _optimizer(rng, found)
    _data(rng, found)
    _pipeline(rng, found)
    _mid_run(rng, found)
    if is_graph:
        if isinstance(found["losses"], str) and rng.random() < 0.05:
            _similarities(growth, found)
        found.setdefault("outputs", (growth.at,))
    found["layers"] = tuple(growth.specs)
    found["then"] = rng.choice(THEN)
    topic.end(rng, found)
    _settle(rng, found)
    return Case(**found)


def _list(rng: random.Random, found: Options, topic: Topic) -> Growth:
    kinds = ("vector", "sequence", "image", "tokens", "dict")
    kind = topic.inputs or rng.choices(kinds, (10, 4, 2, 3, 1))[0]
    found["inputs"] = kind
    found["explicit_input"] = kind != "dict" and rng.random() < 0.3
    growth = Growth(rng, shape_of(found))
    growth.planned = [lambda g: topic.grow(g, found)]
    embedding = None
    if kind in ("vector", "sequence") and rng.random() < 0.25:
        alike(growth, found)
    if topic.is_first:
        growth.add_planned(is_last=True)
    if kind == "bytes":
        growth.add("rescaling", keeps=False, scale=1 / 128)
    elif kind == "dict":
        growth.add("combine", keeps=False)
    elif kind == "tokens":
        growth.has_mask = rng.random() < 0.6
        options = {"input_dim": VOCABULARY, "output_dim": 4}
        options["mask_zero"] = growth.has_mask
        embedding = growth.add("embedding", keeps=False, **options)
        growth.shape = (*growth.shape, 4)
    grow(growth, rng.choice((1, 2, 3, 3, 4, 4, 5, 6)))
    rank = len(growth.shape)
    if embedding and growth.width == 4 and rng.random() < 0.5:
        growth.add("logits", keeps=False, of=embedding)
        growth.shape = (*growth.shape[:-1], VOCABULARY)
    elif rank > 1 and (rank == 3 or rng.random() < 0.5):
        summarise(growth)
    names = [s.name for s in growth.specs if s.kind not in ("again", "closure")]
    if names and "frozen" not in found and rng.random() < 0.12:
        found["frozen"] = (rng.choice(names),)
    return growth


def _graph(rng: random.Random, found: Options, topic: Topic) -> Growth:
    kinds = ("vector", "pair", "sequence")
    kind = topic.inputs or rng.choices(kinds, (6, 3, 2))[0]
    found["inputs"] = kind
    growth = Growth(rng, shape_of(found), at="x0")
    growth.planned = [lambda g: topic.grow(g, found)]
    count = 1 + (kind in ("pair", "names"))
    growth.tensors = [(f"x{i}", growth.shape) for i in range(count)]
    if kind == "sequence" and topic.inputs is None and rng.random() < 0.2:
        read_aside(growth)
    grow_graph(growth, rng.choice((2, 3, 4, 4, 5, 6)), topic.is_first)
    return growth


def _similarities(growth: Growth, found: Options) -> None:
    """Outputs of rows by rows, which no micro-batch has."""
    growth.add("op", keeps=False, which="similarities")
    found.update(
        losses="MeanSquaredError",
        labels="real",
        weights=None,
        metrics=(),
        weighted_metrics=(),
        source="arrays",
        rows=4,
        batch_size=4,
        infers=False,
        other_replicas=None,
        other_micro_batches=None,
    )
    found.pop("bad_row", None)


# ------------------------------------------------------------------- objective
def _objective(rng: random.Random, growth: Growth, found: Options) -> None:
    if rng.random() < 0.12 and not growth.has_mask:
        _two_outputs(rng, growth, found)
        return
    rank = len(growth.shape) + 1
    name = rng.choice(sorted(n for n in LOSSES if _fits(LOSSES[n], rank)))
    if rng.random() < 0.25:
        name = "MeanSquaredError"
    suits = LOSSES[name]
    kind = rng.choice(suits.labels)
    units = growth.width if growth.width < 8 else 3
    if rng.random() < 0.8 or units != growth.width:
        growth.add("dense", keeps=False, units=max(units, 2))
        growth.shape = (*growth.shape[:-1], max(units, 2))
    if suits.activation:
        growth.add("activation", keeps=False, activation=suits.activation)
    elif rng.random() < 0.1:
        growth.add("activation", activation=rng.choice(ACTIVATIONS))
    found["losses"], found["labels"] = name, kind
    if name[0].isupper() and rng.random() < 0.25:
        found["reduction"] = rng.choice(("sum", "mean_with_sample_weight"))
    fitting = sorted(
        n
        for n, m in METRICS.items()
        if kind in m.labels
        and _fits(m, rank)
        and m.activation in (None, suits.activation)
    )
    for where in ("metrics", "weighted_metrics"):
        if fitting and rng.random() < 0.4:
            count = min(len(fitting), rng.choice((1, 1, 2)))
            found[where] = tuple(rng.sample(fitting, count))
    choices = [None, None, "rows" if rank == 2 else "positions"]
    if kind == "ids" and rank == 2:
        choices.append("classes")
    found["weights"] = rng.choice(choices)
    if rng.random() < 0.1:
        found["loss_weights"] = [0.3]


def _fits(suits: Suits, rank: int) -> bool:
    return suits.rank is None or rank <= suits.rank


def _two_outputs(rng: random.Random, growth: Growth, found: Options) -> None:
    rank = len(growth.shape) + 1
    names = (n for n in LOSSES if _fits(LOSSES[n], rank))
    second = rng.choice(
        sorted(n for n in names if LOSSES[n].activation != "softplus")
    )
    named = rng.random() < 0.7
    activation = LOSSES[second].activation or "linear"
    if growth.at:
        named, at = False, growth.at
        first = growth.add("dense", keeps=False, units=2)
        growth.at = at
        growth.add("dense", keeps=False, units=3, activation=activation)
        found["outputs"] = (first, growth.at)
    else:
        options = {"activation": activation, "named": named}
        growth.add("outputs", keeps=False, units=[2, 3], **options)
    losses = ("MeanSquaredError", second)
    found["losses"] = dict(zip("ab", losses)) if named else list(losses)
    if rng.random() < 0.5:
        found["loss_weights"] = {"a": 0.3, "b": 1.7} if named else [0.3, 1.7]
    if rng.random() < 0.4:
        found["metrics"] = (rng.choice(("mae", "CosineSimilarity")),)
    if rank == 2 and rng.random() < 0.3:
        found["weights"] = "rows"


def _optimizer(rng: random.Random, found: Options) -> None:
    drawn = rng.choice(("SGD", "SGD", "Adam", "AdamW", *OPTIMIZERS))
    plain = rng.choice(("SGD", "SGD", drawn))  # stable ones show more
    name = rng.choice((*(plain,) * 12, *sorted(OWN), *NEW))
    options: Options = {}
    if name == "SGD" and rng.random() < 0.5:
        options["momentum"] = 0.9
    if rng.random() < 0.35:
        options.update(rng.choice(OPTIMIZER_OPTIONS))
    if rng.random() < 0.2 and name != "Twice":
        options["decay"] = rng.choice(sorted(SCHEDULES))
    unfit = {"loss_scale_factor", "use_ema"} & set(options)
    if rng.random() < 0.08 and not unfit:
        options["scaled"] = True
    found["optimizer"] = {"name": name, "options": options}


# ------------------------------------------------------------ data and pipeline
def _data(rng: random.Random, found: Options) -> None:
    found["rows"] = rng.randint(5, 12)
    found["batch_size"] = rng.randint(3, min(6, found["rows"]))
    found["epochs"] = rng.choice((1, 1, 2))
    found["infers"] = rng.random() < 0.15  # two traces more
    found["source"] = rng.choice(("arrays", "arrays", "arrays", *SOURCES))
    if found.get("weights") == "classes":
        found["source"] = rng.choice(("arrays", "dataset"))


def _pipeline(rng: random.Random, found: Options) -> None:
    found["num_replicas"] = rng.choices((1, 2, 3), (10, 2, 1))[0]
    found["num_partitions"] = rng.choice((1, 2, 2, 3, 3, 4))
    others = {1, 2, 3, 4} - {found["num_partitions"]}
    found["other_partitions"] = rng.choice(sorted(others))
    found["num_micro_batches"] = rng.choice((1, 1, 2, 2, 3, 4))
    is_whole = bool({*flat(found["losses"])} & WHOLE)
    if rng.random() < 0.3 and (not is_whole or rng.random() < 0.05):
        found["schedule"] = rng.choice(EARLY)
    found["remat"] = rng.choice(REMAT)
    found["other_remat"] = rng.choice(REMAT[:3])
    found["remat_groups"] = rng.choices((1, 2), (8, 1))[0]
    if rng.random() < 0.5 or found["remat_groups"] > 1:
        found["cut_seed"] = rng.randrange(1, 1000)


def _mid_run(rng: random.Random, found: Options) -> None:
    """Subclasses, what callbacks change, and other M and R at load."""
    if found.get("override") == "compute_loss" and rng.random() < 0.4:
        decay = {"weight_decay": 0.1}  # of what has a gradient
        found["optimizer"] = {"name": "AdamW", "options": decay}
    if found.get("override") == "losses" and rng.random() < 0.6:
        found["override"] = "losses of the model"
    if "override" in found and rng.random() < 0.9:
        found["schedule"] = "gpipe"
    if rng.random() < 0.15:
        what = ["trainable", "weights"]
        if "decay" not in found["optimizer"]["options"]:
            what.append("learning_rate")
        found["toggle"], found["epochs"] = rng.choice(what), 2
    if rng.random() < 0.3:
        found["other_micro_batches"] = rng.choice((1, 2, 3))
    if rng.random() < 0.2:
        found["other_replicas"] = rng.choice((1, 2))
    takes_nan = found["inputs"] in ("vector", "sequence", "image", "pair")
    if takes_nan and rng.random() < 0.08:
        found["bad_row"] = rng.randrange(12)
        found.update(source="arrays", infers=False, rows=9, batch_size=3)
        # A scale of the loss is lowered then, as it is meant to be.
        _without(found, "scaled")
    if "cells" in found:
        found["num_partitions"] = len(found["cells"])
    # A graph of plain Keras forgets where the slots of this one begin.
    in_graph = not isinstance(found["losses"], str) or "toggle" in found
    if found["optimizer"]["name"] == "ScheduleFreeAdamW" and in_graph:
        found["optimizer"] = {"name": "Looking", "options": {}}


def _settle(rng: random.Random, found: Options) -> None:
    """What Keras's files do not keep is in no file; features of pipelines."""
    is_stateful = {*flat(found["losses"])} & STATEFUL.keys()
    if is_stateful and found["then"] in ("file", "weights"):
        found["then"] = "another K"
    if found.get("bad_row") is None:
        found.pop("bad_row", None)
    if any(spec.kind == "tf_noise" for spec in found["layers"]):
        # Refused where it is drawn again, in a graph and eagerly.
        found["then"] = rng.choice((None, "eager"))
        found["remat"] = rng.choice(("never", "always"))
    found["dtype"] = rng.choices(("float64", "float32"), (3, 1))[0]
    # XLA takes many seconds.
    found["jit_compile"] = found["then"] != "eager" and rng.random() < 0.03
    if found["remat"] in ("except_last", "never") and rng.random() < 0.4:
        found["remat"] = rng.choice((0.9, 0.6, 0.3))
    if rng.random() < 0.2:
        found["weights_on"] = "host"
    if found["remat"] == "never" and rng.random() < 0.4:
        found["remat"] = "offload"
    if not found["jit_compile"] and rng.random() < 0.15:
        found["shards"] = rng.choice((2, 2, 3))
    # At another K the head may begin elsewhere, and so other sums be made.
    same_head = found["then"] in (None, "eager")
    if found["num_micro_batches"] > 1 and same_head and rng.random() < 0.2:
        found["head_parts"] = rng.choice((2, 3))
