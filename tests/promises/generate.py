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
    layer,
    shape_of,
    summarise,
)
from mixing_layers import METRICS as IN_LAYERS
from mixing_layers import PENALTIES, STATES
from objectives import (
    LOSSES,
    METRICS,
    OPTIMIZER_OPTIONS,
    OPTIMIZERS,
    SCHEDULES,
    STATEFUL,
    WHOLE,
)
from own_optimizers import NEW, OWN, SCALING
from row_operations import MIXING, PLACES
from storage_layers import SIZES

from tfgpipe.schedules import SCHEDULES as NAMED

THEN = ("another K",) * 3 + ("file",) * 3 + ("weights", "eager")
REMAT = ("except_last", "always", "never", "mixed")
READS = ("none", "before", "after")
EARLY = tuple(name for name in NAMED if name != "gpipe")
# No gradient begins before all outputs are there, and none is skipped.
WAITS: Options = {"schedule": "gpipe", "bad_row": None}


# ----------------------------------------------------------------------- topics
def _nothing(g: Growth) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Topic:
    """What a case is about. Of tuples a value is drawn."""

    grow: Callable[[Growth], Any] = _nothing
    is_graph: bool | None = None  # None to draw it
    inputs: str | None = None
    is_first: bool = False  # its layers come first
    before: Options = dataclasses.field(default_factory=dict)
    after: Options = dataclasses.field(default_factory=dict)


def _unfrozen(g: Growth) -> None:
    built = {"built": [None, *g.shape]} if g.rng.random() < 0.7 else {}
    options = {"kernel_regularizer": ("l1", "l2"), **built}
    name = g.add("dense", units="width", **options)
    g.found["frozen"], g.found["unfreezes"] = (name,), True


def _state_afar(g: Growth) -> None:
    """A mean over rows that a later layer reads."""
    kinds = ("kept_average", {}), ("kept_queue", {})
    kind, options = g.rng.choice(
        (*kinds, ("odd_state", {"rule": ("mean", "last")}))
    )
    name = g.add(kind, **options)
    for _ in range(g.rng.choice((0, 1, 2))):
        g.add("layer_norm")
    g.add("state_reader", keeps=False, of=name)


def _of_inputs(**values: Any) -> Topic:
    overrides = ("loss of x", "loss of x", "metrics of x")
    return Topic(after={"override": overrides, **WAITS}, **values)


def _named(name: str, **options: Any) -> Options:
    return {"name": name, "options": options}


_SCALED = {"optimizer": _named("SGD", scaled=True), "bad_row": None}
_router = layer("router")
TOPICS = {
    "attribute that is changed": Topic(
        layer("changed", units="width", phase=(True, False, False)),
        is_graph=True,
        after={"infers": True},
    ),
    "bytes": _of_inputs(is_graph=False, inputs="bytes"),
    "drawn state": Topic(layer("drawn_state", reads=READS)),
    "own moments": Topic(layer("own_moments", momentum=0.8)),
    "loss that assigns or draws": Topic(after={**WAITS, "stateful": True}),
    "loss that is scaled": Topic(
        after={**WAITS, "optimizer": tuple(map(_named, sorted(SCALING)))}
    ),
    "made frozen": Topic(layer("frozen_weight", made=True, when="later")),
    "frozen by itself": Topic(
        layer("frozen_weight", made=False, when=("at once", "later"))
    ),
    "layer that is not built": Topic(
        layer("spare", units="width"), after=_SCALED
    ),
    "metric in a layer": Topic(
        layer(
            "odd_metric",
            rule=(*sorted(IN_LAYERS), "reset"),
            adds=(True, False, False),
        )
    ),
    "names": _of_inputs(is_graph=True, inputs="names"),
    "policy of the model": Topic(
        is_graph=True,
        after={
            **WAITS,
            "override": "own policy",
            "optimizer": (_named("SGD"), _named("Adam")),
        },
    ),
    "resource": Topic(
        layer("resource"), after={**WAITS, "override": "assigns resources"}
    ),
    "router": Topic(_router),
    "router of tokens": Topic(_router, is_graph=False, inputs="tokens"),
    "rows mixed": Topic(
        layer("mixed", how=tuple(sorted(MIXING)), place=tuple(sorted(PLACES)))
    ),
    "size of a row": Topic(
        layer(
            "sized",
            units="width",
            axis=1,
            size=tuple(sorted(SIZES)),
            phase=(None, None, True, False),
        ),
        True,
        "sequence",
        True,
        before={"length": (1, 2, 4, 4, 6, 8, 10, 12)},
        after={"infers": (True, False)},
    ),
    "size of a batch": Topic(
        layer("sized", units="width", axis=0, size=("even", "of four", "one")),
        is_graph=True,
        after={"batch_size": 4, "source": ("remainder", "arrays")},
    ),
    "state afar": Topic(_state_afar),
    "state that is no mean": Topic(
        layer("odd_state", "state", rule=tuple(sorted(STATES)), reads=READS)
    ),
    "sum that is added": Topic(
        layer("odd_penalty", rule=tuple(sorted(PENALTIES)))
    ),
    "tape inside": Topic(layer("differentiating")),
    "unfrozen": Topic(_unfrozen),
    "weights of the model": Topic(
        is_graph=True,
        after={
            "override": "own weights",
            "then": ("weights", "weights", "another K", "eager"),
        },
    ),
}


def _drawn(rng: random.Random, values: Options) -> Options:
    return {
        name: rng.choice(value) if isinstance(value, tuple) else value
        for name, value in values.items()
    }


# ------------------------------------------------------------------- a case
def generate(seed: int, index: int) -> Case:
    """Returns the case of a seed and an index."""
    rng = random.Random(f"{seed}:{index}")
    topic = TOPICS[rng.choice(sorted(TOPICS))]
    if rng.random() < 0.05:
        topic = Topic()
    found: Options = {"seed": rng.randrange(1000), **_drawn(rng, topic.before)}
    is_graph = topic.is_graph
    if is_graph is None:
        is_graph = rng.random() < 0.5
    growth = (_graph if is_graph else _list)(rng, found, topic)
    if rng.random() < 0.18:
        found["override"] = rng.choice(("compute_loss", "more loss", "losses"))
        if rng.random() < 0.5:
            growth.add("idle")
    _objective(rng, growth, found)
    _optimizer(rng, found)
    _data(rng, found)
    _pipeline(rng, found)
    _mid_run(rng, found)
    if is_graph:
        found.setdefault("outputs", (growth.at,))
    found["layers"] = tuple(growth.specs)
    found["then"] = rng.choice(THEN)
    found.update(_drawn(rng, topic.after))
    if found.pop("stateful", False) and isinstance(found["losses"], str):
        found.update(losses=rng.choice(sorted(STATEFUL)), labels="real")
        found.update(metrics=(), weighted_metrics=(), weights=None)
    _settle(rng, found)
    return Case(**found)


def _list(rng: random.Random, found: Options, topic: Topic) -> Growth:
    kinds = ("vector", "sequence", "image", "tokens", "dict")
    kind = topic.inputs or rng.choices(kinds, (10, 4, 2, 3, 1))[0]
    found["inputs"] = kind
    found["explicit_input"] = kind != "dict" and rng.random() < 0.3
    g = Growth(rng, found, shape_of(found), planned=[topic.grow])
    embedding = None
    if kind in ("vector", "sequence") and rng.random() < 0.25:
        alike(g)
    if kind == "bytes":
        g.add("rescaling", keeps=False, scale=1 / 128)
    elif kind == "dict":
        g.add("combine", keeps=False)
    elif kind == "tokens":
        g.has_mask = rng.random() < 0.6
        sizes = {"input_dim": VOCABULARY, "output_dim": 4}
        embedding = g.add(
            "embedding", keeps=False, mask_zero=g.has_mask, **sizes
        )
        g.shape = (*g.shape, 4)
    grow(g, rng.choice((1, 2, 3, 3, 4, 4, 5, 6)))
    rank = len(g.shape)
    if embedding and g.width == 4 and rng.random() < 0.5:
        g.add("logits", keeps=False, of=embedding)
        g.shape = (*g.shape[:-1], VOCABULARY)
    elif rank > 1 and (rank == 3 or rng.random() < 0.5):
        summarise(g)
    names = [s.name for s in g.specs if s.kind not in ("again", "closure")]
    if names and "frozen" not in found and rng.random() < 0.12:
        found["frozen"] = (rng.choice(names),)
    return g


def _graph(rng: random.Random, found: Options, topic: Topic) -> Growth:
    kind = topic.inputs or rng.choices(
        ("vector", "pair", "sequence"), (6, 3, 2)
    )
    found["inputs"] = kind if isinstance(kind, str) else kind[0]
    g = Growth(rng, found, shape_of(found), "x0", planned=[topic.grow])
    count = 1 + (found["inputs"] in ("pair", "names"))
    g.tensors = [(f"x{i}", g.shape) for i in range(count)]
    grow_graph(g, rng.choice((2, 3, 4, 4, 5, 6)), topic.is_first)
    return g


# ------------------------------------------------------------------- objective
def _objective(rng: random.Random, g: Growth, found: Options) -> None:
    rank = len(g.shape) + 1
    if rng.random() < 0.12 and not g.has_mask:
        _two_outputs(rng, g, found, rank)
        return
    name = rng.choice([n for n in sorted(LOSSES) if LOSSES[n].fits(rank)])
    if rng.random() < 0.25:
        name = "MeanSquaredError"
    suits = LOSSES[name]
    kind = rng.choice(suits.labels)
    units = max(g.width, 2) if g.width < 8 else 3
    if rng.random() < 0.8 or units != g.width:
        g.add("dense", keeps=False, units=units)
        g.shape = (*g.shape[:-1], units)
    if suits.activation:
        g.add("activation", keeps=False, activation=suits.activation)
    elif rng.random() < 0.1:
        g.add("activation", activation=ACTIVATIONS)
    found["losses"], found["labels"] = name, kind
    if name[0].isupper() and rng.random() < 0.25:
        found["reduction"] = rng.choice(("sum", "mean_with_sample_weight"))
    fitting = [
        n
        for n, m in sorted(METRICS.items())
        if kind in m.labels
        and m.fits(rank)
        and m.activation in (None, suits.activation)
    ]
    for where in ("metrics", "weighted_metrics"):
        if fitting and rng.random() < 0.4:
            count = min(len(fitting), rng.choice((1, 1, 2)))
            found[where] = tuple(rng.sample(fitting, count))
    choices = [None, None, "rows" if rank == 2 else "positions"]
    choices += ["classes"] * (kind == "ids" and rank == 2)
    found["weights"] = rng.choice(choices)
    if rng.random() < 0.1:
        found["loss_weights"] = [0.3]


def _two_outputs(
    rng: random.Random, g: Growth, found: Options, rank: int
) -> None:
    fitting = [n for n in sorted(LOSSES) if LOSSES[n].fits(rank)]
    second = rng.choice(
        [n for n in fitting if LOSSES[n].activation != "softplus"]
    )
    named = not g.at and rng.random() < 0.7
    activation = LOSSES[second].activation or "linear"
    if at := g.at:
        first = g.add("dense", keeps=False, units=2)
        g.at = at
        g.add("dense", keeps=False, units=3, activation=activation)
        found["outputs"] = (first, g.at)
    else:
        options = {"activation": activation, "named": named}
        g.add("outputs", keeps=False, units=[2, 3], **options)
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
    found["optimizer"] = _named(name, **options)


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
        found["optimizer"] = _named("AdamW", weight_decay=0.1)
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
        found["optimizer"]["options"].pop("scaled", None)
    if "cells" in found:
        found["num_partitions"] = len(found["cells"])
    # A graph of plain Keras forgets where the slots of this one begin.
    in_graph = not isinstance(found["losses"], str) or "toggle" in found
    if found["optimizer"]["name"] == "ScheduleFreeAdamW" and in_graph:
        found["optimizer"] = _named("Looking")


def _settle(rng: random.Random, found: Options) -> None:
    """What Keras's files do not keep is in no file; features of pipelines."""
    is_stateful = {*flat(found["losses"])} & STATEFUL.keys()
    if is_stateful and found["then"] in ("file", "weights"):
        found["then"] = "another K"
    if any(spec.kind == "tf_noise" for spec in found["layers"]):
        found["then"] = None
        # Refused where it is drawn again.
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
