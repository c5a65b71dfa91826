"""Draws a case: the same one for the same (seed, index), on any machine."""

from __future__ import annotations

import random

from case import Case, Options
from data_sources import SHAPES, SOURCES, VOCABULARY
from generate_graph import graph
from generate_layers import ACTIVATIONS, grow
from generate_odd import Topic, draw
from generate_wide import alike
from grow_positions import summarise
from growth import Growth
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
from own_optimizers import NEW, OWN

from tfgpipe.schedules import SCHEDULES as NAMED

THEN = ("another K",) * 3 + ("file",) * 3 + ("weights", "eager")
REMAT = ("except_last", "always", "never", "mixed")
# Rules in the place of which a share is drawn now and then.
SHARED = ("except_last", "never")
SHARES = (0.9, 0.6, 0.3)
EARLY = tuple(name for name in NAMED if name != "gpipe")


def generate(
    seed: int, index: int, wide: bool = False, odd: bool = False
) -> Case:
    """The case of a seed and an index.

    Args:
        seed: Of all cases.
        index: Of this one.
        wide: Whether functional models, state, optimizers of a user's and
            changes while it trains are drawn, too.
        odd: Whether each case is about what `generate_odd.py` draws, too.
    """
    wide = wide or odd
    rng = random.Random(f"{seed}:{index}" + ":wide" * wide + ":odd" * odd)
    found: Options = {"seed": rng.randrange(1000)}
    topic = draw(rng, found) if odd else None
    is_graph = wide and rng.random() < 0.5
    if topic and topic.is_graph is not None:
        is_graph = topic.is_graph
    growth = (
        graph(rng, found, topic)
        if is_graph
        else _layers(rng, found, wide, topic)
    )
    if wide:
        _override(rng, growth, found)
    _objective(rng, growth, found)
    _optimizer(rng, found, wide)
    _data(rng, found)
    _pipeline(rng, found)
    if wide:
        _mid_run(rng, found)
    if is_graph:
        if isinstance(found["losses"], str) and rng.random() < 0.05:
            _similarities(rng, growth, found)
        found.setdefault("outputs", (growth.at,))
    found["layers"] = tuple(growth.specs)
    found["then"] = rng.choice(THEN)
    if topic:
        topic.end(rng, found)
        _settle(found)
    if any(spec.kind == "tf_noise" for spec in growth.specs):
        # Refused where it is drawn again, in a graph and eagerly.
        found["then"] = rng.choice((None, "eager"))
        found["remat"] = rng.choice(("never", "always"))
    found["dtype"] = rng.choices(("float64", "float32"), (3, 1))[0]
    # XLA takes many seconds.
    found["jit_compile"] = found["then"] != "eager" and rng.random() < 0.03
    if found["remat"] in SHARED and rng.random() < 0.4:
        found["remat"] = rng.choice(SHARES)
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
    return Case(**found)


# ---------------------------------------------------------------------- layers
def _settle(found: Options) -> None:
    """What Keras's files do not keep is in no file."""
    losses = found["losses"]
    values = losses.values() if isinstance(losses, dict) else losses
    names = {losses} if isinstance(losses, str) else set(values)
    if names & STATEFUL.keys() and found["then"] in ("file", "weights"):
        found["then"] = "another K"
    if found.get("bad_row") is None:
        found.pop("bad_row", None)


def _layers(
    rng: random.Random,
    found: Options,
    wide: bool = False,
    topic: Topic | None = None,
) -> Growth:
    kinds = ("vector", "sequence", "image", "tokens", "dict")
    kind = (topic and topic.inputs) or rng.choices(kinds, (10, 4, 2, 3, 1))[0]
    found["inputs"] = kind
    found["explicit_input"] = kind != "dict" and rng.random() < 0.3
    growth = Growth(rng, SHAPES.get(kind, (4,)), is_wide=wide)
    if topic:
        growth.planned = [lambda g: topic.grow(g, found)]
    embedding = None
    if wide and kind in ("vector", "sequence") and rng.random() < 0.25:
        alike(rng, growth, found)
    if topic and topic.is_first:
        growth.add_planned(is_last=True)
    if kind == "bytes":
        growth.add("rescaling", keeps=False, scale=1 / 128)
    elif kind == "dict":
        growth.add("combine", keeps=False)
    elif kind == "tokens":
        growth.has_mask = rng.random() < 0.6
        embedding = growth.add(
            "embedding",
            keeps=False,
            input_dim=VOCABULARY,
            output_dim=4,
            mask_zero=growth.has_mask,
        )
        growth.shape = (*growth.shape, 4)
    grow(growth, rng.choice((1, 2, 3, 3, 4, 4, 5, 6)))
    if embedding and growth.width == 4 and rng.random() < 0.5:
        growth.add("logits", keeps=False, of=embedding)
        growth.shape = (*growth.shape[:-1], VOCABULARY)
    elif len(growth.shape) > 1 and (
        len(growth.shape) == 3 or rng.random() < 0.5
    ):
        summarise(growth)
    names = [s.name for s in growth.specs if s.kind not in ("again", "closure")]
    if names and "frozen" not in found and rng.random() < 0.12:
        found["frozen"] = (rng.choice(names),)
    return growth


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
    second = rng.choice(
        sorted(
            name
            for name, suits in LOSSES.items()
            if _fits(suits, rank) and suits.activation != "softplus"
        )
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
        growth.add(
            "outputs",
            keeps=False,
            units=[2, 3],
            activation=activation,
            named=named,
        )
    names = ("MeanSquaredError", second)
    found["losses"] = dict(zip("ab", names)) if named else list(names)
    if rng.random() < 0.5:
        found["loss_weights"] = {"a": 0.3, "b": 1.7} if named else [0.3, 1.7]
    if rng.random() < 0.4:
        found["metrics"] = (rng.choice(("mae", "CosineSimilarity")),)
    if rank == 2 and rng.random() < 0.3:
        found["weights"] = "rows"


def _optimizer(rng: random.Random, found: Options, wide: bool = False) -> None:
    name = rng.choice(("SGD", "SGD", "Adam", "AdamW", *OPTIMIZERS))
    options: Options = {}
    if wide:  # stable ones show more
        plain = rng.choice(("SGD", "SGD", name))
        name = rng.choice((*(plain,) * 12, *sorted(OWN), *NEW))
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


def _data(rng: random.Random, found: Options) -> None:
    found["rows"] = rng.randint(5, 12)
    found["batch_size"] = rng.randint(3, min(6, found["rows"]))
    found["epochs"] = rng.choice((1, 1, 2))
    found["infers"] = rng.random() < 0.15  # two traces more
    found["source"] = rng.choice(("arrays", "arrays", "arrays", *SOURCES))
    if found.get("weights") == "classes":
        found["source"] = rng.choice(("arrays", "dataset"))


# -------------------------------------------------------------------- pipeline
def _pipeline(rng: random.Random, found: Options) -> None:
    found["num_replicas"] = rng.choices((1, 2, 3), (10, 2, 1))[0]
    found["num_partitions"] = rng.choice((1, 2, 2, 3, 3, 4))
    others = {1, 2, 3, 4} - {found["num_partitions"]}
    found["other_partitions"] = rng.choice(sorted(others))
    found["num_micro_batches"] = rng.choice((1, 1, 2, 2, 3, 4))
    if rng.random() < 0.3:
        names = found["losses"]
        values = names.values() if isinstance(names, dict) else names
        names = {names} if isinstance(names, str) else set(values)
        if not names & WHOLE or rng.random() < 0.05:
            found["schedule"] = rng.choice(EARLY)
    found["remat"] = rng.choice(REMAT)
    found["other_remat"] = rng.choice(REMAT[:3])
    found["remat_groups"] = rng.choices((1, 2), (8, 1))[0]
    if rng.random() < 0.5 or found["remat_groups"] > 1:
        found["cut_seed"] = rng.randrange(1, 1000)


def _override(rng: random.Random, growth: Growth, found: Options) -> None:
    if rng.random() < 0.18:
        kinds = ["compute_loss", "more loss", "losses"]
        found["override"] = rng.choice(kinds)
        if rng.random() < 0.5:
            growth.add("idle")


def _similarities(rng: random.Random, growth: Growth, found: Options) -> None:
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
        found["optimizer"]["options"].pop("scaled", None)
    if "cells" in found:
        found["num_partitions"] = len(found["cells"])
    # A graph of plain Keras forgets where the slots of this one begin.
    in_graph = not isinstance(found["losses"], str) or "toggle" in found
    if found["optimizer"]["name"] == "ScheduleFreeAdamW" and in_graph:
        found["optimizer"] = {"name": "Looking", "options": {}}
